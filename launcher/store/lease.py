"""Holding a lease: kept alive in the background, and known to be over before the store can say so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from launcher.store.contract import Store
from launcher.store.errors import StoreError

CLOCK_MARGIN = 0.05
"""how much this clock and the store's may differ in rate, and then some"""


class HeldLease:
    """A lease and how long this process may still act on it.

    The store counts from when it heard a keep-alive, which is later than when it was sent; this counts from when it
    was sent, on its own clock. So here it ends first, and two holders never overlap, whatever the network does.
    """

    def __init__(self, store: Store, lease: int, ttl_s: float, *, clock: Callable[[], float]) -> None:
        self.id = lease
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        """set once the store has said that the lease has ended"""
        self._store = store
        self.clock = clock
        self._until = 0.0

    @property
    def valid(self) -> bool:
        """Whether this process may act as the holder now; ask right before each act."""
        return not self.lost.is_set() and self.clock() < self._until

    @property
    def left_s(self) -> float:
        """Seconds for which :attr:`valid` holds if nothing is heard any more."""
        return 0.0 if self.lost.is_set() else max(0.0, self._until - self.clock())

    async def keep(self) -> bool:
        """Renew it once. Raises what the store raises."""
        sent = self.clock()
        if not await self._store.keep_alive(self.id):
            self.lost.set()
            return False
        self.note_sent(sent)
        return True

    def note_sent(self, sent: float) -> None:
        """Count from when a request that the store has confirmed was sent."""
        self._until = max(self._until, sent + self.ttl_s * (1 - CLOCK_MARGIN))

    async def run(self, sleep: Callable[[float], Awaitable[object]]) -> None:
        """Renew it three times in its life, until it is lost. A store that is away is asked again."""
        while not self.lost.is_set():
            await sleep(self.ttl_s / 3)
            with contextlib.suppress(StoreError):
                await self.keep()


@contextlib.asynccontextmanager
async def hold(
    store: Store, ttl_s: float, *, clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> AsyncIterator[HeldLease]:  # fmt: skip
    """Open a lease, keep it alive inside the block, and end it after."""
    sent = clock()
    held = HeldLease(store, await store.grant(ttl_s), ttl_s, clock=clock)
    held.note_sent(sent)
    keeping = asyncio.create_task(held.run(sleep))
    try:
        yield held
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await store.revoke(held.id)
