"""The controller's door for the agents of other nodes.

Every agent keeps one sealed connection (:mod:`launcher.store.guard`) on which frames of
:class:`launcher.courier.Courier` go both ways: reports in, orders out. Its first frame says who it is:

``{"enter": {host, nproc, standbys, pin}}``     a node that comes; answered by ``{"node", "secret", "lost_after_s"}``
``{"node", "secret", "seen"}``                  one that was cut off and is back; answered by ``{"node", "seen"}``

and an answer ``{"gone": why}`` means that it is not part of the job any more. A node that has not been heard of for
``lost_after_s`` is lost; what it says later is not listened to, it has to come anew.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from launcher.controller import Controller
from launcher.courier import Courier
from launcher.orders import Enter, Gone, Order, Report, TookOver
from launcher.store import wire
from launcher.store.auth import Claim, Seal, Token
from launcher.store.guard import Guard

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
SIGN_EVERY_S = 0.5
CLOSED_SHARE = 1 / 3
"""of the silence after which an agent is lost: how long it may be without a connection"""
FIRST_FRAME_S = 5.0


@dataclass(eq=False)
class Remote:
    """An agent elsewhere."""

    secret: str
    courier: Courier
    heard_at: float
    closed_at: float | None = None
    """since when there is no connection"""
    node: str = ""
    peer: _Peer | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """set once it is not part of the job any more"""


class Hub(Guard):
    """Serves agents until :meth:`stop`."""

    def __init__(
        self, controller: Controller, token: Token, *, job: str, term: int, lost_after_s: float,
        random: Callable[[int], bytes], ssl_context: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        super().__init__(token, job=job, random=random, ssl_context=ssl_context)
        self._controller = controller
        self._term = term
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._remotes: dict[str, Remote] = {}
        self._open: set[web.WebSocketResponse] = set()
        self._watching: asyncio.Task[None] | None = None
        self._frozen = False

    async def start(self, host: str, door: socket.socket) -> tuple[str, int]:
        """Let agents in through a socket that listens already."""
        place = await self.listen(host, listener=door)
        self._watching = asyncio.create_task(self._watch())
        return place

    @property
    def secrets(self) -> dict[str, str]:
        """By what each node is known again."""
        return {node: remote.secret for node, remote in self._remotes.items()}

    def expect(self, remotes: Mapping[str, str]) -> None:
        """Know nodes that another controller has let in; they come with a new count of messages."""
        for node, secret in remotes.items():
            remote = Remote(secret=secret, courier=Courier(), heard_at=self._clock(), node=node)
            self._remotes[node] = remote
            self._controller.reach(node, functools.partial(self._post, remote))

    def freeze(self) -> None:
        """Hear nothing and confirm nothing any more; what is posted still goes out."""
        self._frozen = True

    def thaw(self) -> None:
        """Undo :meth:`freeze`: nothing was lost, since nothing was confirmed. Connections are made anew."""
        self._frozen = False
        for remote in self._remotes.values():
            remote.heard_at = self._clock()
            if remote.peer is not None:
                remote.peer.drop()

    async def emptied(self, timeout_s: float) -> None:
        """Wait until every connection is closed from the other side, for a while."""
        deadline = self._clock() + timeout_s
        while self._open and self._clock() < deadline:  # noqa: ASYNC110  (once in the life of a hub)
            await asyncio.sleep(0.02)

    def let_go(self) -> None:
        """Wait for nobody at the end: the nodes belong to another controller now."""
        for remote in list(self._remotes.values()):
            self._forget(remote)

    async def stop(self, patience_s: float) -> None:
        """Wait until every agent has gone, for a while; then stop."""
        try:
            async with asyncio.timeout(patience_s):
                for remote in list(self._remotes.values()):
                    await remote.gone.wait()
        except TimeoutError:
            pass
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.close()

    @property
    def connections(self) -> list[web.WebSocketResponse]:
        """See :class:`Guard`."""
        return list(self._open)

    def judge(self, claim: Claim) -> dict[str, Any]:
        """See :class:`Guard`."""
        if claim.role != "agent":
            return {"error": "forbidden", "say": "this door is for agents"}
        return {"term": self._term}

    async def serve(self, claim: Claim, ws: web.WebSocketResponse) -> None:
        """See :class:`Guard`."""
        peer = _Peer(ws, claim, self._token)
        self._open.add(ws)
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                first = await peer.receive()
            remote = None if first is None else await self._admit(first, peer)
            if remote is None:
                return
            try:
                while (frame := await peer.receive()) is not None:
                    self._heard(remote, frame)
            finally:
                if remote.peer is peer:
                    remote.peer, remote.closed_at = None, self._clock()
                    self._controller.seen(remote.node, away=True)
        except TimeoutError:
            pass
        finally:
            self._open.discard(ws)
            await peer.aclose()

    async def _admit(self, first: dict[str, Any], peer: _Peer) -> Remote | None:
        if "enter" in first:
            if not isinstance(first["enter"], dict):
                raise ValueError("an agent that enters without an offer")
            offer = Enter.read({**first["enter"], "type": "Enter"})
            assert isinstance(offer, Enter)
            remote = Remote(secret=self._random(16).hex(), courier=Courier(), heard_at=self._clock())
            remote.node = self._controller.enter(lambda order: self._post(remote, order), offer)
            self._remotes[remote.node] = remote
            peer.post({"node": remote.node, "secret": remote.secret, "lost_after_s": self._lost_after_s})
        else:
            found = self._remotes.get(str(first.get("node")))
            if found is None or found.secret != first.get("secret"):
                peer.post({"gone": "this node was given up; it has to come anew"})
                await peer.flush()
                return None
            if type(first.get("seen")) is not int:
                raise ValueError("an agent that comes back and does not say how far it has come")
            remote = found
            remote.courier.confirmed(first["seen"])
            peer.post({"node": remote.node, "seen": remote.courier.seen})
            self._controller.seen(remote.node, away=False)
        if remote.peer is not None:
            remote.peer.drop()
        for frame in remote.courier.again():
            peer.post(frame)
        remote.peer, remote.heard_at, remote.closed_at = peer, self._clock(), None
        return remote

    def _heard(self, remote: Remote, frame: dict[str, Any]) -> None:
        remote.heard_at = self._clock()
        if self._frozen:  # only the answer to the handover itself; it is not confirmed either
            values = frame.get("body")
            if isinstance(values, dict) and values.get("type") == TookOver.__name__:
                self._controller.heard(remote.node, Report.read(values))
            return
        body = remote.courier.unpack(frame)
        if body is None or self._remotes.get(remote.node) is not remote:
            return
        report = Report.read(body)
        if isinstance(report, Gone):
            if remote.peer is not None:
                remote.peer.post(remote.courier.sign())  # it waits for that
            self._forget(remote)
        self._controller.heard(remote.node, report)

    def _post(self, remote: Remote, order: Order) -> None:
        frame = remote.courier.pack(order.values())
        if remote.peer is not None:
            remote.peer.post(frame)

    def _forget(self, remote: Remote) -> None:
        self._remotes.pop(remote.node, None)
        remote.gone.set()

    def _why_lost(self, remote: Remote) -> str | None:
        """Return why an agent is given up: by silence, or sooner if its connection has ended and it makes no other.

        The second is what a killed agent looks like, the first one whose link is cut, or whose host stands still.
        """
        now = self._clock()
        if remote.closed_at is not None and now - remote.closed_at > self._lost_after_s * CLOSED_SHARE:
            return f"its connection ended {now - remote.closed_at:.1f} s ago, and it made no other"
        if now - remote.heard_at > self._lost_after_s:
            return f"nothing was heard of it for {self._lost_after_s:g} s"
        return None

    async def _watch(self) -> None:
        while True:
            for remote in list(self._remotes.values()):
                if self._frozen:
                    break
                if remote.peer is not None:
                    remote.peer.post(remote.courier.sign())
                if (why := self._why_lost(remote)) is not None:
                    self._forget(remote)
                    self._controller.lose(remote.node, why)
                    if remote.peer is not None:
                        remote.peer.drop()
            await asyncio.sleep(SIGN_EVERY_S)


class _Peer:
    """The server's end of a proven connection: frames sealed both ways, sent in order, never waited for."""

    def __init__(self, ws: web.WebSocketResponse, claim: Claim, token: Token) -> None:
        self._ws = ws
        self._incoming = Seal(token, claim, "to server")
        self._outgoing = Seal(token, claim, "to client")
        self._joiner = wire.Joiner(MAX_MESSAGE_BYTES)
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._writing = asyncio.create_task(self._write())

    def post(self, message: dict[str, Any]) -> None:
        self._queue.put_nowait(message)

    def drop(self) -> None:
        self._queue.put_nowait(None)

    async def flush(self) -> None:
        """Send what is posted, and close."""
        self.drop()
        await asyncio.gather(self._writing, return_exceptions=True)

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; ``None`` at the end. Raises ``ValueError``."""
        async for frame in self._ws:
            if frame.type is not WSMsgType.BINARY:
                raise ValueError("a frame that is not binary")
            data = self._joiner.add(self._incoming.open(frame.data))
            if data is not None:
                return wire.parse(data)
        return None

    async def aclose(self) -> None:
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self) -> None:
        while (message := await self._queue.get()) is not None:
            for frame in wire.split(wire.dump(message)):
                await self._ws.send_bytes(self._outgoing.close(frame))
        await self._ws.close()
