"""A port that lets in who proves to hold the job's token; anyone else gets a nonce, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from abc import ABC, abstractmethod
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
from launcher.store.door import HANDSHAKE_S, Door, Strangers, Visit, bind_one

log = logging.getLogger("liverun.store")
SESSION_PATH = "/v1/session"
HEALTH_PATH = "/healthz"
HEARTBEAT_S = 15.0
MAX_NAME_CHARS = 128


class Guard(ABC):
    """Listens at one address; what happens on a proven connection is its heir's."""

    def __init__(
        self, token: Token, *, job: str, random: Callable[[int], bytes], ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self.strangers = Strangers()
        self._token = token
        self._job = job
        self._random = random
        self._ssl = ssl_context
        self._door: Door | None = None
        self._listener: asyncio.Server | None = None

    @abstractmethod
    def judge(self, claim: Claim) -> dict[str, Any]:
        """Answer a proven claim: with ``term``, or with ``error`` and ``say``."""

    @abstractmethod
    async def serve(self, claim: Claim, ws: web.WebSocketResponse) -> None:
        """Serve a proven connection to its end. Raises ``ValueError`` for a client that breaks the rules."""

    @property
    @abstractmethod
    def connections(self) -> list[web.WebSocketResponse]:
        """The proven connections that are open."""

    async def listen(self, host: str, port: int = 0, *, listener: socket.socket | None = None) -> tuple[str, int]:
        """Listen at one address; that address, and the port, which is the kernel's choice for 0.

        Raises ``ValueError`` for an address that means all of them, and ``OSError``.
        """
        listener = listener or bind_one(host, port)
        self._door = Door(self.handle, self.strangers)
        self._listener = await asyncio.get_running_loop().create_server(
            self._door, sock=listener, ssl=self._ssl, backlog=1024,
            ssl_handshake_timeout=HANDSHAKE_S if self._ssl else None,
        )  # fmt: skip
        return host, int(listener.getsockname()[1])

    async def close(self) -> None:
        """Close every connection and stop listening."""
        if self._listener is not None:
            self._listener.close()
        for ws in self.connections:
            with contextlib.suppress(ConnectionError, ClientConnectionError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await ws.close()
        if self._door is not None:
            await self._door.shutdown(0.2)

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
            await self.serve(claim, ws)
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
        answer = (
            self.judge(claim)
            if claim.job == self._job
            else {"error": "forbidden", "say": f"this is the store of job {self._job}, not of {claim.job}"}
        )
        body = wire.dump(answer)
        proof = server_proof(self._token, claim, body)
        await ws.send_bytes(wire.dump({"answer": body.decode(), "proof": proof.hex()}))
        if "error" in answer:
            raise ValueError(answer["say"])
        return claim


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
