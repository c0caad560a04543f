"""Serves one job's store on one address: who has not proved to hold the token gets a nonce, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

from aiohttp import ClientConnectionError, web

from launcher.store.auth import Claim, Token
from launcher.store.contract import Change
from launcher.store.engine import Engine
from launcher.store.errors import CompactedError
from launcher.store.guard import Guard
from launcher.store.session import Session

TICK_S = 0.5
"""how long a lease may outlive its time when nobody asks; it never ends early"""


class StoreServer(Guard):
    """The engine's door. Stop it with :meth:`stop`; the engine stays open."""

    def __init__(
        self, engine: Engine, token: Token, *, job: str, random: Callable[[int], bytes],
        ssl_context: ssl.SSLContext | None = None, beat_s: float | None = None,
    ) -> None:  # fmt: skip
        """``beat_s``: how often every agent is asked whether it is there, for a write gate; ``None``: never."""
        super().__init__(token, job=job, random=random, ssl_context=ssl_context)
        self._beat_s = beat_s
        self.engine = engine
        self.heard: dict[str, float] = {}
        """for each node, when the latest :meth:`beat` it has answered was asked, on the engine's clock"""
        self._sessions: dict[Session, web.WebSocketResponse] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connections(self) -> list[web.WebSocketResponse]:
        """See :class:`Guard`."""
        return list(self._sessions.values())

    async def start(self, host: str, port: int = 0, *, listener: socket.socket | None = None) -> tuple[str, int]:
        """Listen at one address; that address, and the port, which is the kernel's choice for 0.

        Raises ``ValueError`` for an address that means all of them, and ``OSError``.
        """
        place = await self.listen(host, port, listener=listener)
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._spread())]
        if self._beat_s is not None:
            self._tasks.append(asyncio.create_task(self._beat_on(self._beat_s)))
        return place

    async def stop(self) -> None:
        """Close every connection and stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.close()

    async def send_away(self) -> None:
        """Tell every client where a store that was sealed has gone."""
        for session in list(self._sessions):
            with contextlib.suppress(ConnectionError, ClientConnectionError):
                await session.say_moved()

    def judge(self, claim: Claim) -> dict[str, Any]:
        """See :class:`Guard`."""
        machine = self.engine.machine
        if machine.sealed is not None:
            return {"error": "moved", "say": "the store has moved", "moved": machine.sealed}
        if claim.generation is not None and claim.generation < machine.fence:
            say = f"generation {claim.generation} is over; {machine.fence} is active"
            return {"error": "fenced", "say": say, "generation": machine.fence}
        return {"term": machine.term, "revision": machine.revision}

    async def serve(self, claim: Claim, ws: web.WebSocketResponse) -> None:
        """See :class:`Guard`."""
        session = Session(self.engine, claim, self._token, ws)
        self._sessions[session] = ws
        try:
            await session.run(self._note_heard)
        finally:
            del self._sessions[session]

    def _note_heard(self, claim: Claim, asked: float) -> None:
        self.heard[claim.node] = max(asked, self.heard.get(claim.node, asked))

    async def beat(self) -> None:
        """Ask every agent whether it is there."""
        for session in [session for session in self._sessions if session.claim.role == "agent"]:
            with contextlib.suppress(ConnectionError, ClientConnectionError):
                await session.beat()

    async def _spread(self) -> None:
        """Tell each session of what is new; a write costs the sessions it does not concern next to nothing."""
        last = self.engine.machine.revision
        while not self.engine.closed:
            changed, machine = self.engine.changed, self.engine.machine
            changes: list[Change] | None = None
            with contextlib.suppress(CompactedError):
                changes = machine.after("", last)
            last = machine.revision
            for session in list(self._sessions):
                session.offer(changes, last)
            await changed.wait()

    async def _beat_on(self, every_s: float) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(every_s)

    async def _tick(self) -> None:
        while not self.engine.closed:
            if self.engine.machine.sealed is None:
                self.engine.expire()
            due = self.engine.next_due_s()
            await asyncio.sleep(TICK_S if due is None else min(max(due, 0.01), TICK_S))
