"""One proven connection of the store's server: its requests, answered in order, and its watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import WSMsgType, web

from launcher.store import wire
from launcher.store.auth import Claim, Seal, Token
from launcher.store.engine import Engine
from launcher.store.errors import FencedError, ForbiddenError, LimitError, MovedError, StoreError

MAX_WATCHES = 64
TELL_QUIET_AFTER = 1_000
"""revisions after which a watch that saw none of them is told how far it has come"""


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
        self._watches: dict[int, tuple[str, int, int]] = {}
        """prefix, revision seen, revision told"""
        self._watch_changed = asyncio.Event()

    async def run(self, heard: Callable[[Claim], None]) -> None:
        """Serve; returns when the connection is over. Raises ``ValueError`` for a client that breaks the rules."""
        joiner = wire.Joiner(wire.MAX_REQUEST_BYTES)
        watching = asyncio.create_task(self._run_watches())
        try:
            async for frame in self._ws:
                if frame.type is not WSMsgType.BINARY:
                    raise ValueError("a frame that is not binary")
                data = joiner.add(self._incoming.open(frame.data))
                if data is None:
                    continue
                heard(self.claim)
                message = wire.parse(data)
                kind, number = wire.check_request(message)
                await self._send(self._reply(kind, number, message))
                if kind == "watch":
                    self._watch_changed.set()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

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
            self._watches[number] = (message["prefix"], message["after"], message["after"])
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
        records = engine.records_after(message["seq"])
        return None if records is None else [[seq, body.decode()] for seq, body in records[:1_000]]

    async def _run_watches(self) -> None:
        while not self._engine.closed:
            changed = self._engine.changed
            self._watch_changed.clear()
            for number in list(self._watches):
                await self._tell(number)
            if self._engine.changed is not changed:
                continue
            waits = [asyncio.ensure_future(event.wait()) for event in (changed, self._watch_changed)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _tell(self, number: int) -> None:
        prefix, seen, told = self._watches.get(number, ("", 0, 0))
        if number not in self._watches or seen == self._engine.machine.revision:
            return
        try:
            changes = self._engine.after(prefix, seen)
        except StoreError as error:
            del self._watches[number]
            if not isinstance(error, MovedError):
                await self._send({"watch": number, "error": error.code, "say": str(error)})
            return
        revision = self._engine.machine.revision
        quiet = not changes and revision - told < TELL_QUIET_AFTER
        self._watches[number] = (prefix, revision, told if quiet else revision)
        if not quiet:
            rows = [[change.key, change.value, change.revision] for change in changes]
            await self._send({"watch": number, "revision": revision, "changes": rows})

    async def _send(self, message: wire.Message) -> None:
        data = wire.dump(message)
        async with self._lock:
            for frame in wire.split(data):
                await self._ws.send_bytes(self._outgoing.close(frame))
