"""The environment variables that torchrun itself reads: file timers, health check, stuck workers, levels, PYTHON_EXEC."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import stat
import sys
import urllib.request
from pathlib import Path

import pytest
from launcher_bed import Bed, until

from launcher.options import parse_log_level
from launcher.timers import MAX_LINE_BYTES, FileTimers, Timer
from launcher.wedged import Wedged, process_state

OK = "print('ran')\n"

# --- file timers -------------------------------------------------------------------------------------------------


class Timers:
    """A pipe's reader without the pipe: lines go in, kills come out."""

    def __init__(self) -> None:
        self.now, self.said, self.killed = 1000.0, list[str](), list[tuple[int, int]]()
        self.workers = {11: "w0", 12: "w0", 21: "w1"}
        self.timers = FileTimers(
            Path("/p"), worker_of=self.workers.get, say=self.said.append, wall_clock=lambda: self.now,
            kill=lambda pid, number: self.killed.append((pid, number)),
        )  # fmt: skip

    def line(self, pid: int, scope: str, after: float, number: int = 9) -> None:
        values = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": self.now + after, "signal": number}
        self.timers.take(json.dumps(values).encode() + b"\n")


def test_a_timer_that_is_given_back_ends_nobody_and_one_that_is_not_ends_its_process_once() -> None:
    t = Timers()
    t.line(11, "step", 5)
    t.line(11, "eval", 6)
    t.line(21, "step", 5)
    t.line(21, "step", -5000)  # given back
    t.now += 4
    assert t.timers.act() == pytest.approx(1)
    assert t.killed == []
    t.now += 10
    assert t.timers.act() is None
    assert t.killed == [(11, signal.SIGKILL)]
    assert t.said == ["worker w0 (pid 11) is not done with 'step' in its time: SIGKILL"]


