"""When a job that failed is tried again, and when not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launcher_bed import Bed

from launcher.decide import MAX_FRUITLESS, decide
from launcher.model import End, Exited, JobState, Node, NodeCleared, NodeEntered, Restart, Started
from launcher.nodes import JOIN_PATIENCE_S

RENDEZVOUS = (
    "import os, socket, time\n"
    "socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))).close()\n"
    "time.sleep(0.2)\n"
    "restart = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
)


@pytest.mark.parametrize(
    "text", ["import no_such_module\n", "def broken(:\n", "raise SystemExit(2)\n", "import os\nos.kill(os.getpid(), 11)\n"]
)
def test_a_script_that_fails_at_its_start_is_not_tried_again(bed: Bed, text: str) -> None:
    """Known complaint 12: restarts on a failure at start-up (a typo) until the budget is gone."""
    agent = bed.launch("--max-restarts", "5", bed.script("typo.py", text))
    assert agent.wait() == 1
    assert agent.kinds() == ["started", "worker_failed"]
    assert "not restarted, since the job never got as far as its first step" in agent.stderr()
    assert json.loads((agent.folder / "status.json").read_text())["restarts"] == {"used": 0, "max": 5}


def test_a_missing_script_is_not_tried_again(bed: Bed) -> None:
    """Known complaint 12: a typo in the name of the script."""
    agent = bed.launch("--max-restarts", "5", "nowhere.py")
    assert agent.wait() == 1
    assert agent.stderr().count("can't open file 'nowhere.py'") == 2  # as it was said, and in the report
    assert agent.kinds() == ["started", "worker_failed"]


def test_a_script_that_came_to_its_store_is_tried_again_with_the_restart_counted(bed: Bed) -> None:
    """Known complaint 13: one budget per job, shown in status."""
    script = bed.script("flaky.py", RENDEZVOUS + "print('try', restart)\nraise SystemExit(restart < 1)\n")
    agent = bed.launch("--max-restarts", "1", "--nproc-per-node", "2", script)
    assert agent.wait() == 0, agent.stderr()
    # the first try of one rank may have been ended before it said a word
    assert {"[default0]:try 1", "[default1]:try 1"} <= set(agent.stdout().splitlines())
    assert json.loads((agent.folder / "status.json").read_text())["restarts"] == {"used": 1, "max": 1}


def test_no_progress_in_three_tries_ends_with_93(bed: Bed) -> None:
    """Known complaint 14: an error that cannot heal is retried forever."""
    agent = bed.launch("--max-restarts", "50", bed.script("never.py", RENDEZVOUS + "raise ValueError('for ever')\n"))
    assert agent.wait() == 93
    assert agent.stderr().count("Traceback") == MAX_FRUITLESS + 1  # and once in the report
    assert f"{MAX_FRUITLESS} tries in a row made no progress" in agent.stderr()
    assert "its error: ValueError: for ever" in agent.stderr()
    assert json.loads((agent.folder / "job.json").read_text())["exit_code"] == 93


def test_a_budget_that_is_used_up_ends_with_1(bed: Bed) -> None:
    """Known complaint 13: the restart budget is per agent."""
    agent = bed.launch("--max-restarts", "1", bed.script("never.py", RENDEZVOUS + "raise ValueError\n"))
    assert agent.wait() == 1
    assert json.loads((agent.folder / "status.json").read_text())["restarts"] == {"used": 1, "max": 1}


def test_workers_are_asked_to_end_before_a_restart(bed: Bed) -> None:
    """Known complaint 15: one --shutdown-timeout for all paths, a restart included."""
    script = bed.script(
        "one.py",
        RENDEZVOUS.replace("time.sleep(0.2)\n", "")
        + "import signal, sys\n"
        "if restart: sys.exit(0)\n"
        "signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        f"mark = {str(bed.folder / 'up')!r}\n"
        "if os.environ['RANK'] == '0':\n"
        "    open(mark, 'w').close()\n"
        "    signal.pause()\n"
        "while not os.path.exists(mark): time.sleep(0.01)\n"
        "sys.exit(3)\n",
    )
    agent = bed.launch("--max-restarts", "1", "--nproc-per-node", "2", script)
    assert agent.wait() == 0, agent.stderr()
    assert agent.log("w0") == "saved\n"


def one_node(nproc: int, **more: Any) -> JobState:
    state = decide(0.0, JobState(**more), NodeEntered(node=Node(id="n0", host="h", nproc=nproc))).state
    assert state.booted == ("n0",)
    return state


def failing(state: JobState, now: float, *, under_way: bool, steps: dict[str, int] | None = None) -> tuple[JobState, list[object]]:
    state = decide(now, state, NodeCleared(node="n0")).state
    for rank in range(state.boot_size):
        state = decide(now, state, Started(worker=f"w{rank}", pid=1, boot_rank=rank)).state
    if steps is not None:
        state = JobState(**{**vars(state), "steps": steps, "standbys_started": True, "has_run": True})
    decision = decide(now + 1, state, Exited(worker="w0", code=1, under_way=under_way))
    return decision.state, [action for action in decision.actions if isinstance(action, Restart | End)]


def test_one_that_lived_long_enough_counts_as_having_run() -> None:
    state = one_node(1, max_restarts=9)
    state = decide(0.0, state, Started(worker="w0", pid=1, boot_rank=0)).state
    early = decide(JOIN_PATIENCE_S - 1, state, Exited(worker="w0", code=1)).actions
    late = decide(JOIN_PATIENCE_S + 1, state, Exited(worker="w0", code=1)).actions
    assert [type(action) for action in early if isinstance(action, Restart | End)] == [End]
    assert [type(action) for action in late if isinstance(action, Restart | End)] == [Restart]


def test_a_job_that_ran_once_is_tried_again_though_the_next_try_fails_at_its_start() -> None:
    state = one_node(1, max_restarts=9)
    state, first = failing(state, 0.0, under_way=True)
    state, second = failing(state, 10.0, under_way=False)
    assert [type(action) for action in (*first, *second)] == [Restart, Restart]


def test_tries_that_come_further_each_time_are_not_hopeless() -> None:
    """Known complaint 14: no progress in k tries; steps are what counts as progress."""
    state, kinds = one_node(1, max_restarts=20), []
    for step in (10, 20, 20, 20, 30, 5, 7, 9):
        state, actions = failing(state, 0.0, under_way=True, steps={"w0": step})
        kinds += [(type(action).__name__, getattr(action, "hopeless", False)) for action in actions]
    assert kinds == [("Restart", False)] * 7 + [("End", True)]


def test_the_mark_of_a_store_in_use_is_gone_at_the_end(bed: Bed) -> None:
    agent = bed.launch(bed.script("ok.py", RENDEZVOUS))
    assert agent.wait() == 0
    assert not Path(agent.folder / "rendezvous").exists()
