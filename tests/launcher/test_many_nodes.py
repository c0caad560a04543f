"""Jobs of several nodes: real agents that meet at a store, on loopback, with workers that have no model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher_bed import FAKE_WORKER, QUICK, Agent, Bed, until


def free_port() -> int:
    """A port that every node of a test is told; nothing else on this host takes ports by number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nodes:
    """Agents of one job."""

    def __init__(self, bed: Bed, nnodes: str, *words: str, script: str = str(FAKE_WORKER), **environ: str) -> None:
        self.bed = bed
        self.words = ["--nnodes", nnodes, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf", QUICK, *words]
        self.script = script
        self.environ = {"HOME": str(bed.folder), "FAKE_BEHAVE": "{}", **environ}
        self.agents: list[Agent] = []

    def start(self, nproc: int = 2, *words: str, **environ: str) -> Agent:
        agent = self.bed.launch(
            *self.words, "--nproc-per-node", str(nproc), *words, self.script, **{**self.environ, **environ}
        )
        self.agents.append(agent)
        if len(self.agents) == 1:
            agent.event("started")  # it has the store, and is n0
        return agent

    def status(self) -> dict[str, Any]:
        return json.loads(self.bed.cli("status", "--json").stdout)


def ranks(status: dict[str, Any]) -> dict[int, str]:
    """Which node has which rank."""
    return {
        row["rank"]: node["id"] for node in status["nodes"] for row in node["workers"] if row["rank"] is not None
    }


def test_a_node_that_arrives_becomes_part_of_the_world_live(bed: Bed) -> None:
    """Known complaint 29: every scale event restarts every worker and discards progress."""
    nodes = Nodes(bed, "1:2")
    first = nodes.start()
    first.event("world")
    before = first.pids()
    second = nodes.start()
    assert first.event("active")["to"]["size"] == 4
    status = nodes.status()
    assert ranks(status) == {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    assert {row["id"]: row["pid"] for row in status["nodes"][0]["workers"] if row["rank"] is not None} == before
    bed.end_file.touch()
    assert [first.wait(), second.wait()] == [0, 0], first.stderr() + second.stderr()
    assert "n1.w0 has rank 2 in generation 2" in second.stdout()


def test_a_node_told_to_end_is_resized_away_first(bed: Bed) -> None:
    """Known complaints 3 and 4: one of several nodes stops, and nothing can go on, or it cannot come back."""
    nodes = Nodes(bed, "1:2")
    first, second = nodes.start(), nodes.start()
    first.event("active")
    second.signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM, second.stderr()
    until("n1 to be gone", lambda: len(nodes.status()["nodes"]) == 1)
    assert ranks(nodes.status()) == {0: "n0", 1: "n0"}
    assert first.event("active", 2)["to"]["size"] == 2
    again = nodes.start()
    first.event("active", 3)
    status = nodes.status()
    assert ranks(status) == {0: "n0", 1: "n0", 2: "n2", 3: "n2"}
    assert status["restarts"]["used"] == 0
    assert [event["generation"] for event in first.events() if event["kind"] == "active"] == [2, 3, 4]
    assert first.finish() == 0, first.stderr()
    assert again.wait() == 0


def test_drain_moves_the_work_to_standbys_elsewhere_and_ends_the_agent(bed: Bed) -> None:
    """Known complaint 33: one preemption rebuilds the cluster."""
    nodes = Nodes(bed, "1:3")
    first = nodes.start(2, "--standbys", "2")
    first.event("world")
    second = nodes.start()
    first.event("active")
    until("the standbys", lambda: nodes.status()["nodes"][0]["standbys"] == 2)
    done = bed.cli("drain", "n1")
    assert done.returncode == 0, done.stderr
    assert "node n1 (127.0.0.1) has left" in done.stdout
    assert second.wait() == 0, second.stderr()
    assert ranks(nodes.status()) == dict.fromkeys(range(4), "n0")
    assert first.finish() == 0


def test_what_cannot_be_drained_is_refused(bed: Bed) -> None:
    nodes = Nodes(bed, "2:2")
    first, second = nodes.start(1), nodes.start(1)
    first.event("world")
    done = bed.cli("drain", "n7")
    assert (done.returncode, "there is no node n7" in done.stderr) == (1, True)
    done = bed.cli("drain", "n1")
    assert (done.returncode, "the job needs 2 nodes" in done.stderr) == (1, True)
    assert first.finish() == 0
    assert second.wait() == 0


def test_when_a_node_goes_that_the_job_needs_all_stop_together_and_may_be_queued_again(bed: Bed) -> None:
    """Known complaint 10: interrupted is never success, on no node."""
    nodes = Nodes(bed, "2")
    first, second = nodes.start(1), nodes.start(1)
    first.event("world")
    second.signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM
    assert first.wait() == 75
    assert "node n1 leaves (SIGTERM), and the job needs 2 nodes" in first.stderr()


def test_one_node_beyond_the_maximum_waits_as_a_spare_and_steps_in(bed: Bed) -> None:
    """Known complaint 5: more live agents than the maximum closes the job."""
    nodes = Nodes(bed, "1:2")
    first, second = nodes.start(), nodes.start()
    first.event("active")
    third = nodes.start()
    until("a spare", lambda: [node["state"] for node in nodes.status()["nodes"]] == ["active", "active", "spare"])
    second.signal(signal.SIGINT)
    assert second.wait() == 128 + signal.SIGINT
    until("the spare to step in", lambda: set(ranks(nodes.status()).values()) == {"n0", "n2"})
    assert first.finish() == 0
    assert third.wait() == 0


@pytest.mark.parametrize("how", ["keep", "fresh"])
def test_a_spare_is_still_one_after_a_restart_and_steps_in_live(bed: Bed, how: str) -> None:
    nodes = Nodes(bed, "1:2", "--max-restarts", "1", "--restart", how)
    first, second = nodes.start(), nodes.start()
    first.event("active")
    third = nodes.start()

    def spares() -> set[int]:
        return {row["pid"] for row in nodes.status()["nodes"][2]["workers"]}

    until("a spare", lambda: [node["standbys"] for node in nodes.status()["nodes"]] == [0, 0, 2])
    before = spares()
    os.kill(first.pids()["w0"], signal.SIGKILL)
    first.event("world", 2)
    until("the spare again", lambda: [node["standbys"] for node in nodes.status()["nodes"]] == [0, 0, 2])
    assert set(ranks(nodes.status()).values()) == {"n0", "n1"}
    assert (spares() == before) is (how == "keep")
    second.signal(signal.SIGINT)
    assert second.wait() == 128 + signal.SIGINT
    until("the spare to step in", lambda: set(ranks(nodes.status()).values()) == {"n0", "n2"})
    assert nodes.status()["restarts"]["used"] == 1
    assert first.finish() == 0
    assert third.wait() == 0


def test_nodes_wait_for_each_other_in_any_order_and_pins_count(bed: Bed) -> None:
    """Known complaint 25: --node-rank 0 gets RANK 1."""
    script = bed.script(
        "where.py",
        "import os\n"
        "names = ('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_WORLD_SIZE')\n"
        "print('at', *(os.environ[name] for name in names))\n",
    )
    nodes = Nodes(bed, "2", script=script)
    one = nodes.start(1, "--node-rank", "1")
    one.event("started")
    zero = nodes.start(1, "--node-rank", "0")
    assert [zero.wait(), one.wait()] == [0, 0], zero.stderr() + one.stderr()
    assert "at 0 0 0 2 1 2" in zero.stdout()
    assert "at 1 0 1 2 1 2" in one.stdout()


def test_a_second_node_of_the_same_rank_is_turned_away(bed: Bed) -> None:
    nodes = Nodes(bed, "1:2")
    first = nodes.start(1, "--node-rank", "0")
    first.event("world")
    second = nodes.start(1, "--node-rank", "0")
    assert second.wait() == 1
    assert "--node-rank 0 is taken by node n0" in second.stderr()
    assert first.finish() == 0


PLAIN = """
import os, sys, time
print("begin", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not os.path.exists(os.environ["FAKE_END"]): time.sleep(0.02)
"""


def test_a_script_that_never_joins_is_started_again_when_nodes_come_and_go(bed: Bed) -> None:
    """Known complaint 6: after a node has gone the survivor restarts its workers again and again."""
    nodes = Nodes(bed, "1:2", script=bed.script("plain.py", PLAIN))
    first = nodes.start(1)
    until("the first attempt", lambda: "begin 0 of 1" in first.stdout())
    second = nodes.start(1)
    until("both", lambda: "begin 0 of 2" in first.stdout() and "begin 1 of 2" in second.stdout())
    second.signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM
    until("one again", lambda: first.stdout().count("begin 0 of 1") == 2)
    assert nodes.status()["restarts"]["used"] == 0
    assert first.finish() == 0
    assert first.stdout().count("begin") == 3


def test_a_node_that_dies_is_noticed_and_the_survivors_start_again_once(bed: Bed) -> None:
    """Known complaints 6, 7 and 9: nobody hangs, nothing survives its agent, one restart of the budget."""
    nodes = Nodes(bed, "1:2", "--max-restarts", "1")
    first, second = nodes.start(), nodes.start()
    first.event("active")
    second.signal(signal.SIGKILL)
    lost = first.event("node_lost")
    assert "its connection ended" in lost["reason"]
    first.event("world", 2)
    status = nodes.status()
    assert (ranks(status), status["restarts"]["used"]) == ({0: "n0", 1: "n0"}, 1)
    assert first.finish() == 0


def test_without_a_budget_the_loss_of_a_node_is_the_end_and_is_said(bed: Bed) -> None:
    nodes = Nodes(bed, "1:2")
    first, second = nodes.start(), nodes.start()
    first.event("active")
    second.signal(signal.SIGKILL)
    assert first.wait() == 1
    assert "node n1 (127.0.0.1) is lost" in first.stderr()


def test_a_failure_on_one_node_is_reported_on_all_with_its_words(bed: Bed) -> None:
    script = bed.script(
        "fail.py",
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': raise ValueError('bad shape')\n"
        "time.sleep(600)\n",
    )
    nodes = Nodes(bed, "2", script=script)
    agents = [nodes.start(1), nodes.start(1)]
    for agent in agents:
        assert agent.wait() == 1
        assert "worker n1.w0 (rank 1) failed: exit code 1" in agent.stderr()
        assert "ValueError: bad shape" in agent.stderr()


def test_commands_work_on_every_node(bed: Bed) -> None:
    nodes = Nodes(bed, "2")
    first, second = nodes.start(1, "--standbys", "1"), nodes.start(1, "--standbys", "1")
    first.event("world")
    until("the standbys", lambda: all(node["standbys"] == 1 for node in nodes.status()["nodes"]))
    name = second.folder.name
    assert json.loads(bed.cli("status", name, "--json").stdout) == {**nodes.status(), "step": any_number()}
    done = bed.cli("resize", name, "--workers", "4")
    assert done.returncode == 0, done.stderr
    assert ranks(nodes.status()) == {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    assert [event["kind"] for event in second.events()][-2:] == [event["kind"] for event in first.events()][-2:]
    assert bed.cli("resize", "--nodes", "1").returncode == 0
    assert set(ranks(nodes.status()).values()) == {"n0"}
    done = bed.cli("stop", name)
    assert done.returncode == 0, done.stderr
    assert [first.wait(), second.wait()] == [0, 0]


class any_number:  # noqa: N801
    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    __hash__ = None  # type: ignore[assignment]


def test_several_nodes_need_a_place_to_meet(bed: Bed) -> None:
    """Known complaint 23: a missing endpoint silently means localhost."""
    done = bed.cli("--nnodes", "2", "train.py")
    assert done.returncode == 2
    assert "--rdzv-endpoint HOST:PORT" in done.stderr


def test_a_node_without_the_token_is_not_let_in(bed: Bed, tmp_path: Path) -> None:
    nodes = Nodes(bed, "1:2")
    first = nodes.start(1)
    first.event("world")
    secret = next((bed.folder / ".liverun" / "tokens").iterdir()).read_text().strip()
    second = nodes.start(1, LIVERUN_TOKEN=secret)
    first.event("active")
    assert all(
        b"LIVERUN_TOKEN" not in Path(f"/proc/{row['pid']}/environ").read_bytes()
        for node in nodes.status()["nodes"]
        for row in node["workers"]
    )
    stranger = nodes.start(1, LIVERUN_TOKEN="00" * 32)
    assert stranger.wait() == 77
    assert "refused the token" in stranger.stderr()
    lost = nodes.start(1, HOME=str(tmp_path / "elsewhere"))
    assert lost.wait() == 77
    assert "no token of job" in lost.stderr()
    token = next((bed.folder / ".liverun" / "tokens").iterdir())
    assert token.stat().st_mode & 0o777 == 0o600
    assert secret not in first.stderr() + first.stdout() + stranger.stderr()
    assert first.finish() == 0
    assert second.wait() == 0


def test_a_job_that_waits_for_nodes_says_so_and_gives_up_in_time(bed: Bed) -> None:
    nodes = Nodes(bed, "2")
    nodes.words[nodes.words.index(QUICK)] = "join_timeout=1"
    first = nodes.start(1)
    assert first.wait() == 1
    assert "1 of 2 nodes are there after 1 s" in first.stderr()


def test_a_node_cut_off_for_long_comes_anew(bed: Bed) -> None:
    """Known complaint 32: a host that was given up never comes back."""
    nodes = Nodes(bed, "1:2", "--max-restarts", "1")
    first, second = nodes.start(1), nodes.start(1)
    first.event("active")
    group = [second.process.pid, *(row["pid"] for row in nodes.status()["nodes"][1]["workers"])]
    for pid in group:
        os.kill(pid, signal.SIGSTOP)
    first.event("node_lost")
    first.event("world", 2)
    for pid in group:
        os.kill(pid, signal.SIGCONT)
    until("it to be back", lambda: set(ranks(nodes.status()).values()) == {"n0", "n2"})
    assert first.finish() == 0
    assert second.wait() == 0, second.stderr()


pytestmark = pytest.mark.timeout(120)


class StandingStore:
    """``liverun store`` on a port of its own, that can be killed and started again."""

    def __init__(self, bed: Bed, job: str) -> None:
        self.bed, self.port = bed, free_port()
        self.token = bed.folder / "token"
        self.words = [
            "store", "--job", job, "--host", "127.0.0.1", "--port", str(self.port),
            "--journal", str(bed.folder / "standing.db"), "--token-file", str(self.token),
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = self.bed.cli_start(*self.words)
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["port"] == self.port

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def with_store(bed: Bed, store: StandingStore, *words: str) -> Nodes:
    nodes = Nodes(bed, "1:2", "--job", "standing", *words, LIVERUN_TOKEN_FILE=str(store.token))
    nodes.words[3] = f"127.0.0.1:{store.port}"
    return nodes


def test_a_killed_store_stops_no_training_and_a_resize_asked_meanwhile_waits_and_then_happens(bed: Bed) -> None:
    """Known complaint 2: the store ends, and ranks die of it."""
    store = StandingStore(bed, "standing")
    nodes = with_store(bed, store)
    first, second = nodes.start(1, "--standbys", "1"), nodes.start(1, "--standbys", "1")
    first.event("active")
    until("the standbys", lambda: all(node["standbys"] == 1 for node in nodes.status()["nodes"]))
    before = nodes.status()["step"]
    store.kill()
    asked = bed.cli_start("resize", "standing", "--workers", "4")
    first.event("store_away")
    until("steps without a store", lambda: nodes.status()["step"] > before + 20)
    assert asked.poll() is None
    store.start()
    assert asked.wait(60) == 0, asked.communicate()
    assert first.kinds().count("store_back") == 1
    assert ranks(nodes.status()) == {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    assert first.finish() == 0
    assert second.wait() == 0
    store.kill()


def test_with_a_store_of_its_own_the_controllers_node_may_be_lost(bed: Bed) -> None:
    """Known complaint 1, with a store that is on no node of the job: the job's id and budget go on."""
    store = StandingStore(bed, "standing")
    nodes = with_store(bed, store, "--max-restarts", "1")
    first, second = nodes.start(), nodes.start()
    first.event("active")
    before = first.events()[-1]["generation"]
    first.signal(signal.SIGKILL)
    until("the survivor's world", lambda: "world" in second.kinds())
    status = json.loads(bed.cli("status", second.folder.name, "--json").stdout)
    assert (status["world"]["size"], status["restarts"]["used"]) == (2, 1)
    assert status["generation"] > before
    assert "the controller was lost with its node; restart 1 of 1" in second.stderr()
    assert second.finish() == 0
    store.kill()


def test_nodes_meet_at_etcd_and_one_of_its_members_may_go(bed: Bed) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "store"))
    from etcd_bed import cluster

    with cluster(bed.folder) as members:
        nodes = Nodes(bed, "1:2", "--rdzv-backend", "etcd", "--job", "at-etcd")
        nodes.words[3] = ",".join(str(member.place) for member in members)
        first = nodes.start(1)
        first.event("world")
        members[0].stop()  # the one that all of them ask first
        second = nodes.start(1)
        first.event("active")
        assert ranks(nodes.status()) == {0: "n0", 1: "n1"}
        assert first.finish() == 0, first.stderr()
        assert second.wait() == 0


def certificate(folder: Path, *addresses: str) -> dict[str, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("not to be had here: an openssl command to make a certificate with")
    files = {"cert": folder / "cert.pem", "key": folder / "key.pem"}
    names = ",".join(f"IP:{address}" for address in addresses or ("127.0.0.1",))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(files["key"]), "-out", str(files["cert"]), "-subj", "/CN=nodes",
         "-addext", f"subjectAltName={names}"],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


def test_with_tls_whoever_has_no_certificate_or_another_is_not_trusted(bed: Bed, tmp_path: Path) -> None:
    files = certificate(bed.folder)
    nodes = Nodes(bed, "1:2")
    plain = list(nodes.words)
    where = nodes.words.index(QUICK)
    nodes.words[where] += f",tls_ca={files['cert']},tls_cert={files['cert']},tls_key={files['key']}"
    first = nodes.start(1)
    first.event("world")
    nodes.words[where] = plain[where] + ",join_timeout=1"
    without = nodes.start(1)
    assert without.wait() == 69
    (tmp_path / "other").mkdir()
    other = certificate(tmp_path / "other")
    nodes.words[where] = plain[where] + (
        f",join_timeout=1,tls_ca={other['cert']},tls_cert={other['cert']},tls_key={other['key']}"
    )
    distrusts = nodes.start(1)
    assert distrusts.wait() == 69
    assert "certificate verify failed" in distrusts.stderr()
    nodes.words[where] = plain[where] + f",tls_ca={files['cert']},tls_cert={files['cert']},tls_key={files['key']}"
    second = nodes.start(1)
    first.event("active")
    assert first.finish() == 0
    assert second.wait() == 0


def test_etcd_with_tls_and_a_user(bed: Bed) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "store"))
    from etcd_bed import EtcdServer, secure

    from launcher.store.etcd_gateway import Login

    files = certificate(bed.folder)
    (bed.folder / "etcd").mkdir()
    server = EtcdServer(bed.folder / "etcd", bed.folder)
    server.start()
    try:
        secure(server, Login(user="liverun", password="etcd-secret"))
        nodes = Nodes(bed, "1:2", "--rdzv-backend", "etcd", "--job", "at-etcd", LIVERUN_ETCD_USER="liverun")
        nodes.words[3] = str(server.place)
        nodes.words[nodes.words.index(QUICK)] += f",tls_ca={files['cert']},tls_cert={files['cert']},tls_key={files['key']}"
        half = nodes.bed.launch(*nodes.words, nodes.script, **nodes.environ)
        assert half.wait() == 2
        assert "LIVERUN_ETCD_USER and LIVERUN_ETCD_PASSWORD go together" in half.stderr()
        nodes.environ["LIVERUN_ETCD_PASSWORD"] = "etcd-secret"
        first = nodes.start(1)
        first.event("world")
        second = nodes.start(1)
        first.event("active")
        assert first.finish() == 0
        assert second.wait() == 0
        assert "etcd-secret" not in first.stderr() + second.stderr()
    finally:
        server.stop()
