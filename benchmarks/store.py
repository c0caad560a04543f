"""The rendezvous store under many agents: how long a compare-and-set takes, and until all have seen a change.

    python benchmarks/store.py                        # ours, 10 to 1,000 agents
    python benchmarks/store.py --beside etcd,tcpstore # and the others, for the operations they share
    python benchmarks/store.py --strangers            # one client alone, and beside 500 strangers and garbage
    python benchmarks/store.py --json

The store has one core to itself. The agents are real clients on real sockets, all in one process on another core;
``--one-core`` puts both on the same. Every agent watches; ``paced`` is one compare-and-set a second from each,
``at once`` is all of them together, as after a lost node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from common import conditions

from launcher.store import Store
from launcher.store.auth import read_token_file
from launcher.store.client import RemoteStore
from launcher.store.etcd import EtcdStore
from launcher.store.limits import HISTORY_KEPT
from launcher.store.link import Place

HOST = "127.0.0.1"
ROUNDS = 3
PROGRAM = """
import sys
from pathlib import Path
from launcher.store.service import ServiceOptions, main
folder = Path(sys.argv[1])
sys.exit(main(ServiceOptions(job="bench", host="127.0.0.1", journal=folder / "store.db", token_file=folder / "token",
                             power_safe=sys.argv[2] == "power-safe")))
"""
TCPSTORE = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
print(store.port, flush=True)
time.sleep(600)
"""