def test_a_timer_names_only_processes_of_the_job_and_a_signal_of_0_ends_nobody() -> None:
    t = Timers()
    t.line(1, "init", 1)
    t.line(12, "a data worker", 1, signal.SIGTERM)
    t.line(21, "look only", 1, 0)
    t.now += 2
    t.timers.act()
    assert t.killed == [(12, signal.SIGTERM)]


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense", b"[]", b"{}", b"[" * 4000, b"x" * (MAX_LINE_BYTES + 1),
        b'{"pid": -1, "scope_id": "s", "expiration_time": 1, "signal": 9}',
        b'{"pid": 1, "scope_id": "s", "expiration_time": NaN, "signal": 9}',
        b'{"pid": 1, "scope_id": "s", "expiration_time": 1, "signal": 999}',
        b'{"pid": 1, "scope_id": "s", "expiration_time": true, "signal": 9}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_timer_is_ignored_and_said_once(line: bytes) -> None:
    t = Timers()
    t.timers.take(line + b"\n" + line + b"\n")
    assert len(t.said) == 1
    assert t.timers.act() is None
    t.line(11, "s", 1)
    assert t.timers.act() == pytest.approx(1)


def test_a_line_may_come_in_pieces_but_not_without_an_end() -> None:
    t = Timers()
    whole = json.dumps({"version": 1, "pid": 11, "scope_id": "s", "expiration_time": 1001.0, "signal": 9}).encode() + b"\n"
    for byte in whole:
        t.timers.take(bytes([byte]))
    assert t.timers.act() == pytest.approx(1)
    assert t.said == []
    t.timers.take(b"y" * (MAX_LINE_BYTES + 1))
    assert t.said == ["/p: a line without an end was ignored"]
    assert Timer.parse(whole).scope == "s"


def test_a_pipe_is_made_for_the_job_and_nothing_else_at_its_place_is_touched(tmp_path: Path) -> None:
    async def scene() -> None:
        path, said = tmp_path / "timers", list[str]()
        os.mkfifo(path)  # what an earlier job left
        timers = FileTimers(path, worker_of=lambda _: None, say=said.append)
        timers.start()
        assert stat.S_ISFIFO(path.stat().st_mode)
        assert path.stat().st_mode & 0o777 == 0o600
        await timers.stop()
        assert not path.exists()
        path.write_text("mine")
        with pytest.raises(FileExistsError):
            FileTimers(path, worker_of=lambda _: None, say=said.append).start()
        assert path.read_text() == "mine"

    asyncio.run(scene())


@pytest.mark.e2e
def test_torchs_own_timer_client_is_served(bed: Bed) -> None:
    pytest.importorskip("torch")
    script = bed.script(
        "timed.py",
        "import os, signal\n"
        "import torch.distributed.elastic.timer as timer\n"
        "timer.configure(timer.FileTimerClient(os.environ['TORCHELASTIC_TIMER_FILE']))\n"
        "with timer.expires(after=60, scope='short'): print('in time')\n"
        "with timer.expires(after=0.2, scope='long'): signal.pause()\n",
    )
    agent = bed.launch(script, TORCHELASTIC_ENABLE_FILE_TIMER="1")
    assert agent.wait() == 1
    assert agent.stdout() == "in time\n"
    assert "is not done with 'long' in its time: SIGKILL" in agent.stderr()
    assert "first failure: worker w0, rank 0, killed by SIGKILL" in agent.stderr()
    assert not (agent.folder / "timers").exists()


def test_a_timer_file_is_the_one_asked_for_and_one_that_cannot_be_served_is_said(bed: Bed) -> None:
    path = bed.folder / "pipe"
    script = bed.script("where.py", "import os, stat\np = os.environ['TORCHELASTIC_TIMER_FILE']\nprint(p, stat.S_ISFIFO(os.stat(p).st_mode))\n")
    agent = bed.launch(script, TORCHELASTIC_ENABLE_FILE_TIMER="1", TORCHELASTIC_TIMER_FILE=str(path))
    assert agent.wait() == 0, agent.stderr()
    assert agent.stdout() == f"{path} True\n"
    assert not path.exists()
    path.write_text("mine")
    agent = bed.launch(script, TORCHELASTIC_ENABLE_FILE_TIMER="1", TORCHELASTIC_TIMER_FILE=str(path))
    assert agent.wait() == 0
    assert "TORCHELASTIC_TIMER_FILE: no timers are served" in agent.stderr()
    assert path.read_text() == "mine"


# --- health check ------------------------------------------------------------------------------------------------


def test_the_health_check_answers_while_the_job_runs_and_no_longer(bed: Bed) -> None:
    script = bed.script("pause.py", "import signal\nsignal.signal(15, lambda *_: exit(0))\nsignal.pause()\n")
    agent = bed.launch("--nproc-per-node", "2", script, TORCHELASTIC_HEALTH_CHECK_PORT="0")
    said = until("the address", lambda: agent.stderr().partition("health check at ")[2].partition("\n")[0])
    for path in ("", "healthz"):
        with urllib.request.urlopen(said + path, timeout=10) as answer:
            assert (answer.status, json.loads(answer.read())["alive"]) == (200, True)
    assert said.startswith("http://127.0.0.1:")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(said, timeout=10)


def test_a_health_check_that_cannot_be_served_is_said_and_the_job_runs(bed: Bed) -> None:
    script = bed.script("ok.py", OK)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for value, sentence in (("x", "TORCHELASTIC_HEALTH_CHECK_PORT='x' is no port"), (port, "Address already in use")):
            agent = bed.launch(script, TORCHELASTIC_HEALTH_CHECK_PORT=value)
            assert (agent.wait(), agent.stdout()) == (0, "ran\n")
            assert sentence in agent.stderr()


# --- uninterruptible sleep ---------------------------------------------------------------------------------------


def test_only_a_worker_that_is_stuck_at_every_look_is_found() -> None:
    now, states = 0.0, {1: "D", 2: "S", 3: "D"}
    wedged = Wedged(10.0, clock=lambda: now, state_of=lambda pid: states[pid])
    pids = {"w0": 1, "w1": 2, "w2": 3}
    assert wedged.look(pids) is None
    now, states[3] = 9.0, "R"
    assert wedged.look(pids) is None
    states[3] = "D"
    now = 9.5
    assert wedged.look(pids) is None
    now = 12.0
    assert wedged.look(pids) == ("w0", 12.0)
    assert wedged.look({"w2": 3}) is None
    assert process_state(os.getpid()) in ("R", "S")
    assert process_state(2**22 + 1) == ""


WEDGED = """
import os, sys
os.mkfifo(sys.argv[1])
# a parent waits for its vfork in state D until the child has begun, and the child waits for a writer of the pipe
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
"""


def test_a_worker_the_kernel_holds_fails_the_job_without_a_restart(bed: Bed) -> None:
    agent = bed.launch(
        "--max-restarts", "5", "--shutdown-timeout", "0.2", bed.script("wedged.py", WEDGED), str(bed.folder / "pipe"),
        TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="0.3",
    )  # fmt: skip
    assert agent.wait() == 1
    assert "has been in uninterruptible sleep for 0." in agent.stderr()
    assert agent.kinds() == ["started", "worker_failed"]
    odd = bed.launch(bed.script("ok.py", OK), TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="soon")
    assert (odd.wait(), odd.stdout()) == (0, "ran\n")
    assert "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT='soon' is not a number of seconds, and is ignored" in odd.stderr()


# --- the rest ----------------------------------------------------------------------------------------------------


def test_the_log_level_says_how_much_the_agent_says(bed: Bed) -> None:
    script = bed.script("ok.py", OK)
    quiet, usual, chatty, odd = (
        bed.launch("--rdzv-conf", "a=b", script, **environ)
        for environ in ({"LOGLEVEL": "ERROR"}, {}, {"LOGLEVEL": "info"}, {"LOGLEVEL": "loud"})
    )
    assert [agent.wait() for agent in (quiet, usual, chatty, odd)] == [0] * 4
    assert quiet.stderr() == ""
    assert "run folder" in usual.stderr()
    assert "finished:" not in usual.stderr()
    assert "liverun: finished: the worker is done\n" in chatty.stderr()
    assert "LOGLEVEL='loud' is ignored: it is none of" in odd.stderr()
    failed = bed.launch(bed.script("bad.py", "raise ValueError('bad')"), LOGLEVEL="CRITICAL")
    assert failed.wait() == 1
    assert "ValueError: bad" in failed.stderr()  # an error is always said
    assert [parse_log_level(text)[0] for text in (None, "", "10", "Debug", "x")] == [
        logging.WARNING, logging.WARNING, 10, logging.DEBUG, logging.WARNING,
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_python_asked_for_runs_the_script(bed: Bed, method: str) -> None:
    python, used = bed.folder / "python", bed.folder / "used"
    python.write_text(f'#!/bin/sh\necho >> {used}\nVIA=mine exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = bed.script("via.py", "import os\nprint(os.environ.get('VIA'))\n")
    agent = bed.launch("--start-method", method, "--nproc-per-node", "2", script, PYTHON_EXEC=str(python))
    assert agent.wait() == 0, agent.stderr()
    # forked workers share the template's interpreter, and have the environment of the launcher
    how_often, via = (1, "None") if method == "fork" else (3, "mine")
    assert used.read_text().count("\n") == how_often
    assert sorted(agent.stdout().splitlines()) == [f"[default{rank}]:{via}" for rank in range(2)]


def test_what_has_no_meaning_here_is_handed_on_and_what_is_ignored_warns(bed: Bed) -> None:
    """Ranks cost no round trip in any case; the workers' own c10d clients read USE_LIBUV."""
    names = ("TORCH_ELASTIC_WORKER_IDENTICAL", "USE_LIBUV", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
    script = bed.script("show.py", f"import os\nprint(*(os.environ[n] for n in {names!r}))\n")
    agent = bed.launch(script, TORCH_ELASTIC_WORKER_IDENTICAL="1", USE_LIBUV="0", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert (agent.wait(), agent.stdout()) == (0, "1 0 0 1 True\n")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE is ignored" in agent.stderr()
