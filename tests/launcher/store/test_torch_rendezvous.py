"""A job's store as torch's rendezvous: torch's contract for backends, its c10d store, and torchrun itself."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from store_bed import HOST, JOB, TOKEN

from launcher.store.blocking import StoreThread
from launcher.store.engine import Engine
from launcher.store.link import Place
from launcher.store.server import StoreServer

rendezvous = pytest.importorskip("torch.distributed.elastic.rendezvous")
dist = pytest.importorskip("torch.distributed")

from launcher.torch_rendezvous import AgentStore, Backend, make_handler, open_store  # noqa: E402

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.e2e


class Served:
    """A store that is served from a thread, so that callers may block."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.now = 100.0
        self.clients: list[StoreThread] = []
        self.place: Place = self.call(self._open(folder / "store.db"))

    async def _open(self, journal: Path) -> Place:
        self.engine = Engine(journal, clock=lambda: self.now)  # here: SQLite is used in the thread it was opened in
        self.server = StoreServer(self.engine, TOKEN, job=JOB, random=secrets.token_bytes)
        return Place(*await self.server.start(HOST))

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def client(self, **more: Any) -> StoreThread:
        self.clients.append(StoreThread(self.place, TOKEN, job=JOB, **{"lease_s": 60, "timeout_s": 20} | more))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        await self.server.stop()
        self.engine.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


# --- what torch asks of a rendezvous backend: RendezvousBackend's docstring, case by case -----------------------


@pytest.fixture
def backend(served: Served) -> Backend:
    return Backend(served.client(), "run 1")


def test_there_is_no_state_until_one_is_set(backend: Backend) -> None:
    assert backend.name == "liverun"
    assert backend.get_state() is None
    state, token, done = backend.set_state(b"\x80\x04 not text")
    assert (state, done) == (b"\x80\x04 not text", True)
    assert backend.get_state() == (state, token)


def test_a_state_is_replaced_with_the_token_it_was_read_with(backend: Backend) -> None:
    _, first, _ = backend.set_state(b"x")
    state, second, done = backend.set_state(b"y", first)
    assert (state, done) == (b"y", True)
    assert second != first
    same, third, done = backend.set_state(b"y", second)  # written again, the same
    assert (same, done, third != second) == (b"y", True, True)


@pytest.mark.parametrize("token", ["stale", None, "invalid", b"bytes", 10**6, True])
def test_a_token_that_is_not_current_changes_nothing_and_shows_what_is_there(backend: Backend, token: Any) -> None:
    _, first, _ = backend.set_state(b"x")
    now = backend.set_state(b"y", first)[:2]
    assert backend.set_state(b"z", first if token == "stale" else token) == (*now, False)
    assert backend.get_state() == now


def test_a_token_without_a_state_makes_none(backend: Backend) -> None:
    assert backend.set_state(b"x", "invalid") is None
    assert backend.set_state(b"x", 7) is None
    assert backend.get_state() is None


def test_a_state_that_is_not_ours_is_torchs_error(backend: Backend, served: Served) -> None:
    client = served.client()
    client.call(client.write({}, {"torch/rendezvous/run%201": "no base64!"}))
    with pytest.raises(rendezvous.RendezvousStateError, match="does not hold what this backend writes"):
        backend.get_state()


def test_of_many_that_set_at_once_one_wins_and_all_see_it(served: Served) -> None:
    backends = [Backend(served.client(), "run") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: backends[i].set_state(b"%d" % i), range(8)))
        assert sum(done for _, _, done in made) == 1
        assert len({(state, token) for state, token, _ in made}) == 1
        (token,) = {token for _, token, _ in made}
        again = list(pool.map(lambda i: backends[i].set_state(b"again %d" % i, token), range(8)))
    assert sum(done for _, _, done in again) == 1
    assert {(state, token) for state, token, _ in again} == {backends[0].get_state()}


def test_runs_do_not_see_each_other_and_one_that_is_over_is_forgotten(served: Served) -> None:
    """Known complaint 21: stale state of another run. Known complaint 3: "rendezvous closed" for a run that is new."""
    one, two = Backend(served.client(), "run"), Backend(served.client(), "run.1")
    one.set_state(b"x")
    assert two.get_state() is None
    stores = [AgentStore(served.clients[0], "run"), AgentStore(served.clients[1], "run.1")]
    for store in stores:
        store.set("k", "old")
    served.now += 59.0
    _, token = one.get_state()
    one.set_state(b"beat", token)  # a heartbeat renews everything of this agent
    served.now += 59.0
    assert one.get_state() is not None
    assert (stores[0].check(["k"]), stores[1].check(["k"])) == (True, False)
    served.now += 2.0
    assert one.get_state() is None


def test_a_new_run_begins_without_the_keys_of_one_before_it(served: Served) -> None:
    """Known complaint 21: two jobs share stale state."""
    client, other = served.client(), served.client()
    store, elsewhere = AgentStore(client, "run"), AgentStore(other, "run.1")
    store.set("MASTER_PORT", "1")
    elsewhere.set("MASTER_PORT", "2")
    Backend(client, "run").set_state(b"x")
    assert not store.check(["MASTER_PORT"])
    assert elsewhere.get("MASTER_PORT") == b"2"


def test_a_store_that_is_gone_is_torchs_connection_error(served: Served) -> None:
    backend = Backend(served.client(timeout_s=0.3), "run")
    backend.set_state(b"x")
    served.call(served.server.stop())
    with pytest.raises(rendezvous.RendezvousConnectionError, match=r"store at .* did not answer"):
        backend.get_state()


