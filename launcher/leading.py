"""Who has the controller: the agent whose place ``controller`` names, for as long as it may act by that.

In a store that no agent carries the key is under a lease. Its holder acts until the lease is over on its own clock,
which is before the store lets another agent set the key; and whatever it believes, what it writes about the job is
written only while ``controller`` still has the revision that it wrote (:class:`launcher.ledger.Ledger`). In a store
that this agent carries nobody else sets the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping

from launcher.store.contract import Store
from launcher.store.errors import FencedError, StoreError
from launcher.store.lease import HeldLease

CONTROLLER_KEY = "controller"
LEADER_LEASE_S = 10.0
"""at most; no longer than the silence after which an agent is lost"""


class Leadership:
    """``controller`` as this agent has written it."""

    def __init__(self, store: Store, value: str, *, revision: int, lease: HeldLease | None = None) -> None:
        self.revision = revision
        """of ``controller``"""
        self._store = store
        self._value = value
        self._lease = lease

    @property
    def valid(self) -> bool:
        """Whether this agent may act as the controller now."""
        return self._lease is None or self._lease.valid

    async def keep(
        self, unchanged: Callable[[], Awaitable[Mapping[str, int] | None]], back: Callable[[], None], *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        """Renew the lease; return once another agent has, or has had, the controller.

        A lease that is over (this process stood still, the store could not be reached) is replaced if nobody else has
        led since: ``unchanged`` gives the revisions that say so, or ``None``. ``back``: called when that was done, or
        the lease was only late.
        """
        assert self._lease is not None
        while True:
            await sleep(self._lease.ttl_s / 3)
            was_valid = self._lease.valid
            try:
                if not await self._lease.keep() and not await self._regain(unchanged):
                    return
            except FencedError:
                return
            except StoreError:
                pass  # it is asked again
            if self._lease.valid and not was_valid:
                back()

    async def _regain(self, unchanged: Callable[[], Awaitable[Mapping[str, int] | None]]) -> bool:
        assert self._lease is not None
        store = self._store
        lease = await _granted(store, self._lease.ttl_s, self._lease.clock)
        try:
            while True:
                known = await store.get(CONTROLLER_KEY)
                same = await unchanged()
                if same is None or (known is not None and known.value != self._value):
                    return False
                expected = {**same, CONTROLLER_KEY: 0 if known is None else known.revision}
                revision = await store.compare_and_set(expected, {CONTROLLER_KEY: self._value}, lease=lease.id)
                if revision is not None:
                    self.revision, self._lease = revision, lease
                    return True
        finally:
            if self._lease is not lease:
                with contextlib.suppress(StoreError):
                    await store.revoke(lease.id)

    async def resign(self, *, over: bool) -> None:
        """Give the controller back; ``over``: the job has ended. Does nothing that another controller would mind."""
        if self._lease is None:
            return
        with contextlib.suppress(StoreError):
            if over:
                await self._store.compare_and_set({CONTROLLER_KEY: self.revision}, {"job/id": None})
            await self._store.revoke(self._lease.id)


async def claim(
    store: Store, value: str, ttl_s: float, *, clock: Callable[[], float] = time.monotonic
) -> Leadership | None:
    """Be the controller where nobody is; ``None`` if somebody else was first. Raises ``StoreError``."""
    lease = await _granted(store, ttl_s, clock)
    revision = await store.compare_and_set({CONTROLLER_KEY: 0}, {CONTROLLER_KEY: value}, lease=lease.id)
    return None if revision is None else Leadership(store, value, revision=revision, lease=lease)


async def _granted(store: Store, ttl_s: float, clock: Callable[[], float]) -> HeldLease:
    sent = clock()
    lease = HeldLease(store, await store.grant(ttl_s), ttl_s, clock=clock)
    lease.note_sent(sent)
    return lease
