"""An agent's end of its connection to the controller (:mod:`launcher.hub`), made again whenever it is lost."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import aiohttp

from launcher.courier import Courier
from launcher.hub import CLOSED_SHARE, SIGN_EVERY_S
from launcher.orders import Enter, Order, Report
from launcher.store.errors import StoreError
from launcher.store.link import LONGEST_BACKOFF_S, Connection, Identity, Place, backoff_s, connect

LONGEST_SHARE = CLOSED_SHARE / 2
"""of the silence after which an agent is lost: how long it waits before it connects again, at most"""


class GoneError(Exception):
    """The controller does not count this node as part of the job (any more)."""


class Uplink:
    """Reports go up, orders come down; each once, however often the connection breaks."""

    def __init__(
        self, place: Place, identity: Identity, *, term: int, ssl_context: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        self.node = ""
        self.lost_after_s = 0.0
        self.heard_at = clock()
        self._place = place
        self._identity = identity
        self._term = term
        self._ssl = ssl_context
        self._clock = clock
        self._sleep = sleep
        self._tries = 0
        self._secret = ""
        self._courier = Courier()
        self._link: Connection | None = None

    def report(self, report: Report) -> None:
        """Tell the controller; as soon as it can be reached."""
        frame = self._courier.pack(report.values())
        if self._link is not None:
            self._link.post(frame)

    def follow(self, place: Place, term: int) -> None:
        """Go to another controller, which knows this node; what was not confirmed goes there."""
        self._place, self._term = place, term
        self._courier = self._courier.renewed()
        self.heard_at, self._tries = self._clock(), 0
        if self._link is not None:
            self._link.drop()

    def unconfirmed(self) -> list[Report]:
        """Return the reports that the controller has not confirmed."""
        return [Report.read(body) for body in self._courier.kept()]

    @property
    def silent_s(self) -> float:
        """For how long nothing has been heard of the controller."""
        return self._clock() - self.heard_at

    async def confirmed(self, timeout_s: float) -> bool:
        """Wait until the controller has heard everything; false when that takes longer, or it is gone."""
        deadline = self._clock() + timeout_s
        while self._courier.waiting and self._clock() < deadline:  # noqa: ASYNC110  (polled at the very end only)
            await asyncio.sleep(0.02)
        return not self._courier.waiting

    async def run(self, offer: Enter, entered: Callable[[], None], take: Callable[[Order], None]) -> None:
        """Stay connected until cancelled. Raises ``GoneError``, or ``StoreError`` when not let in."""
        async with aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar()) as http:
            while True:
                try:
                    async with self._connection(http) as link:
                        await self._talk(link, offer, entered, take)
                except StoreError:
                    if not self.node:
                        raise
                except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
                    pass
                longest_s = min(LONGEST_BACKOFF_S, self.lost_after_s * LONGEST_SHARE or LONGEST_BACKOFF_S)
                await self._sleep(backoff_s(self._tries, self._identity.random, longest_s=longest_s))
                self._tries += 1

    def _connection(self, http: aiohttp.ClientSession) -> AbstractAsyncContextManager[Connection]:
        return connect(http, self._place, self._identity, generation=None, min_term=self._term, context=self._ssl)

    async def _talk(
        self, link: Connection, offer: Enter, entered: Callable[[], None], take: Callable[[Order], None]
    ) -> None:
        if self.node:
            link.post({"node": self.node, "secret": self._secret, "seen": self._courier.seen})
        else:
            values = {name: value for name, value in offer.values().items() if name != "type"}
            link.post({"enter": values})
        frames = link.__aiter__()
        first = await anext(frames, None)
        if first is None:
            return
        if "gone" in first:
            raise GoneError(str(first["gone"]))
        fresh = not self.node
        self.heard_at, self._tries = self._clock(), 0
        if fresh:
            self.node, self._secret = str(first["node"]), str(first["secret"])
            self.lost_after_s = float(first["lost_after_s"])
        else:
            self._courier.confirmed(int(first["seen"]))
        self._link = link
        courier = self._courier
        signing = asyncio.create_task(self._sign(link, courier))
        try:
            for frame in courier.again():
                link.post(frame)
            if fresh:
                entered()
            async for frame in frames:
                self.heard_at = self._clock()
                body = courier.unpack(frame)
                if body is not None:
                    take(Order.read(body))
                if self._courier is not courier:
                    return  # it was told to follow
        finally:
            self._link = None
            signing.cancel()
            await asyncio.gather(signing, return_exceptions=True)

    async def _sign(self, link: Connection, courier: Courier) -> None:
        while True:
            link.post(courier.sign())
            await asyncio.sleep(SIGN_EVERY_S)
