"""A real etcd server, started and ended by the tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_bed import HOST, Bed, Clock

from launcher.store.etcd import EtcdStore
from launcher.store.etcd_gateway import Login
from launcher.store.link import Place

READY_S = 20.0


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


class EtcdServer:
    """One member, its data in a folder of ours; alone, or one of ``members``: their names and ports to each other."""

    def __init__(
        self, folder: Path, certificates: Path | None = None, *, name: str = "t", members: dict[str, int] | None = None
    ) -> None:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("not to be had here: etcd; apt-get install etcd-server")
        self.program = program
        self.folder = folder
        self.certificates = certificates
        self.place = Place(HOST, 0)
        self._name, self._members = name, members
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs = itertools.count()

    @property
    def scheme(self) -> str:
        return "http" if self.certificates is None else "https"

    def start(self) -> None:
        """Start; another pair of ports if someone else took one meanwhile."""
        for _ in range(5):
            client, peer = (self.place.port, free_ports(1)[0]) if self.place.port else free_ports(2)
            self.launch(client, peer)
            if self.is_up():
                return
        pytest.fail(f"etcd did not start: {(self.folder / f'log-{self._name}').read_text()[-2000:]}")

    def launch(self, client: int, peer: int) -> None:
        """Start the process; whether it is healthy is for :meth:`is_up`."""
        self.place = Place(HOST, client)
        url = f"{self.scheme}://{self.place}"
        members = self._members or {self._name: peer}
        cluster = ",".join(f"{name}=http://{HOST}:{port}" for name, port in members.items())
        tls = []
        if self.certificates is not None:
            tls = ["--cert-file", str(self.certificates / "cert.pem"), "--key-file", str(self.certificates / "key.pem")]
        with (self.folder / f"log-{self._name}").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self.program, "--name", self._name, "--data-dir", str(self.folder / f"data-{self._name}"),
                    "--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls",
                    f"http://{HOST}:{peer}", "--initial-advertise-peer-urls", f"http://{HOST}:{peer}",
                    "--initial-cluster", cluster, "--unsafe-no-fsync", "--log-level", "error", *tls,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def is_up(self) -> bool:
        """Wait until it is healthy; one that is not in time is ended."""
        assert self._process is not None
        context = None
        if self.certificates is not None:
            context = ssl.create_default_context(cafile=str(self.certificates / "cert.pem"))
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with (
                contextlib.suppress(OSError, ValueError),
                urllib.request.urlopen(f"{self.scheme}://{self.place}/health", timeout=1.0, context=context) as reply,
            ):
                if json.loads(reply.read())["health"] == "true":
                    return True
        self.stop()
        return False

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    @contextlib.asynccontextmanager
    async def bed(self, **more: Any) -> AsyncIterator[EtcdBed]:
        """A job of its own in this server."""
        bed = EtcdBed(self, f"job-{next(self._jobs)}", more)
        try:
            yield bed
        finally:
            for store in bed.clients:
                await store.aclose()


class EtcdBed(Bed):
    def __init__(self, server: EtcdServer, job: str, more: dict[str, Any]) -> None:
        super().__init__(Clock())
        self._server = server
        self._job = job
        self._more = more
        self.clients: list[EtcdStore] = []

    async def client(self, generation: int | None = None, **more: Any) -> EtcdStore:
        settings = {"timeout_s": 10.0, **self._more, **more}
        store = EtcdStore([self._server.place], job=self._job, generation=generation, **settings)
        self.clients.append(store)
        return store

    async def lapse(self, seconds: float) -> None:
        """etcd's clock cannot be moved: the time itself has to pass."""
        await asyncio.sleep(seconds)


def running(folder: Path, certificates: Path | None = None) -> Iterator[EtcdServer]:
    server = EtcdServer(folder, certificates)
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def cluster(folder: Path, size: int = 3) -> Iterator[list[EtcdServer]]:
    """Members of one cluster; again with other ports if someone else took one meanwhile."""
    for attempt in range(5):
        ports = free_ports(2 * size)
        members = {f"m{number}": ports[number] for number in range(size)}
        (folder / str(attempt)).mkdir()
        servers = [EtcdServer(folder / str(attempt), name=name, members=members) for name in members]
        try:
            for server, client, peer in zip(servers, ports[size:], ports, strict=False):
                server.launch(client, peer)
            if all([server.is_up() for server in servers]):  # noqa: C419  (each is to be waited for)
                yield servers
                return
        finally:
            for server in servers:
                server.stop()
    pytest.fail(f"no cluster of etcd started in {folder}")


def secure(server: EtcdServer, login: Login) -> None:
    """Turn on users: root, and one that may touch nothing but the launcher's keys."""
    context = None
    if server.certificates is not None:
        context = ssl.create_default_context(cafile=str(server.certificates / "cert.pem"))

    def ask(what: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(f"{server.scheme}://{server.place}/v3/auth/{what}", json.dumps(body).encode())
        urllib.request.urlopen(request, timeout=10.0, context=context).close()

    ask("user/add", {"name": "root", "password": "root-secret"})
    ask("role/add", {"name": "root"})
    ask("user/grant", {"user": "root", "role": "root"})
    ask("user/add", {"name": login.user, "password": login.password})
    ask("role/add", {"name": "launcher"})
    from launcher.store.etcd_gateway import after_prefix, to_base64

    perm = {"permType": "READWRITE", "key": to_base64("/liverun/"), "range_end": after_prefix("/liverun/")}
    ask("role/grant", {"name": "launcher", "perm": perm})
    ask("user/grant", {"user": login.user, "role": "launcher"})
    ask("enable", {})
