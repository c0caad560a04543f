"""Serves one job's store on one address: who has not proved to hold the token gets a nonce, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Any

from aiohttp import ClientConnectionError, WSMsgType, web

from launcher.store import wire
from launcher.store.auth import (
    NONCE_BYTES,
    PROTOCOL,
    ROLES,
    Claim,
    Token,
    client_proof,
    same,
    server_proof,
)
from launcher.store.contract import Change
from launcher.store.door import HANDSHAKE_S, Door, Strangers, Visit, bind_one
from launcher.store.engine import Engine
from launcher.store.errors import CompactedError
from launcher.store.session import Session

log = logging.getLogger("liverun.store")
SESSION_PATH = "/v1/session"
HEALTH_PATH = "/healthz"
HEARTBEAT_S = 15.0
TICK_S = 0.5
"""how long a lease may outlive its time when nobody asks; it never ends early"""
MAX_NAME_CHARS = 128


class StoreServer:
    """The engine's door. Stop it with :meth:`stop`; the engine stays open."""

    def __init__(
        self, engine: Engine, token: Token, *, job: str, random: Callable[[int], bytes],
        ssl_context: ssl.SSLContext | None = None, beat_s: float | None = None,
    ) -> None:  # fmt: skip
        """``beat_s``: how often every agent is asked whether it is there, for a write gate; ``None``: never."""
        self._beat_s = beat_s
        self.engine = engine
        self.heard: dict[str, float] = {}
        """for each node, when the latest :meth:`beat` it has answered was asked, on the engine's clock"""
        self.strangers = Strangers()
        self._token = token
        self._job = job
        self._random = random
        self._ssl = ssl_context
        self._sessions: dict[Session, web.WebSocketResponse] = {}
        self._door: Door | None = None
        self._listener: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen at one address; that address, and the port, which is the kernel's choice for 0.

        Raises ``ValueError`` for an address that means all of them, and ``OSError``.
        """
        listener = bind_one(host, port)
        self._door = Door(self.handle, self.strangers)
        self._listener = await asyncio.get_running_loop().create_server(
            self._door, sock=listener, ssl=self._ssl, backlog=1024,
            ssl_handshake_timeout=HANDSHAKE_S if self._ssl else None,
        )  # fmt: skip
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._spread())]
        if self._beat_s is not None:
            self._tasks.append(asyncio.create_task(self._beat_on(self._beat_s)))
        return host, int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Close every connection and stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for ws in list(self._sessions.values()):
            with contextlib.suppress(ConnectionError, ClientConnectionError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await ws.close()
        if self._door is not None:
            await self._door.shutdown(0.2)

    async def send_away(self) -> None:
        """Tell every client where a store that was sealed has gone."""
        for session in list(self._sessions):
            with contextlib.suppress(ConnectionError, ClientConnectionError):
                await session.say_moved()

    # --- one connection -----------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one HTTP request."""
        if request.method == "GET" and request.path == HEALTH_PATH:
            return web.Response(text="ok\n")
        if request.method != "GET" or request.path != SESSION_PATH:
            return web.Response(status=404, headers={"Connection": "close"})
        ws = web.WebSocketResponse(
            max_msg_size=wire.MAX_FRAME_BYTES, compress=False, heartbeat=HEARTBEAT_S, timeout=1.0
        )
        if not ws.can_prepare(request).ok:
            return web.Response(status=400, headers={"Connection": "close"})
        await ws.prepare(request)
        try:
            claim = await self._greet(ws)
            visit = request.protocol
            assert isinstance(visit, Visit)
            visit.prove()
            await self._serve(claim, ws)
        except ValueError as error:
            self.strangers.refused += 1
            log.debug("closed a connection: %s", error)
        except (ConnectionError, ClientConnectionError):
            pass
        with contextlib.suppress(ConnectionError, ClientConnectionError):
            await ws.close()
        return ws

    async def _greet(self, ws: web.WebSocketResponse) -> Claim:
        """Prove each other. Raises ``ValueError`` for a client that is not let in."""
        nonce = self._random(NONCE_BYTES)
        await ws.send_bytes(wire.dump({"protocol": PROTOCOL, "nonce": nonce.hex()}))
        frame = await ws.receive()
        if frame.type is not WSMsgType.BINARY or len(frame.data) > wire.MAX_HELLO_BYTES:
            raise ValueError("no claim came")
        claim, proof = _read_claim(wire.parse(frame.data), nonce)
        if not same(proof, client_proof(self._token, claim)):
            await ws.send_bytes(wire.dump({"refused": "forbidden"}))
            raise ValueError("a claim without its proof")
        answer = self._judge(claim)
        body = wire.dump(answer)
        proof = server_proof(self._token, claim, body)
        await ws.send_bytes(wire.dump({"answer": body.decode(), "proof": proof.hex()}))
        if "error" in answer:
            raise ValueError(answer["say"])
        return claim

    def _judge(self, claim: Claim) -> dict[str, Any]:
        machine = self.engine.machine
        if claim.job != self._job:
            return {"error": "forbidden", "say": f"this is the store of job {self._job}, not of {claim.job}"}
        if machine.sealed is not None:
            return {"error": "moved", "say": "the store has moved", "moved": machine.sealed}
        if claim.generation is not None and claim.generation < machine.fence:
            say = f"generation {claim.generation} is over; {machine.fence} is active"
            return {"error": "fenced", "say": say, "generation": machine.fence}
        return {"term": machine.term, "revision": machine.revision}

    async def _serve(self, claim: Claim, ws: web.WebSocketResponse) -> None:
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


def _read_claim(message: wire.Message, server_nonce: bytes) -> tuple[Claim, bytes]:
    names = [message.get(name) for name in ("job", "node", "role")]
    generation = message.get("generation")
    if not all(isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS for name in names):
        raise ValueError("a claim without job, node or role")
    if names[2] not in ROLES or not (generation is None or wire._is_int(generation)):
        raise ValueError("a claim of no known role or generation")
    nonce, proof = bytes.fromhex(str(message.get("nonce"))), bytes.fromhex(str(message.get("proof")))
    if len(nonce) != NONCE_BYTES:
        raise ValueError("a nonce of another size")
    job, node, role = map(str, names)
    claim = Claim(
        job=job, node=node, role=role, generation=generation, server_nonce=server_nonce, client_nonce=nonce
    )
    return claim, proof
