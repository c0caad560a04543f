"""Jobs of several nodes on several hosts: real addresses, and links that can be cut both ways and one way."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launcher_bed import FAKE_WORKER, QUICK, Agent, Bed, until
from test_many_nodes import certificate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hosts import Host, hosts, why_not

CLONE_NEWNET, ETH_P_IP, SO_RCVBUFFORCE = 0x40000000, 0x0800, 33
WHY_NOT = why_not()
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with hosts(3) as made:
        yield made


class Job:
    """Agents of one job, each on a host of its own, with a run folder of its own; the first has the store."""

    def __init__(self, bed: Bed, on: list[Host], nnodes: str, *words: str) -> None:
        self.bed, self.on = bed, on
        self.words = [
            "--nnodes", nnodes, "--rdzv-endpoint", f"{on[0].address}:29400", "--rdzv-conf", QUICK, "--job", "far", *words,
        ]  # fmt: skip

    def start(self, host: Host, nproc: int = 1, *words: str, **environ: str) -> Agent:
        root = self.bed.root / host.name
        agent = self.bed.launch(
            *self.words, "--run-dir", str(root), "--nproc-per-node", str(nproc), *words, str(FAKE_WORKER),
            prefix=tuple(host.prefix), HOME=str(self.bed.folder), FAKE_BEHAVE="{}", **environ,
        )  # fmt: skip
        agent.root = root
        until("a record", (root / "far" / "job.json").exists)
        return agent

    def status(self, host: Host) -> dict[str, Any]:
        return json.loads(self.bed.cli("status", "--json", "--run-dir", str(self.bed.root / host.name)).stdout)

    def nodes(self, host: Host) -> dict[str, str]:
        return {node["id"]: node["state"] for node in self.status(host)["nodes"]}


def listening(agent: Agent, *, own: bool = False) -> list[tuple[str, int]]:
    """Every address that anything in an agent's network (or its ``own`` process) listens at, and the port."""
    found = []
    process = Path(f"/proc/{agent.process.pid}")
    mine = {str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()}
    for table, size in (("tcp", 4), ("tcp6", 16)):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == "0A" and (not own or f"socket:[{inode}]" in mine):
                address, port = local.split(":")
                words = [bytes.fromhex(address)[start : start + 4][::-1] for start in range(0, size, 4)]
                found.append((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


def commits(*agents: Agent) -> list[tuple[int, int]]:
    """Every generation that became active, and the size of its world, as any of the agents knows it."""
    found = set()
    for agent in agents:
        for event in agent.events():
            if event["kind"] == "world":
                found.add((event["generation"], event["world"]["size"]))
            elif event["kind"] == "active":
                found.add((event["generation"], event["to"]["size"]))
    return sorted(found)


def test_nodes_come_and_go_over_real_links_with_the_addresses_they_were_given(bed: Bed, three: list[Host]) -> None:
    """Known complaint 22: given addresses are replaced by names that do not resolve."""
    job = Job(bed, three, "1:3")
    first = job.start(three[0])
    first.event("world")
    second, third = job.start(three[1]), job.start(three[2])
    until("three nodes", lambda: list(job.nodes(three[0]).values()) == ["active"] * 3)
    assert {node["host"] for node in job.status(three[0])["nodes"]} == {host.address for host in three}
    for agent, host in zip((first, second, third), three, strict=True):
        places = listening(agent)  # on the first: store, hub and c10d store; on the others: who asks if the store is lost
        assert len(places) >= (3 if host is three[0] else 1)
        assert {address for address, _ in places} == {host.address}, f"{places}: others than the address it was given"
    done = bed.cli("drain", three[1].address, "--run-dir", str(bed.root / three[2].name))
    assert done.returncode == 0, done.stderr
    assert second.wait() == 0
    third.signal(signal.SIGTERM)
    assert third.wait() == 128 + signal.SIGTERM
    until("one node", lambda: list(job.nodes(three[0]).values()) == ["active"])
    assert first.finish() == 0


def test_a_short_cut_is_not_noticed_and_no_message_is_lost(bed: Bed, three: list[Host]) -> None:
    job = Job(bed, three, "1:2")
    first, second = job.start(three[0], 1, "--standbys", "1"), job.start(three[1], 1, "--standbys", "1")
    until("two nodes", lambda: list(job.nodes(three[0]).values()) == ["active"] * 2)
    until("standbys", lambda: all(node["standbys"] for node in job.status(three[0])["nodes"]))
    three[1].cut()
    asked = bed.cli_start("resize", "--workers", "4", "--run-dir", str(bed.root / three[0].name))
    first.event("proposed", 3)
    three[1].mend()
    assert asked.wait(60) == 0
    assert "node_lost" not in first.kinds()
    assert commits(first, second)[-1] == (3, 4)
    assert first.finish() == 0
    assert second.wait() == 0


@pytest.mark.parametrize("how", ["both ways", "to the store", "from the store"])
def test_a_node_that_is_cut_off_never_acts_and_comes_anew(bed: Bed, three: list[Host], how: str) -> None:
    """The side without the controller commits nothing; there is one active generation at any time."""
    job = Job(bed, three, "1:3", "--max-restarts", "1")
    first, second, third = job.start(three[0]), job.start(three[1]), job.start(three[2])
    until("three nodes", lambda: list(job.nodes(three[0]).values()) == ["active"] * 3)
    before = commits(third)
    if how == "both ways":
        three[2].cut()
    elif how == "to the store":
        three[2].mute(three[0])
    else:
        three[0].mute(three[2])
    asked = bed.cli_start("resize", "--workers", "1", "--run-dir", str(bed.root / three[2].name))
    lost = first.event("node_lost")
    assert f"node n2 ({three[2].address}) is lost" in lost["reason"]
    until("a world without it", lambda: commits(first)[-1][1] == 2)
    assert commits(third) == before
    assert asked.poll() is None or asked.returncode != 0
    if how == "both ways":
        three[2].mend()
    elif how == "to the store":
        three[2].unmute(three[0])
    else:
        three[0].unmute(three[2])
    until("it to be back", lambda: list(job.nodes(three[0]).values()) == ["active"] * 3)
    seen = commits(first, second, third)
    assert len({generation for generation, _ in seen}) == len(seen), f"two worlds of one generation: {seen}"
    assert first.finish() == 0
    assert [second.wait(), third.wait()] == [0, 0]


def listen(host: Host) -> socket.socket:
    """Hear every packet that comes to a host, from now on; nothing has to be read until the end."""

    def inside() -> socket.socket:
        with Path(f"/run/netns/{host.name}").open() as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        ear = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
        ear.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 * 1024 * 1024)
        ear.bind(("veth0", ETH_P_IP))
        ear.setblocking(False)
        return ear

    with ThreadPoolExecutor(1) as pool:  # a thread enters the network, and ends
        return pool.submit(inside).result()


def heard(ear: socket.socket) -> list[tuple[set[int], bytes]]:
    """What was said over TCP: both ports of each packet, and what it carried."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            packet = ear.recv(65536)
            start = (packet[0] & 15) * 4
            if packet[9] == socket.IPPROTO_TCP:
                ports = set(struct.unpack(">2H", packet[start : start + 4]))
                found.append((ports, packet[start + (packet[start + 12] >> 4) * 4 :]))
    return found


def test_two_jobs_on_the_same_hosts_never_meet_and_with_tls_one_is_not_heard(bed: Bed, three: list[Host]) -> None:
    """Known complaint 21: two jobs share stale state; one job's end kills the other."""
    files = certificate(bed.folder, *(host.address for host in three[:2]))
    ear = listen(three[1])
    one, two = Job(bed, three, "1:2"), Job(bed, three, "1:2")
    for place, name in ((two, "near"), (one, "far")):
        place.words[place.words.index("far")] = name
    two.words[3] = f"{three[0].address}:29401"
    one.words[one.words.index(QUICK)] += f",tls_ca={files['cert']},tls_cert={files['cert']},tls_key={files['key']}"
    agents = []
    for job in (one, two):
        for host in three[:2]:
            root = bed.root / host.name
            agents.append(
                bed.launch(
                    *job.words, "--run-dir", str(root), str(FAKE_WORKER), prefix=tuple(host.prefix),
                    HOME=str(bed.folder), FAKE_BEHAVE="{}", FAKE_END=str(bed.folder / f"end-{job.words[-1]}"),
                )
            )  # fmt: skip
            until("a record", lambda job=job, root=root: (root / job.words[7] / "job.json").exists())
    for name in ("far", "near"):

        def two_ranks(name: str = name) -> bool:
            done = bed.cli("status", name, "--json", "--run-dir", str(bed.root / three[0].name))
            world = json.loads(done.stdout)["world"]
            return world is not None and world["size"] == 2

        until(f"{name} to have two nodes", two_ranks)
    ports = [{port for agent in agents[start : start + 2] for _, port in listening(agent, own=True)} for start in (0, 2)]
    bed.cli("stop", "near", "--run-dir", str(bed.root / three[0].name))
    assert [agent.wait() for agent in agents[2:]] == [0, 0]
    assert [agent.process.poll() for agent in agents[:2]] == [None, None]
    bed.cli("stop", "far", "--run-dir", str(bed.root / three[1].name))
    assert [agent.wait() for agent in agents[:2]] == [0, 0]
    assert not (bed.folder / "end-far").exists()
    packets = heard(ear)
    ear.close()
    far, near = (b"".join(data for ends, data in packets if ends & mine) for mine in ports)
    for word in (b"HTTP/1.1", b'"protocol"', b'"nonce"', b'"seen"', b'"type":', b"revision"):
        assert word in near
        assert word not in far, "said in the clear with TLS"
    assert len(far) > 5000


def test_the_node_with_the_store_is_lost_and_the_others_bring_it_back(bed: Bed, three: list[Host]) -> None:
    """Known complaint 1: the agent that hosts the store dies, and the other nodes with it."""
    job = Job(bed, three, "1:3", "--max-restarts", "1")
    first, second, third = job.start(three[0]), job.start(three[1]), job.start(three[2])
    until("three nodes", lambda: list(job.nodes(three[0]).values()) == ["active"] * 3)
    before = max(generation for generation, _ in commits(first))
    ids = {node["host"]: node["id"] for node in job.status(three[0])["nodes"]}
    lowest, other = (second, third) if ids[three[1].address] < ids[three[2].address] else (third, second)
    first.signal(signal.SIGKILL)

    def of_both() -> bool:
        generation, size = commits(second)[-1]
        return generation > before and size == 2

    until("a world of the two that are left", of_both)
    status = job.status(three[1])
    assert {node["host"] for node in status["nodes"]} == {three[1].address, three[2].address}
    assert (status["job"], status["restarts"]["used"]) == ("far", 1)
    assert "the store is brought back here" in lowest.stderr()
    assert "the store is brought back here" not in other.stderr()
    assert bed.cli("resize", "--workers", "1", "--run-dir", str(bed.root / three[2].name)).returncode == 0
    bed.end_file.touch()
    assert [second.wait(), third.wait()] == [0, 0], second.stderr() + third.stderr()


@pytest.mark.parametrize("how", ["both ways", "to the others", "from the others"])
def test_cut_off_alone_the_node_with_the_store_does_nothing_and_comes_to_the_new_one(
    bed: Bed, three: list[Host], how: str
) -> None:
    """Never two active generations: the old store writes no more before the new one begins."""
    job = Job(bed, three, "1:3", "--max-restarts", "2")
    first, second, third = job.start(three[0]), job.start(three[1]), job.start(three[2])
    until("three nodes", lambda: list(job.nodes(three[0]).values()) == ["active"] * 3)
    before, kept = commits(first), kept_at(bed, three[0])
    for other in three[1:]:
        if how == "to the others":
            three[0].mute(other)
        elif how == "from the others":
            other.mute(three[0])
    if how == "both ways":
        three[0].cut()
    until("a world of the other two", lambda: commits(second) and commits(second)[-1][1] == 2)
    assert commits(first) == before
    assert kept_at(bed, three[0]) == kept
    for other in three[1:]:
        if how == "to the others":
            three[0].unmute(other)
        elif how == "from the others":
            other.unmute(three[0])
    if how == "both ways":
        three[0].mend()
    until("three again", lambda: len(job.nodes(three[1])) == 3 and set(job.nodes(three[1]).values()) == {"active"})
    seen = commits(first, second, third)
    assert len({generation for generation, _ in seen}) == len(seen), f"two worlds of one generation: {seen}"
    bed.end_file.touch()
    assert [agent.wait() for agent in (first, second, third)] == [0, 0, 0], first.stderr()


LOOK = (
    "import asyncio, os, pathlib, secrets, sys\n"
    "from launcher.store.auth import read_token_file\n"
    "from launcher.store.client import RemoteStore\n"
    "from launcher.store.link import Place\n"
    "async def look():\n"
    "    path, place = sys.argv[1:]\n"
    "    token = read_token_file(pathlib.Path(path), uid=os.geteuid())\n"
    "    async with RemoteStore([Place.parse(place)], token, job='far', node='test', role='observer',\n"
    "                           random=secrets.token_bytes) as store:\n"
    "        print([await store.get(key) for key in ('controller', 'job/active', 'generation/next', 'job/restarts')])\n"
    "asyncio.run(look())\n"
)


def kept_at(bed: Bed, host: Host) -> str:
    """Who leads and what is active, as the store on a host says to somebody on that host."""
    (token,) = (bed.folder / ".liverun" / "tokens").iterdir()
    done = subprocess.run(
        [*host.prefix, sys.executable, "-c", LOOK, str(token), f"{host.address}:29400"], env=bed.environ(),
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    return done.stdout


def test_drained_the_node_with_the_store_hands_it_over_and_the_training_does_not_notice(
    bed: Bed, three: list[Host]
) -> None:
    """Survivors keep their processes and steps; what is asked later works; and the next one can go as well."""
    job = Job(bed, three, "1:3")
    first, second, third = job.start(three[0]), job.start(three[1]), job.start(three[2])
    until("three nodes", lambda: list(job.nodes(three[0]).values()) == ["active"] * 3)
    before = {row["id"]: row["pid"] for node in job.status(three[0])["nodes"] for row in node["workers"]}
    step = job.status(three[0])["step"]
    done = bed.cli("drain", "n0", "--run-dir", str(bed.root / three[2].name))
    assert done.returncode == 0, done.stderr
    assert "node n0 has left: liverun drain; the controller is on node n1" in done.stdout
    assert first.wait() == 0, first.stderr()
    status = job.status(three[2])
    assert {node["id"]: node["state"] for node in status["nodes"]} == {"n1": "active", "n2": "active"}
    after = {row["id"]: row["pid"] for node in status["nodes"] for row in node["workers"]}
    assert after == {name: pid for name, pid in before.items() if name.startswith(("n1", "n2"))}
    assert status["restarts"]["used"] == 0
    until("more steps", lambda: job.status(three[1])["step"] > step + 20)
    back = bed.launch(
        *[word.replace(three[0].address + ":29400", store_of(second)) for word in job.words],
        "--run-dir", str(bed.root / "again"), str(FAKE_WORKER), prefix=tuple(three[0].prefix),
        HOME=str(bed.folder), FAKE_BEHAVE="{}",
    )  # fmt: skip
    until("three again", lambda: list(job.nodes(three[1]).values()) == ["active"] * 3)
    second.signal(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM, second.stderr()
    until("two", lambda: len(job.nodes(three[2])) == 2)
    assert bed.cli("resize", "--workers", "1", "--run-dir", str(bed.root / three[2].name)).returncode == 0
    seen = commits(second, third)
    assert len({generation for generation, _ in seen}) == len(seen)
    bed.end_file.touch()
    assert [third.wait(), back.wait()] == [0, 0], third.stderr()


def store_of(agent: Agent) -> str:
    """Where an agent says that the store is now."""
    line = next(line for line in agent.stderr().splitlines() if "the controller and the store are on this node" in line)
    return line.rpartition(" at ")[2]