# --- the c10d store of torch's agents ---------------------------------------------------------------------------


def test_the_agents_store_does_what_a_c10d_store_does_through_a_prefix_too(served: Served) -> None:
    bare = AgentStore(served.client(), "run")
    for store in (bare, dist.PrefixStore("torch.rendezvous.run.1", bare)):
        store.set("a", b"\x00\xff")
        assert store.get("a") == b"\x00\xff"
        assert (store.add("n", 3), store.add("n", -1)) == (3, 2)
        assert store.compare_set("c", "", "1") == b"1"
        assert store.compare_set("c", "0", "2") == b"1"
        assert store.compare_set("c", "1", "2") == b"2"
        assert store.compare_set("d", "1", "2") == b"1"  # as TCPStore: what was expected, and nothing is written
        assert not store.check(["d"])
        store.multi_set([f"m{i}" for i in range(70)], ["v"] * 70)
        assert store.multi_get(["m0", "m69"]) == [b"v", b"v"]
        store.append("m0", "w")
        assert store.get("m0") == b"vw"
        assert (store.check(["a", "n"]), store.check(["a", "none"])) == (True, False)
        assert (store.delete_key("a"), store.delete_key("a")) == (True, False)
        store.wait(["n", "c"], timedelta(seconds=5))
        assert store.num_keys() == bare.num_keys()
    assert bare.num_keys() == 2 * 72


def test_a_reader_waits_for_the_writer_and_no_longer_than_its_time(served: Served) -> None:
    store, other = AgentStore(served.client(), "run"), AgentStore(served.client(), "run")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.multi_get, ["here", "there"])
        other.set("here", "1")
        assert not waiting.done()
        other.set("there", "2")
        assert waiting.result(20) == [b"1", b"2"]
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError, match=r"nobody wrote torch/store/run/nowhere in 0.2 s"):
        store.get("nowhere")
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda i: (store, other)[i % 2].add("sum", 1), range(40)))
    assert sorted(sums) == list(range(1, 41))


# --- as torchrun finds it ---------------------------------------------------------------------------------------


def parameters(endpoint: str, **config: str) -> Any:
    return rendezvous.RendezvousParameters("liverun", endpoint, JOB, 1, 1, None, **config)


@pytest.mark.parametrize(
    ("endpoint", "environ", "sentence"),
    [
        ("", {"LIVERUN_TOKEN": "00" * 32}, "pass --rdzv-endpoint HOST:PORT"),
        ("host", {"LIVERUN_TOKEN": "00" * 32}, "'host' is no place of a store"),
        ("host:1", {}, "no token: set LIVERUN_TOKEN_FILE"),
        ("host:1", {"LIVERUN_TOKEN": "xx"}, "LIVERUN_TOKEN does not hold 64 hexadecimal digits"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(endpoint: str, environ: dict[str, str], sentence: str) -> None:
    """Known complaint 23: a missing endpoint silently means localhost."""
    with pytest.raises(ValueError, match=sentence):
        open_store(parameters(endpoint), environ)


def test_a_wrong_token_is_torchs_connection_error_and_is_not_shown(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIVERUN_TOKEN", "ab" * 32)
    handler = make_handler(parameters(str(served.place), read_timeout="1"))
    with pytest.raises(rendezvous.RendezvousConnectionError, match="refused the token") as refused:
        handler.is_closed()
    assert "abab" not in str(refused.value)
    handler._store._thread.close()


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import torch.distributed.elastic.rendezvous  # loads every registered handler, ours too
assert "launcher" not in sys.modules, "a worker has imported the launcher"
dist.init_process_group("gloo")
value = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(value)
print(os.environ["RANK"], os.environ["GROUP_RANK"], os.environ["WORLD_SIZE"], value.item(), flush=True)
dist.destroy_process_group()
"""


def test_two_torchruns_meet_in_a_served_store(tmp_path: Path) -> None:
    """Real processes throughout; registered as pyproject.toml says."""
    info = tmp_path / "site" / "liverun_elastic-0.dist-info"
    info.mkdir(parents=True)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: liverun-elastic\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items())
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "launcher.py").write_text("raise SystemExit('the user has a launcher.py too')\n")
    environ = {
        **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'site'}", "OMP_NUM_THREADS": "1",
        "LIVERUN_TOKEN_FILE": str(tmp_path / "token"),
    }  # fmt: skip
    serve = [sys.executable, "-m", "liverun", "store", "--job", "meet", "--host", HOST, "--journal", str(tmp_path / "db")]
    store = subprocess.Popen(
        [*serve, "--token-file", str(tmp_path / "token")], env=environ, stdout=subprocess.PIPE, text=True
    )
    runs: list[subprocess.Popen[str]] = []
    try:
        assert store.stdout is not None
        place = json.loads(store.stdout.readline())
        words = [
            "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=liverun", f"--rdzv-endpoint={HOST}:{place['port']}",
            "--rdzv-id=meet", f"--local-addr={HOST}", "--rdzv-conf=last_call_timeout=1", "script.py",
        ]  # fmt: skip
        runs = [
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words], env=environ, cwd=tmp_path, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )
            for _ in range(2)
        ]  # fmt: skip
        said = [run.communicate(timeout=120) for run in runs]
        assert [run.returncode for run in runs] == [0, 0], said
        assert sorted(out for out, _ in said) == ["0 0 2 3.0\n", "1 1 2 3.0\n"]
        assert not any("plugin" in err for _, err in said)
    finally:
        for process in (*runs, store):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL) if process in runs else process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
