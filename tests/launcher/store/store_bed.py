"""Stores to test, every implementation behind the same handful of verbs."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from launcher.store import EmbeddedStore, Store
from launcher.store.auth import Token
from launcher.store.client import RemoteStore
from launcher.store.engine import Engine
from launcher.store.link import Place
from launcher.store.server import StoreServer

HOST = "127.0.0.1"
TOKEN = Token(bytes(range(32)))
JOB = "job-1"


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bytes:
    """Random bytes that are the same in every run."""

    def __init__(self, seed: int = 0) -> None:
        self._numbers = itertools.count()
        self._seed = seed

    def __call__(self, size: int) -> bytes:
        text = f"{self._seed}/{next(self._numbers)}".encode()
        return hashlib.shake_256(text).digest(size)


class Bed:
    """One store; ``client`` gives another client of it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    async def client(self, generation: int | None = None) -> Store:
        raise NotImplementedError

    async def lapse(self, seconds: float) -> None:
        """Let time pass for the store, and nobody say anything."""
        self.clock.now += seconds


class EmbeddedBed(Bed):
    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(clock)
        self.engine = Engine(folder / "store.db", clock=clock)

    async def client(self, generation: int | None = None) -> Store:
        return EmbeddedStore.on(self.engine, generation=generation)

    async def close(self) -> None:
        self.engine.close()


class ServedBed(EmbeddedBed):
    def __init__(self, folder: Path, clock: Clock, **tls: Any) -> None:
        super().__init__(folder, clock)
        self.server = StoreServer(
            self.engine, TOKEN, job=JOB, random=secrets.token_bytes, ssl_context=tls.get("server")
        )
        self._client_tls = tls.get("client")
        self.place = Place(HOST, 0)
        self.clients: list[RemoteStore] = []

    async def start(self) -> None:
        self.place = Place(*await self.server.start(HOST, self.place.port))

    async def client(self, generation: int | None = None, **more: Any) -> RemoteStore:
        settings = {"job": JOB, "node": f"n{len(self.clients)}", "role": "agent", "timeout_s": 10.0, **more}
        token = settings.pop("token", TOKEN)
        places = settings.pop("places", [self.place])
        store = RemoteStore(
            places, token, random=Bytes(len(self.clients)), generation=generation,
            ssl_context=self._client_tls, **settings,
        )  # fmt: skip
        self.clients.append(store)
        return store

    async def close(self) -> None:
        for store in self.clients:
            await store.aclose()
        await self.server.stop()
        await super().close()


@asynccontextmanager
async def served(folder: Path, clock: Clock | None = None, **tls: Any) -> AsyncIterator[ServedBed]:
    """A store on a port of its own."""
    bed = ServedBed(folder, clock or Clock(), **tls)
    await bed.start()
    try:
        yield bed
    finally:
        await bed.close()


@asynccontextmanager
async def open_bed(kind: str, folder: Path, **more: Any) -> AsyncIterator[Bed]:
    """A store of a kind: ``embedded``, ``served``, ``served-tls`` or ``etcd``."""
    if kind == "embedded":
        bed = EmbeddedBed(folder, Clock())
        try:
            yield bed
        finally:
            await bed.close()
    elif kind == "etcd":
        async with more["etcd"].bed() as etcd:
            yield etcd
    else:
        tls = more["tls"]() if kind == "served-tls" else {}
        async with served(folder, **tls) as bed:
            yield bed
