"""Whole resizes through a real agent, with workers that have no model."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from launcher_bed import Bed, until


def test_a_resize_commits_and_survivors_keep_rank_and_pid(bed: Bed) -> None:
    """Known complaint 29: every scale event restarts every worker."""
    agent = bed.fake(2, 2)
    before = agent.pids()
    grown = bed.cli("resize", "--workers", "4")
    assert grown.returncode == 0, grown.stderr
    assert grown.stdout == "generation 2: 4 workers, dp=4; pause 0.040 s, 4.0 MB moved, 8.0 MB local\n"
    for word in ("proposed", "preparing", "ready", "armed", "switching", "active"):
        assert f" {word} " in grown.stderr
    agent.event("retired")
    status = agent.status()
    assert [(w["id"], w["rank"], w["state"]) for w in status["nodes"][0]["workers"]] == [
        (f"w{rank}", rank, "ranked") for rank in range(4)
    ]
    shrunk = bed.cli("resize", "--workers", "2", "--layout", "tp=2", "--json")
    assert json.loads(shrunk.stdout)["to"]["layout"]["tp"] == 2
    agent.event("retired", 2)
    status = agent.status()
    assert {w["id"]: w["pid"] for w in status["nodes"][0]["workers"]}.items() >= before.items()
    assert status["nodes"][0]["standbys"] == 2
    assert status["generation"] == 3
    assert status["world"]["size"] == 2
    last = status["last_resize"]
    assert (last["outcome"], last["pause_s"], last["phases"]["prepare_s"]) == ("active", 0.04, 0.25)
    assert agent.finish() == 0
    assert agent.kinds()[-1] == "finished"
    for rank in range(2):
        assert f"[default{rank}]:w{rank} has rank {rank} in generation 3" in agent.stdout()
    assert "[default3]:w3 has rank 3 in generation 2" in agent.stdout()


def test_a_resize_asked_before_the_first_world_waits_for_it(bed: Bed) -> None:
    agent = bed.launch("--nproc-per-node", "1", "--standbys", "1", str(bed.folder / "late.py"))
    bed.script(
        "late.py",
        "import os, pathlib, time, runpy\n"
        f"while not pathlib.Path({str(bed.folder / 'go')!r}).exists(): time.sleep(0.01)\n"
        f"runpy.run_path({str(__import__('launcher_bed').FAKE_WORKER)!r}, run_name='__main__')\n",
    )
    agent.event("started")
    asked = bed.cli_start("resize", "--workers", "2")
    agent.event("queued")
    (bed.folder / "go").touch()
    stdout, stderr = asked.communicate(timeout=60)
    assert asked.returncode == 0, stderr
    assert stdout.startswith("generation 2: 2 workers")
    assert agent.finish() == 0


def test_old_world_trains_on_when_a_joiner_dies_while_preparing(bed: Bed) -> None:
    """Known complaint 30: a late joiner stalls all."""
    agent = bed.fake(2, 1, behave={"w2": {"prepare": "die"}})
    asked = bed.cli("resize", "--workers", "3")
    assert asked.returncode == 1
    assert "aborted: worker w2 (to be rank 2) ended while preparing: killed by SIGKILL" in asked.stderr
    status = agent.status()
    assert (status["generation"], status["world"]["size"]) == (1, 2)
    assert status["last_resize"]["outcome"] == "aborted"
    again = bed.cli("resize", "--workers", "3")  # w3 has taken the place of w2 in the pool
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("generation 3: 3 workers")
    assert agent.finish() == 0


def test_a_silent_joiner_is_named_killed_and_replaced(bed: Bed) -> None:
    agent = bed.fake(1, 1, behave={"w1": {"prepare": "silent"}})
    before = agent.pids()
    asked = bed.cli("resize", "--workers", "2", "--timeout", "1")
    assert asked.returncode == 1
    assert "aborted: worker w1 (to be rank 1) did not get ready in 1 s" in asked.stderr
    until("the replacement", lambda: [w["id"] for w in agent.workers() if w["state"] == "standby"] == ["w2"])
    assert agent.pids()["w0"] == before["w0"]
    assert agent.finish() == 0


def test_a_joiner_that_says_why_it_failed_is_quoted(bed: Bed) -> None:
    agent = bed.fake(1, 1, behave={"w1": {"prepare": "fail: no room for 3 TB"}})
    asked = bed.cli("resize", "--workers", "2")
    assert asked.returncode == 1
    assert "worker w1 (to be rank 1): no room for 3 TB" in asked.stderr
    assert agent.finish() == 0


def test_a_late_worker_makes_the_controller_try_a_later_step(bed: Bed) -> None:
    agent = bed.fake(2, 1, behave={"w0": {"late": 2}})
    assert bed.cli("resize", "--workers", "3").returncode == 0
    assert agent.kinds().count("cancelled") >= 2
    assert agent.finish() == 0


def test_workers_that_are_always_late_keep_the_old_world(bed: Bed) -> None:
    agent = bed.fake(2, 1, behave={"w0": {"late": 1000}})
    asked = bed.cli("resize", "--workers", "3")
    assert asked.returncode == 1
    assert "no step could be agreed on in 10 tries" in asked.stderr
    assert agent.status()["generation"] == 1
    assert agent.finish() == 0


def test_a_layout_the_model_cannot_take_is_refused_in_the_workers_words(bed: Bed) -> None:
    agent = bed.fake(2, 0, behave={"w0": {"check": "7 attention heads do not divide by tp=2"}})
    asked = bed.cli("resize", "--layout", "tp=2")
    assert (asked.returncode, asked.stdout) == (1, "")
    assert "refused: 7 attention heads do not divide by tp=2" in asked.stderr
    refused = bed.cli("resize", "--workers", "5")
    assert "5 workers were asked for, but this job has 2 (2 ranked, 0 standbys)" in refused.stderr
    assert "needs a multiple of 3" in bed.cli("resize", "--layout", "tp=3").stderr
    same = bed.cli("resize", "--workers", "2")
    assert (same.returncode, same.stdout) == (0, "nothing to do: the world is 2 workers, dp=2 already\n")
    assert agent.finish() == 0


def test_a_unanimous_no_gives_the_old_world_back(bed: Bed) -> None:
    no = {"vote": "no: digests differ"}
    agent = bed.fake(1, 1, behave={"w0": no, "w1": no})
    asked = bed.cli("resize", "--workers", "2")
    assert asked.returncode == 1
    assert re.search(r"aborted: not committed, worker w[01] \(.*rank .\): digests differ", asked.stderr)
    assert agent.status()["generation"] == 1
    assert agent.finish() == 0


def test_a_split_vote_fails_the_job_rather_than_making_two_worlds(bed: Bed) -> None:
    agent = bed.fake(2, 1, behave={"w1": {"vote": "no: digests differ"}})
    asked = bed.cli("resize", "--workers", "3")
    assert asked.returncode == 1
    assert "is split" in asked.stderr
    assert agent.wait() == 1
    assert "digests differ" in agent.stderr()


def test_a_request_during_a_resize_is_queued_and_the_last_wish_wins(bed: Bed) -> None:
    agent = bed.fake(1, 3, behave={"w1": {"prepare": "silent"}})
    hung = agent.pids()["w1"]
    asked = [bed.cli_start("resize", "--workers", "2")]
    agent.event("preparing", 2)
    for number, workers in enumerate(("4", "3"), 1):
        asked.append(bed.cli_start("resize", "--workers", workers))
        agent.event("queued", number)
    os.kill(hung, signal.SIGKILL)
    said = [process.communicate(timeout=60)[1] for process in asked]
    assert [process.returncode for process in asked] == [1, 1, 0], said
    assert "worker w1 (to be rank 1) ended while preparing" in said[0]
    assert "superseded by a later request (resize --workers 3)" in said[1]
    assert " queued " in said[2]
    assert agent.status()["world"]["size"] == 3
    assert agent.finish() == 0


def test_whoever_interrupts_a_request_hears_that_it_goes_on(bed: Bed) -> None:
    stop = bed.folder / "ended"
    agent = bed.fake(1, 1, behave={"w0": {"long_step": str(stop)}})
    until("the long step", lambda: "is in a long step" in agent.stdout())
    asked = bed.cli_start("resize", "--workers", "2")
    assert asked.stderr is not None
    assert "proposed" in asked.stderr.readline()
    asked.send_signal(signal.SIGINT)
    stderr = asked.communicate(timeout=60)[1]
    assert asked.returncode == 130
    job = agent.status()["job"]
    assert stderr.endswith(f"liverun: interrupted; what job {job} was asked for goes on, see 'liverun status'\n")
    assert "Traceback" not in stderr
    stop.touch()
    assert agent.event("active")["to"]["size"] == 2
    assert agent.finish() == 0


def test_a_rank_can_be_replaced_by_a_standby_and_becomes_one(bed: Bed) -> None:
    agent = bed.fake(2, 1)
    assert bed.cli("resize", "--replace", "0").returncode == 0
    agent.event("retired")
    assert {w["id"]: (w["rank"], w["state"]) for w in agent.workers()} == {
        "w2": (0, "ranked"), "w1": (1, "ranked"), "w0": (None, "standby"),
    }  # fmt: skip
    assert agent.finish() == 0


def test_a_ranked_worker_that_fails_ends_the_job_with_its_traceback(bed: Bed) -> None:
    """Known complaint 11: no traceback. Known complaint 10: the exit code is true."""
    agent = bed.fake(2, 1, behave={"w1": {"fail_at": 20}})
    assert agent.wait() == 1
    text = agent.stderr()
    assert "first failure: worker w1, rank 1, exit code 1" in text
    assert "RuntimeError: w1 fails at step 20" in text
    assert agent.kinds()[-1] == "worker_failed"


def test_a_whole_world_is_restarted_when_restarts_are_left(bed: Bed) -> None:
    agent = bed.fake(2, 1, "--max-restarts", "1", behave={"w1": {"fail_at": 20}})
    agent.event("world", 2)
    status = agent.status()
    assert status["restarts"] == {"used": 1, "max": 1}
    assert status["generation"] == 2
    assert agent.finish() == 0


def test_workers_that_end_while_a_resize_prepares_abort_it(bed: Bed) -> None:
    agent = bed.fake(1, 1, behave={"w1": {"prepare": "silent"}})
    asked = bed.cli_start("resize", "--workers", "2")
    agent.event("preparing", 2)
    assert agent.finish() == 0
    _, stderr = asked.communicate(timeout=60)
    assert asked.returncode == 1
    assert "the job is ending" in stderr


@pytest.mark.parametrize("how", ["stop", "SIGTERM"])
def test_a_job_ends_cleanly_when_asked_to(bed: Bed, how: str) -> None:
    agent = bed.fake(2, 1)
    socket = agent.folder / "agent.sock"
    assert socket.exists()
    if how == "stop":
        stopped = bed.cli("stop")
        assert (stopped.returncode, agent.wait()) == (0, 0)
        assert stopped.stdout.endswith("stopped\n")
    else:
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 128 + signal.SIGTERM
    assert not socket.exists()
    last = {agent.log(worker).splitlines()[-1].partition(" stops ")[2] for worker in ("w0", "w1")}
    assert len(last) == 1, "a rank that ends a step before the others leaves them in a collective"
    assert agent.kinds()[-1] == "stopped"
    assert json.loads((agent.folder / "status.json").read_text())["state"] == "stopped"


def test_the_world_lives_on_when_the_template_is_killed(bed: Bed) -> None:
    import psutil

    agent = bed.fake(1, 1)
    before = agent.pids()
    template = [
        child
        for child in psutil.Process(agent.process.pid).children()
        if child.pid not in before.values() and "liverun.template" in " ".join(child.cmdline())
    ]
    for child in template:  # the template, and the store of the first world
        child.kill()
    os.kill(before["w1"], signal.SIGKILL)  # makes the pool ask for a new template
    until("the replacement", lambda: [w["id"] for w in agent.workers() if w["state"] == "standby"] == ["w2"])
    assert agent.pids()["w0"] == before["w0"]
    assert bed.cli("resize", "--workers", "2").returncode == 0
    assert agent.finish() == 0


def test_events_can_be_followed_to_the_end_of_the_job(bed: Bed) -> None:
    agent = bed.fake(1, 1)
    following = bed.cli_start("events", "--json", "--follow", "--since", "2")
    assert bed.cli("resize", "--workers", "2").returncode == 0
    assert agent.finish() == 0
    stdout, _ = following.communicate(timeout=60)
    events = [json.loads(line) for line in stdout.splitlines()]
    assert [event["kind"] for event in events if event["kind"] != "cancelled"] == [
        "proposed", "preparing", "ready", "armed", "switching", "active", "finished",
    ]  # fmt: skip
    assert all(event["time"].endswith("Z") and event["generation"] >= 2 for event in events)
