"""One connection from a client to a store: the mutual proof, then sealed frames both ways."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from launcher.store import wire
from launcher.store.auth import NONCE_BYTES, PROTOCOL, Claim, Seal, Token, client_proof, same, server_proof
from launcher.store.errors import BY_CODE, ForbiddenError, StoreError

CONNECT_S = 5.0
HEARTBEAT_S = 10.0
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0


def backoff_s(tries: int, random: Callable[[int], bytes], *, longest_s: float = LONGEST_BACKOFF_S) -> float:
    """Return how long to wait before connecting again: twice as long each time, less up to half of it by chance.

    So a thousand clients that lose a server at once do not come back at once.
    """
    share = int.from_bytes(random(2), "big") / 0xFFFF
    return min(longest_s, FIRST_BACKOFF_S * 2.0 ** min(tries, 10)) * (0.5 + share / 2)


@dataclass(frozen=True)
class Place:
    """Where a store listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str) -> Place:
        """Read ``HOST:PORT``. Raises ``ValueError``."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is no place of a store; pass HOST:PORT")
        return Place(host.strip("[]"), int(port))


class Moved(Exception):  # noqa: N818  (news, not a fault)
    """The store is at another place now, under a later term."""

    def __init__(self, place: Place, term: int) -> None:
        super().__init__(f"moved to {place}, term {term}")
        self.place = place
        self.term = term

    @staticmethod
    def read(values: Any) -> Moved:
        """Read what a server said. Raises ``ValueError``."""
        if not isinstance(values, dict) or type(values.get("term")) is not int:
            raise ValueError("a store that has moved, but does not say where")
        return Moved(Place.parse(str(values.get("to"))), values["term"])


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who a client says it is."""

    token: Token
    job: str
    node: str
    role: str
    random: Callable[[int], bytes]


class Connection:
    """A proven connection: :meth:`post` never waits; iterate over it for what comes in."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse, claim: Claim, token: Token, term: int) -> None:
        self.term = term
        self._ws = ws
        self._incoming = Seal(token, claim, "to client")
        self._outgoing = Seal(token, claim, "to server")
        self._waiting: deque[bytes] = deque()
        self._posted = asyncio.Event()
        self._dropped = asyncio.Event()

    def post(self, message: dict[str, Any]) -> None:
        """Send a message, after those posted before."""
        self._waiting.append(wire.dump(message))
        self._posted.set()

    def drop(self) -> None:
        """Close as soon as may be."""
        self._dropped.set()
        self._posted.set()

    async def write(self) -> None:
        """Send what is posted, until dropped."""
        while not self._dropped.is_set():
            await self._posted.wait()
            self._posted.clear()
            while self._waiting and not self._dropped.is_set():
                for frame in wire.split(self._waiting.popleft()):
                    await self._ws.send_bytes(self._outgoing.close(frame))
        await self._ws.close()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        joiner = wire.Joiner(wire.MAX_REPLY_BYTES)
        async for frame in self._ws:
            if frame.type is not aiohttp.WSMsgType.BINARY:
                raise ValueError("a frame that is not binary")
            data = joiner.add(self._incoming.open(frame.data))
            if data is not None:
                yield wire.parse(data)


@contextlib.asynccontextmanager
async def connect(
    http: aiohttp.ClientSession, place: Place, identity: Identity, *, generation: int | None, min_term: int,
    context: ssl.SSLContext | None,
) -> AsyncIterator[Connection]:  # fmt: skip
    """Connect and prove each other.

    Raises ``Moved``, ``ForbiddenError``, another ``StoreError`` the server proved to have said, or what a broken
    connection raises.
    """
    scheme = "http" if context is None else "https"
    url = URL.build(scheme=scheme, host=place.host, port=place.port, path="/v1/session")
    async with asyncio.timeout(CONNECT_S) as limit, http.ws_connect(
        url, max_msg_size=wire.MAX_FRAME_BYTES, compress=0, heartbeat=HEARTBEAT_S, ssl=context or True,
        timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
    ) as ws:  # fmt: skip
        claim = await _prove(ws, place, identity, generation)
        term = await _check(ws, place, identity, claim)
        if term < min_term:
            raise ConnectionError(f"store at {place} is of term {term}; {min_term} has been seen")
        link = Connection(ws, claim, identity.token, term)
        limit.reschedule(None)
        writing = asyncio.create_task(link.write())
        try:
            yield link
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


async def _receive(ws: aiohttp.ClientWebSocketResponse) -> bytes:
    frame = await ws.receive()
    if frame.type is not aiohttp.WSMsgType.BINARY:
        raise ConnectionError(f"closed before it proved itself ({frame.type.name})")
    return bytes(frame.data)


async def _prove(
    ws: aiohttp.ClientWebSocketResponse, place: Place, identity: Identity, generation: int | None
) -> Claim:
    hello = wire.parse(await _receive(ws))
    if hello.get("protocol") != PROTOCOL:
        raise ForbiddenError(f"store at {place} speaks protocol {hello.get('protocol')}, this client {PROTOCOL}")
    claim = Claim(
        job=identity.job, node=identity.node, role=identity.role, generation=generation,
        server_nonce=bytes.fromhex(str(hello.get("nonce"))), client_nonce=identity.random(NONCE_BYTES),
    )  # fmt: skip
    if len(claim.server_nonce) != NONCE_BYTES:
        raise ValueError("a nonce of another size")
    await ws.send_bytes(
        wire.dump(
            {
                "job": claim.job, "node": claim.node, "role": claim.role, "generation": generation,
                "nonce": claim.client_nonce.hex(), "proof": client_proof(identity.token, claim).hex(),
            }
        )
    )  # fmt: skip
    return claim


async def _check(ws: aiohttp.ClientWebSocketResponse, place: Place, identity: Identity, claim: Claim) -> int:
    reply = wire.parse(await _receive(ws))
    if "refused" in reply:
        raise ForbiddenError(
            f"store at {place} refused the token; point LIVERUN_TOKEN_FILE at the file of job {identity.job}"
        )
    body = str(reply.get("answer")).encode()
    if not same(bytes.fromhex(str(reply.get("proof"))), server_proof(identity.token, claim, body)):
        raise ForbiddenError(f"what listens at {place} does not hold the token of job {identity.job}")
    answer = wire.parse(body)
    if answer.get("moved"):
        raise Moved.read(answer["moved"])
    if "error" in answer:
        raise BY_CODE.get(str(answer["error"]), StoreError)(str(answer.get("say")))
    return int(answer["term"])
