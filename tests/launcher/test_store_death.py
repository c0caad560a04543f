"""The c10d store of a world ends by itself: noticed, said, replaced where nobody had come to it; no built world minds."""

from __future__ import annotations

import os
import signal

import psutil
from launcher_bed import Bed, processes_with, until

WAITS = (
    "import os, socket, sys, time\n"
    "where = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
    "def wait(name):\n"
    "    while not os.path.exists(os.path.join(sys.argv[1], name)): time.sleep(0.01)\n"
)


def store_of(bed: Bed, port: int) -> int:
    """Pid of the process of this test that listens at a port."""

    def find() -> int | None:
        for pid in processes_with(bed.mark):
            try:
                if any(c.laddr.port == port and c.status == "LISTEN" for c in psutil.Process(pid).net_connections()):
                    return pid
            except psutil.Error:
                continue
        return None

    return until(f"a store at {port}", find)


def test_a_store_nobody_has_come_to_is_replaced_at_its_place(bed: Bed) -> None:
    text = WAITS + "print(where[1])\nwait('go')\nsocket.create_connection(where).close()\nprint('reached')\n"
    agent = bed.launch(bed.script("late.py", text), str(bed.folder))
    port = int(until("the port", agent.stdout))
    first = store_of(bed, port)
    os.kill(first, signal.SIGKILL)
    assert f"the c10d store at 127.0.0.1:{port} (pid {first}) ended: killed by SIGKILL; no worker had come to it" in (
        agent.event("store_lost")["reason"]
    )
    assert store_of(bed, port) != first
    (bed.folder / "go").touch()
    assert agent.wait() == 0, agent.stderr()
    assert agent.stdout().endswith("reached\n")
    assert agent.kinds() == ["started", "store_lost", "finished"]


def test_a_store_that_was_in_use_is_said_and_the_script_goes_on(bed: Bed) -> None:
    text = WAITS + "socket.create_connection(where).close()\nprint(where[1])\nwait('go')\n"
    agent = bed.launch(bed.script("uses.py", text), str(bed.folder))
    port = int(until("the port", agent.stdout))
    until("its use to be seen", (agent.folder / "rendezvous").exists)
    os.kill(store_of(bed, port), signal.SIGTERM)
    reason = agent.event("store_lost")["reason"]
    assert reason.endswith("ended: killed by SIGTERM")
    assert reason in agent.stderr()
    (bed.folder / "go").touch()
    assert agent.wait() == 0
    assert agent.kinds() == ["started", "store_lost", "finished"]


def test_a_built_world_trains_on_and_the_next_one_has_a_store_of_its_own(bed: Bed) -> None:
    agent = bed.fake(1, 1)
    until("the standby", lambda: agent.status()["nodes"][0]["standbys"] == 1)
    (store,) = [
        pid for pid in processes_with(bed.mark)
        if any(c.status == "LISTEN" and c.family.name == "AF_INET" for c in psutil.Process(pid).net_connections())
    ]  # fmt: skip
    os.kill(store, signal.SIGKILL)
    assert agent.event("store_lost")["generation"] == 1
    before = agent.pids()
    done = bed.cli("resize", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert agent.pids()["w0"] == before["w0"]
    agent.event("retired")
    assert bed.cli("resize", "--workers", "1").returncode == 0
    agent.event("retired", 2)
    assert agent.finish() == 0
    assert agent.kinds().count("store_lost") == 1  # that of generation 2, closed when it was retired, is not