def spread(taken_s: list[float]) -> dict[str, float]:
    ordered = sorted(taken_s)
    return {
        "p50_ms": round(ordered[len(ordered) // 2] * 1000, 2),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000, 2),
    }


@contextlib.contextmanager
def process(command: list[str], core: int, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Run on one core until the block ends."""
    started = subprocess.Popen(
        ["taskset", "-c", str(core), *command], stdout=subprocess.PIPE, text=True, **more
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def line_of(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline()


# --- one client while strangers crowd the door ----------------------------------------------------------------

CROWD = """
import asyncio, contextlib, random, struct, sys
UPGRADE = (b"GET /v1/session HTTP/1.1\\r\\nHost: x\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
           b"Sec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\\r\\n\\r\\n")
dice = random.Random(1)
GARBAGE = [
    dice.randbytes(3000), b"GET / HTTP/9.9\\r\\n\\r\\n", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\\r\\n\\r\\n",
    b"GET / HTTP/1.1\\r\\n" + b"X: y\\r\\n" * 3000 + b"\\r\\n",
    b"POST /v1/session HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 99999999999\\r\\n\\r\\n" + b"x" * 5000,
    bytes.fromhex("16030100f1010000ed0303") + dice.randbytes(200),  # a TLS hello
    UPGRADE + bytes([0x82, 0xFF]) + struct.pack(">Q", 2**31) + bytes(4) + b"x" * 100,
    UPGRADE + bytes([0x82, 0x80 | 20]) + bytes(4) + b"x" * 20,
]
async def storm(port):
    while True:
        for data in GARBAGE:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        while await reader.read(65536):
                            pass
                writer.transport.abort()
            await asyncio.sleep(0.01)
async def main(port, throws):
    writers = []
    for number in range(500):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        if number % 3:
            writer.write(b"GET /v1/session HTTP/1.1\\r\\nHost: ")
        writers.append(writer)
    thrower = asyncio.create_task(storm(port)) if throws else None
    print("there", flush=True)
    for _ in range(90):
        for writer in writers:
            if not writer.is_closing():
                writer.write(b"x")
            await asyncio.sleep(0.05 / 500)
asyncio.run(main(int(sys.argv[1]), sys.argv[2] == "garbage"))
"""


async def strangers(cores: tuple[int, int]) -> dict[str, Any]:
    """One client alone; then beside 500 connections from another process that say nothing or a byte at a time; then
    beside those and others that throw garbage."""
    found: dict[str, Any] = {"conditions": conditions()}
    with (
        tempfile.TemporaryDirectory() as name,
        process([sys.executable, "-c", PROGRAM, name, "process-safe"], cores[0]) as server,
    ):
        place = Place(HOST, json.loads(line_of(server))["port"])
        token = read_token_file(Path(name) / "token", uid=os.geteuid())

        def memory_mib() -> float:
            return psutil.Process(server.pid).memory_info().rss / 2**20

        async with RemoteStore(
            [place], token, job="bench", node="n", role="agent", random=secrets.token_bytes
        ) as store:
            mine = [0]
            for what in ("quiet", "garbage"):  # once, to have everything loaded
                with process([sys.executable, "-c", CROWD, str(place.port), what], cores[1]) as crowd:
                    await asyncio.to_thread(line_of, crowd)
                    await asyncio.sleep(0.5)
            for _ in range(HISTORY_KEPT + 500):  # from here on a write displaces another from what is kept
                await compare_and_set(store, mine, 0)
            before_mib = memory_mib()
            found["alone"] = spread([await compare_and_set(store, mine, 0) for _ in range(2000)])
            for case, what in (("in_the_crowd", "quiet"), ("in_the_storm", "garbage")):
                command = ["nice", "-n", "19", sys.executable, "-c", CROWD, str(place.port), what]
                with process(command, cores[1]) as crowd:
                    await asyncio.to_thread(line_of, crowd)
                    taken = [await compare_and_set(store, mine, 0) for _ in range(2000)]
                    grown_mib = memory_mib() - before_mib
                for _ in range(2000):
                    await compare_and_set(store, mine, 0)
                left_mib = memory_mib() - before_mib
                found[case] = {**spread(taken), "grown_mib": round(grown_mib, 1), "left_mib": round(left_mib, 1)}
    return found


# --- ours and etcd, through the store contract ---------------------------------------------------------------

Connect = Callable[[int], Store]


async def measure(connect: Connect, num_agents: int, pid: int) -> dict[str, Any]:
    """One row of the table."""
    stores = [connect(number) for number in range(num_agents)]
    started = time.perf_counter()
    await asyncio.gather(*(store.put(f"node/{number}", "0") for number, store in enumerate(stores)))
    joined_s = time.perf_counter() - started
    seen_s = await time_to_all(stores)
    mine = [0] * num_agents
    alone = [await compare_and_set(stores[0], mine, 0) for _ in range(200)]
    at_once: list[float] = []
    for _ in range(ROUNDS):
        calls = (compare_and_set(store, mine, number) for number, store in enumerate(stores))
        at_once += await asyncio.gather(*calls)
    paced = await pace(stores, mine)
    memory_mib = psutil.Process(pid).memory_info().rss / 2**20
    await asyncio.gather(*(store.aclose() for store in stores))
    return {
        "agents": num_agents, "all_joined_s": round(joined_s, 2), "all_see_a_change_ms": round(seen_s * 1000, 1),
        "alone": spread(alone), "paced": spread(paced), "at_once": spread(at_once),
        "memory_mib": round(memory_mib, 1),
    }  # fmt: skip


async def compare_and_set(store: Store, mine: list[int], number: int) -> float:
    key = f"own/{number}"
    start = time.perf_counter()
    revision = await store.compare_and_set({key: mine[number]}, {key: "x" * 200})
    taken_s = time.perf_counter() - start
    assert revision is not None
    mine[number] = revision
    return taken_s


async def pace(stores: list[Store], mine: list[int], seconds: float = 3.0) -> list[float]:
    taken: list[float] = []

    async def one(number: int) -> None:
        await asyncio.sleep(number / len(stores))
        for _ in range(int(seconds)):
            taken.append(await compare_and_set(stores[number], mine, number))
            await asyncio.sleep(1.0)

    await asyncio.gather(*(one(number) for number in range(len(stores))))
    return taken


async def time_to_all(stores: list[Store]) -> float:
    """Seconds from a write until every agent's watch has given it; the worst of a few."""
    revision = (await stores[0].scan("job/")).revision
    watches = [store.watch("job/", revision) for store in stores]

    async def first(watch: AsyncIterator[Any]) -> float:
        await anext(watch)
        return time.perf_counter()

    worst = 0.0
    for number in range(ROUNDS + 1):
        waits = [asyncio.ensure_future(first(watch)) for watch in watches]
        await asyncio.sleep(0.5 + len(stores) / 500)  # every watch is open
        start = time.perf_counter()
        await stores[0].put("job/active", str(number))
        ends = await asyncio.gather(*waits)
        if number:  # the first one warms up
            worst = max(worst, max(ends) - start)
    await asyncio.gather(*(watch.aclose() for watch in watches))  # type: ignore[attr-defined]
    return worst


async def ours(sizes: list[int], cores: tuple[int, int], kind: str) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with process([sys.executable, "-c", PROGRAM, name, kind], cores[0]) as server:
                place = Place(HOST, json.loads(line_of(server))["port"])
                token = read_token_file(folder / "token", uid=os.geteuid())

                def connect(number: int, place: Place = place, token: Any = token) -> Store:
                    return RemoteStore(
                        [place], token, job="bench", node=f"n{number}", role="agent", random=secrets.token_bytes
                    )

                rows.append(await measure(connect, size, server.pid))
    return rows


def wait_until_up(url: str) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=1.0).close()
            return
        time.sleep(0.05)


async def etcd(sizes: list[int], cores: tuple[int, int]) -> list[dict[str, Any]]:
    rows = []
    program = shutil.which("etcd")
    if program is None:
        print("no etcd here: apt-get install etcd-server", file=sys.stderr)
        return rows
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            url, peer = f"http://{HOST}:23790", f"http://{HOST}:23800"
            command = [
                program, "--data-dir", folder, "--listen-client-urls", url, "--advertise-client-urls", url,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster",
                f"default={peer}", "--unsafe-no-fsync", "--log-level", "error",
            ]  # fmt: skip
            with process(command, cores[0], stderr=subprocess.DEVNULL) as server:
                await asyncio.to_thread(wait_until_up, f"{url}/health")
                rows.append(await measure(lambda _: EtcdStore([Place(HOST, 23790)], job="bench"), size, server.pid))
    return rows


# --- torch's TCPStore: no revisions and no watches; what it shares is compare_set and wait ------------------------


def tcpstore(sizes: list[int], cores: tuple[int, int]) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        with process([sys.executable, "-c", TCPSTORE], cores[0]) as server:
            port = int(line_of(server))
            started = time.perf_counter()
            stores = connect_all(port, size)
            joined_s = time.perf_counter() - started
            alone, value = [], ""
            for number in range(200):
                start = time.perf_counter()
                value = stores[0].compare_set("own", value, str(number).ljust(200)).decode()
                alone.append(time.perf_counter() - start)
            at_once = threaded(stores, lambda store, number: store.compare_set(f"own/{number}", "", "x" * 200))
            seen_s = time_to_all_threads(stores)
            memory_mib = psutil.Process(server.pid).memory_info().rss / 2**20
            del stores
        rows.append(
            {
                "agents": size, "all_joined_s": round(joined_s, 2), "all_see_a_change_ms": round(seen_s * 1000, 1),
                "alone": spread(alone), "at_once": spread(at_once), "memory_mib": round(memory_mib, 1),
            }
        )  # fmt: skip
    return rows


def connect_all(port: int, size: int) -> list[Any]:
    from datetime import timedelta

    from torch.distributed import TCPStore

    def one(_: int) -> Any:
        return TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))

    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(one, range(size)))


