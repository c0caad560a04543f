"""A restart keeps the processes that are well: which, how they begin again, and what happens if one cannot."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from launcher_bed import FAKE_WORKER, Agent, Bed, until


def ranks(agent: Agent) -> dict[int, int]:
    """Pids by rank."""
    return {row["rank"]: row["pid"] for row in agent.workers() if row["rank"] is not None}


def trained(agent: Agent, at_least: int = 100) -> dict[int, int]:
    """Wait until the present attempt has trained so far; pids by rank."""
    until(f"step {at_least}", lambda: (agent.status()["step"] or 0) >= at_least)
    return ranks(agent)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kept(agent: Agent, count: int = 1) -> set[int]:
    """Pids that the ``count``-th restart has kept, of the only node."""
    return set(agent.event("restarting", count)["kept"].get("n0", []))


def failures(agent: Agent) -> list[tuple[str, int | None]]:
    events = [event for event in agent.events() if event["kind"] == "worker_failed"]
    return [(event["worker"], event["exit_code"]) for event in events]


def test_survivors_keep_their_processes_and_ranks_however_often_one_is_killed(bed: Bed) -> None:
    agent = bed.fake(3, 0, "--max-restarts", "3")
    before = trained(agent)
    for number, victim in enumerate((1, 1, 0), 1):
        kill(before[victim])
        agent.event("world", number + 1)
        after = trained(agent)
        survivors = {rank for rank in before if rank != victim}
        assert {rank for rank in before if after[rank] == before[rank]} == survivors
        assert kept(agent, number) == {before[rank] for rank in survivors}
        before = after
    status = agent.status()
    assert status["restarts"] == {"used": 3, "max": 3}
    assert status["last_restart"]["kept"] == {"n0": sorted(kept(agent, 3))}
    assert "restart 3 of 3: processes" in bed.cli("status").stdout
    assert agent.finish() == 0


def test_a_process_that_stays_begins_as_a_new_one_would(bed: Bed) -> None:
    """Environment, arguments, folder, files, hooks and the main module are those of a new process; imports are not."""
    script = bed.script(
        "again.py",
        "import atexit, json, os, signal, sys, threading\n"
        f"sys.path.append({str(FAKE_WORKER.parent)!r})\n"
        "import fake_worker\n"
        "state = {\n"
        "    'argv': sys.argv, 'cwd': os.getcwd(), 'mine': 'mine' in os.environ, 'path': len(sys.path),\n"
        "    'hook': sys.excepthook is sys.__excepthook__, 'old': 'left' in globals(), 'name': __name__,\n"
        "    'term': signal.getsignal(15) == signal.SIG_DFL, 'file': __file__,\n"
        "    'env': {n: os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_PORT',\n"
        "            'TORCHELASTIC_RESTART_COUNT', 'TORCHELASTIC_ERROR_FILE', 'LIVERUN_WORKER')},\n"
        "}\n"
        "print(json.dumps(state), flush=True)\n"
        "left = 1\n"
        "os.environ['mine'] = '1'\n"
        "os.chdir('/')\n"
        "sys.excepthook = print\n"
        "signal.signal(15, lambda *_: None)\n"
        "fake_worker.imported = getattr(fake_worker, 'imported', 0) + 1\n"
        "print('run', fake_worker.imported, flush=True)\n"
        "atexit.register(print, 'last words', flush=True)\n"
        "fake_worker.FakeWorker().run()\n",
    )
    agent = bed.launch(
        "--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", "out", "--redirects", "3", script, "--flag",
        FAKE_BEHAVE="{}",
    )  # fmt: skip
    agent.event("world")
    pids = trained(agent)
    kill(pids[1])
    agent.event("world", 2)
    assert ranks(agent)[0] == pids[0]
    assert agent.finish() == 0
    folder = next((bed.folder / "out").iterdir())
    first, second = ((folder / f"attempt_{n}" / "0" / "stdout.log").read_text().splitlines() for n in (0, 1))
    assert (first[1], second[1]) == ("run 1", "run 2")
    assert "last words" in first
    assert second.count("last words") == 1
    old, new = json.loads(first[0]), json.loads(second[0])
    assert (old["env"].pop("TORCHELASTIC_RESTART_COUNT"), new["env"].pop("TORCHELASTIC_RESTART_COUNT")) == ("0", "1")
    assert (old["env"].pop("LIVERUN_WORKER"), new["env"].pop("LIVERUN_WORKER")) == ("w0", "w2")
    assert new["env"].pop("TORCHELASTIC_ERROR_FILE").endswith("/attempt_1/0/error.json")
    assert old["env"].pop("TORCHELASTIC_ERROR_FILE").endswith("/attempt_0/0/error.json")
    assert old["env"].pop("MASTER_PORT") != new["env"].pop("MASTER_PORT")
    assert old == new
    assert (new["old"], new["mine"], new["hook"], new["term"]) == (False, False, True, True)


def test_a_rank_whose_script_raises_is_replaced_and_named_and_the_others_stay(bed: Bed) -> None:
    agent = bed.fake(3, 0, "--max-restarts", "1", behave={"w1": {"fail_at": 200}})
    before = ranks(agent)
    agent.event("world", 2)
    after = ranks(agent)
    assert [after[rank] == before[rank] for rank in range(3)] == [True, False, True]
    assert failures(agent) == [("w1", 1)]
    assert "RuntimeError: w1 fails at step 200" in agent.stderr()
    assert agent.finish() == 0


def test_of_ranks_that_all_fail_the_first_is_named_and_the_others_stay(bed: Bed) -> None:
    agent = bed.fake(2, 0, "--max-restarts", "1", behave={f"w{n}": {"fail_at": 200} for n in range(4)})
    before = ranks(agent)
    agent.event("world", 2)
    after = ranks(agent)
    assert len(kept(agent)) == 1
    assert len({*before.values()} & {*after.values()}) == 1
    assert agent.wait() == 1  # the second time nothing is left of the budget
    assert len(failures(agent)) == 2
    assert "first failure: worker w" in agent.stderr()
    assert "exit code 1" in agent.stderr()


def test_a_survivor_that_does_not_come_to_its_end_is_killed_and_replaced(bed: Bed) -> None:
    agent = bed.fake(
        3, 0, "--max-restarts", "1", "--shutdown-timeout", "2", behave={"w0": {"unwind": "ignore"}}
    )
    before = trained(agent)
    kill(before[1])
    agent.event("world", 2)
    after = ranks(agent)
    assert [after[rank] == before[rank] for rank in range(3)] == [False, False, True]
    assert not alive(before[0])
    assert "worker w0 has not left its script in 1 s; it gets a new process" in agent.stderr()
    assert failures(agent) == [("w1", -9)]
    assert agent.finish() == 0


@pytest.mark.parametrize(("what", "name"), [("thread", "reader"), ("patch", "json.timed")])
def test_a_survivor_that_leaves_something_behind_is_replaced(bed: Bed, what: str, name: str) -> None:
    agent = bed.fake(2, 0, "--max-restarts", "1", behave={"w0": {"unwind": what}})
    before = trained(agent)
    kill(before[1])
    agent.event("world", 2)
    assert not {*before.values()} & {*ranks(agent).values()}
    assert f"left something behind ({name})" in agent.log("w0", "stderr")
    assert failures(agent) == [("w1", -9)]
    assert agent.finish() == 0


def test_a_standby_takes_the_place_of_the_dead_and_a_new_one_takes_its(bed: Bed) -> None:
    agent = bed.fake(2, 1, "--max-restarts", "1")
    until("the standby", lambda: [row["id"] for row in agent.workers() if row["state"] == "standby"])
    before, standby = trained(agent), agent.pids()["w2"]
    kill(before[1])
    agent.event("world", 2)
    assert ranks(agent) == {0: before[0], 1: standby}
    assert kept(agent) == {before[0], standby}
    until("a new standby", lambda: [row["pid"] for row in agent.workers() if row["state"] == "standby"])
    assert agent.finish() == 0


def test_a_kept_standby_is_a_standby_again_where_no_place_is_free(bed: Bed) -> None:
    agent = bed.fake(1, 2, "--max-restarts", "1")
    until("the standbys", lambda: sum(row["state"] == "standby" for row in agent.workers()) == 2)
    pids = set(agent.pids().values())
    victim = trained(agent)[0]
    kill(victim)
    agent.event("world", 2)
    until("two standbys", lambda: sum(row["state"] == "standby" for row in agent.workers()) == 2)
    after = set(agent.pids().values())
    assert len(after) == 3
    assert pids - {victim} <= after
    assert bed.cli("resize", "--workers", "3").returncode == 0
    assert agent.finish() == 0


def test_a_world_that_was_resized_comes_back_as_it_was(bed: Bed) -> None:
    agent = bed.fake(1, 1, "--max-restarts", "1")
    assert bed.cli("resize", "--workers", "2", "--layout", "tp=2").returncode == 0
    before = trained(agent)
    until("steps of both worlds", lambda: agent.status()["step"] >= 200)
    kill(before[1])
    world = agent.event("world", 2)["world"]
    assert (world["size"], world["layout"]["tp"]) == (2, 2)
    assert ranks(agent)[0] == before[0]
    assert agent.finish() == 0


def test_a_rank_killed_while_a_resize_prepares_fails_the_resize_and_the_others_stay(bed: Bed) -> None:
    agent = bed.fake(2, 1, "--max-restarts", "1", behave={"w2": {"prepare": "silent"}})
    before = trained(agent)
    asked = bed.cli_start("resize", "--workers", "3")
    agent.event("preparing", 2)
    standby = agent.pids()["w2"]
    kill(before[1])
    _, stderr = asked.communicate(timeout=60)
    assert asked.returncode == 1
    assert "worker w1 (rank 1) failed: killed by SIGKILL" in stderr
    agent.event("world", 2)
    assert ranks(agent) == {0: before[0], 1: standby}
    assert agent.finish() == 0


@pytest.mark.parametrize("why", ["fresh", "no step"])
def test_all_processes_are_new(bed: Bed, why: str) -> None:
    """Where that was asked for, and after an attempt without a step: what processes bring along may be its cause."""
    words = ("--restart", "fresh") if why == "fresh" else ()
    behave = {worker: {"fail_at": 20} for worker in ("w0", "w1")} if why == "no step" else {}
    agent = bed.fake(2, 0, "--max-restarts", "1", *words, behave=behave)
    before = ranks(agent)
    if why == "fresh":
        kill(trained(agent)[1])
    agent.event("world", 2)
    assert not {*before.values()} & {*ranks(agent).values()}
    assert kept(agent) == set()
    assert agent.event("restarting")["reason"] == "restart 1 of 1: no process stays"
    assert agent.finish() == 0


def test_a_script_that_cannot_run_twice_in_a_process_gets_a_new_one_at_no_cost(bed: Bed) -> None:
    script = bed.script(
        "once.py",
        "import sys\n"
        f"sys.path.append({str(FAKE_WORKER.parent)!r})\n"
        "import fake_worker\n"
        "assert not hasattr(fake_worker, 'ran'), 'this library cannot be set up twice'\n"
        "fake_worker.ran = True\n"
        "fake_worker.FakeWorker().run()\n",
    )
    agent = bed.launch("--nproc-per-node", "2", "--max-restarts", "2", script, FAKE_BEHAVE="{}")
    agent.event("world")
    before = trained(agent)
    kill(before[1])
    agent.event("world", 2)
    after = trained(agent)
    assert kept(agent) == {before[0]}
    assert not {*before.values()} & {*after.values()}
    assert failures(agent) == [("w1", -9)]
    kill(after[1])
    agent.event("world", 3)
    assert kept(agent, 2) == set()  # it is not tried again
    assert agent.status()["restarts"] == {"used": 2, "max": 2}
    assert agent.finish() == 0


def test_a_plain_script_gets_new_processes(bed: Bed) -> None:
    pids = bed.folder / "pids"
    script = bed.script(
        "plain.py",
        "import os, socket, time\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))).close()\n"
        f"print(os.getpid(), file=open({str(pids)!r}, 'a'), flush=True)\n"
        f"while len(open({str(pids)!r}).readlines()) < 2: time.sleep(0.01)\n"
        "restart = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if os.environ['RANK'] == '1' and not restart: os.kill(os.getpid(), 9)\n"
        "if not restart: time.sleep(60)\n",
    )
    agent = bed.launch("--nproc-per-node", "2", "--max-restarts", "1", script)
    assert agent.wait() == 0, agent.stderr()
    found = [int(line) for line in pids.read_text().splitlines()]
    assert len(found) == len(set(found)) == 4
    assert kept(agent) == set()


def test_processes_that_wait_end_with_the_job(bed: Bed) -> None:
    """While one survivor is still on its way to its end, the job is stopped: those that wait go too."""
    agent = bed.fake(
        3, 0, "--max-restarts", "1", "--shutdown-timeout", "4", behave={"w0": {"unwind": "ignore"}}
    )
    before = trained(agent)
    kill(before[1])
    until("the one that stays", lambda: "does not come to its end" in agent.log("w0"))
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    assert not [pid for pid in before.values() if alive(pid)]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
