"""One proven connection of the store's server: its requests, answered in order, and its watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import WSMsgType, web

from launcher.store import wire
from launcher.store.auth import Claim, Seal, Token
from launcher.store.contract import Change
from launcher.store.engine import Engine
from launcher.store.errors import FencedError, ForbiddenError, LimitError, MovedError, StoreError

MAX_WATCHES = 64
MAX_BEATS = 64
TELL_QUIET_AFTER = 1_000
"""revisions after which a watch that saw none of them is told how far it has come"""


@dataclass(slots=True)
class _Watch:
    prefix: str
    seen: int
    """the revision up to which nothing is owed"""
    told: int
    """the revision the client knows it has come to"""
    due: bool = True


class Session:
    """Serves one client until it goes, breaks the protocol, or the store moves."""

    def __init__(self, engine: Engine, claim: Claim, token: Token, ws: web.WebSocketResponse) -> None:
        self.claim = claim
        self._engine = engine
        self._generation = claim.generation
        self._ws = ws
        self._incoming = Seal(token, claim, "to server")
        self._outgoing = Seal(token, claim, "to client")
        self._lock = asyncio.Lock()
        self._watches: dict[int, _Watch] = {}
        self._due = asyncio.Event()
        self._beats = 0
        self._beats_sent: dict[int, float] = {}

    async def beat(self) -> None:
        """Ask whether the client is there; what it answers counts from now, not from when it comes."""
        self._beats += 1
        self._beats_sent[self._beats] = self._engine.clock()
        while len(self._beats_sent) > MAX_BEATS:
            self._beats_sent.pop(next(iter(self._beats_sent)))
        await self._send({"beat": self._beats})

    async def run(self, heard: Callable[[Claim, float], None]) -> None:
        """Serve until the connection is over. Raises ``ValueError`` for a client that breaks the rules.

        ``heard`` is told of each answered :meth:`beat` and when it was asked.
        """
        joiner = wire.Joiner(wire.MAX_REQUEST_BYTES)
        watching = asyncio.create_task(self._run_watches())
        try:
            async for frame in self._ws:
                if frame.type is not WSMsgType.BINARY:
                    raise ValueError("a frame that is not binary")
                data = joiner.add(self._incoming.open(frame.data))
                if data is None:
                    continue
                message = wire.parse(data)
                kind, number = wire.check_request(message)
                if kind == "beat":
                    if (sent := self._beats_sent.pop(number, None)) is not None:
                        heard(self.claim, sent)
                    continue
                await self._send(self._reply(kind, number, message))
                if kind == "watch":
                    self._due.set()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def offer(self, changes: Sequence[Change] | None, revision: int) -> None:
        """Hear what is new up to ``revision``; ``None``: look for yourself. Wakes only who has to be told."""
        for watch in self._watches.values():
            if watch.due:
                continue
            if changes is None or any(change.key.startswith(watch.prefix) for change in changes):
                watch.due = True
            else:
                watch.seen = revision
                watch.due = revision - watch.told >= TELL_QUIET_AFTER
            if watch.due:
                self._due.set()

    async def say_moved(self) -> None:
        """Tell the client where the store is now, and close."""
        await self._send({"moved": self._engine.machine.sealed})
        await self._ws.close()

    def _reply(self, kind: str, number: int, message: wire.Message) -> wire.Message:
        try:
            if self.claim.role == "observer" and kind in wire.WRITING:
                raise ForbiddenError(f"an observer does not {kind}; connect as agent or controller")
            return {"id": number, "ok": self._do(kind, number, message)}
        except StoreError as error:
            reply: wire.Message = {"id": number, "error": error.code, "say": str(error)}
            if isinstance(error, MovedError):
                reply["moved"] = self._engine.machine.sealed
            return reply

    def _do(self, kind: str, number: int, message: wire.Message) -> Any:
        engine, generation = self._engine, self._generation
        if kind == "get":
            entry = engine.get(message["key"])
            return None if entry is None else [entry.key, entry.value, entry.revision]
        if kind == "scan":
            listing = engine.scan(message["prefix"])
            entries = [[entry.key, entry.value, entry.revision] for entry in listing.entries]
            return {"revision": listing.revision, "entries": entries}
        if kind == "write":
            return engine.write(
                message["expected"], message["writes"], lease=message["lease"], request=message["request"],
                generation=generation,
            )  # fmt: skip
        if kind == "grant":
            return engine.grant(message["ttl_s"], request=message["request"], generation=generation)
        if kind == "keep":
            return engine.keep_alive(message["lease"])
        if kind == "revoke":
            return engine.revoke(message["lease"], generation=generation)
        if kind == "watch":
            if len(self._watches) >= MAX_WATCHES:
                raise LimitError(f"{len(self._watches)} watches on one connection; a store takes {MAX_WATCHES}")
            engine.after(message["prefix"], message["after"])
            self._watches[number] = _Watch(message["prefix"], message["after"], message["after"])
            return None
        if kind == "unwatch":
            self._watches.pop(message["watch"], None)
            return None
        if kind == "fence":
            return engine.fence(message["generation"], by=generation)
        if kind == "generation":
            wanted = message["generation"]
            if wanted is not None and wanted < engine.machine.fence:
                raise FencedError(f"generation {wanted} is over; {engine.machine.fence} is active")
            self._generation = wanted
            return None
        if kind == "snapshot":
            return engine.snapshot().dumps().decode()
        assert kind == "follow"
        records = engine.records_after(message["seq"], bytes.fromhex(message["digest"]))
        return None if records is None else [[seq, body.decode()] for seq, body in records]

    async def _run_watches(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            for number, watch in list(self._watches.items()):
                if watch.due:
                    await self._tell(number, watch)

    async def _tell(self, number: int, watch: _Watch) -> None:
        try:
            changes = self._engine.after(watch.prefix, watch.seen)
        except StoreError as error:
            self._watches.pop(number, None)
            if not isinstance(error, MovedError):
                await self._send({"watch": number, "error": error.code, "say": str(error)})
            return
        quiet = not changes and self._engine.machine.revision - watch.told < TELL_QUIET_AFTER
        watch.seen, watch.due = self._engine.machine.revision, False
        if not quiet:
            watch.told = watch.seen
            rows = [[change.key, change.value, change.revision] for change in changes]
            await self._send({"watch": number, "revision": watch.seen, "changes": rows})

    async def _send(self, message: wire.Message) -> None:
        data = wire.dump(message)
        async with self._lock:
            for frame in wire.split(data):
                await self._ws.send_bytes(self._outgoing.close(frame))