def time_to_all_threads(stores: list[Any]) -> float:
    ends: list[float] = []

    def one(store: Any) -> None:
        store.wait(["go"])
        ends.append(time.perf_counter())

    waits = [threading.Thread(target=one, args=(store,)) for store in stores[1:]]
    for thread in waits:
        thread.start()
    time.sleep(0.5 + len(stores) / 500)
    start = time.perf_counter()
    stores[0].set("go", "1")
    for thread in waits:
        thread.join()
    return max(ends) - start


def threaded(stores: list[Any], do: Callable[[Any, int], Any]) -> list[float]:
    """Every store in a thread of its own, all at once."""
    gate = threading.Barrier(len(stores))
    taken: list[float] = []

    def one(number: int) -> None:
        gate.wait()
        start = time.perf_counter()
        do(stores[number], number)
        taken.append(time.perf_counter() - start)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


# --- the table ------------------------------------------------------------------------------------------------


def show(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{name}")
    print("agents   joined   all see   alone p50/p99   paced p50/p99    at once p50/p99    memory")
    for row in rows:
        def pair(what: str, row: dict[str, Any] = row) -> str:
            return f"{row[what]['p50_ms']:.2f}/{row[what]['p99_ms']:.2f} ms" if what in row else "-"

        print(
            f"{row['agents']:6d} {row['all_joined_s']:6.2f} s {row['all_see_a_change_ms']:6.1f} ms"
            f" {pair('alone'):>15} {pair('paced'):>15} {pair('at_once'):>18} {row['memory_mib']:6.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,100,300,1000")
    parser.add_argument("--beside", default="", help="etcd,tcpstore")
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--power-safe", action="store_true", help="wait for the disk at every write")
    parser.add_argument("--strangers", action="store_true", help="one client beside 500 strangers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    allowed = sorted(os.sched_getaffinity(0))
    cores = (allowed[0], allowed[0] if options.one_core else allowed[-1])
    os.sched_setaffinity(0, {cores[1]})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.strangers:
        print(json.dumps(asyncio.run(strangers(cores))))
        return
    kind = "power-safe" if options.power_safe else "process-safe"
    stated = conditions()
    found: dict[str, Any] = {f"liverun store, {kind}": asyncio.run(ours(sizes, cores, kind))}
    beside = options.beside.split(",")
    if "etcd" in beside:
        found["etcd, without fsync, JSON gateway"] = asyncio.run(etcd(sizes, cores))
    if "tcpstore" in beside:
        found["torch TCPStore"] = tcpstore(sizes, cores)
    if options.json:
        print(json.dumps({"conditions": stated, **found}))
        return
    print(", ".join(f"{name} {value}" for name, value in stated.items()))
    for name, rows in found.items():
        show(name, rows)


if __name__ == "__main__":
    main()
