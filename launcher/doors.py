"""Where other nodes come in: the store's port and the controller's, open as long as the job has a leader here."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator

from launcher.controller import Controller
from launcher.entering import CONTROLLER_KEY, LEADER_LEASE_S, controller_value
from launcher.entry import Entry
from launcher.hub import Hub
from launcher.options import Meeting
from launcher.store import EmbeddedStore, StoreError
from launcher.store.lease import HeldLease
from launcher.store.server import StoreServer


@contextlib.asynccontextmanager
async def doors(
    controller: Controller, entry: Entry, own: EmbeddedStore | None, meeting: Meeting, *, patience_s: float
) -> AsyncIterator[None]:
    """Serve the controller, and the store if it is this agent's; agents leave first, the store last."""
    assert entry.token is not None
    assert entry.door is not None
    hub = Hub(
        controller, entry.token, job=entry.name, term=entry.term, lost_after_s=meeting.lost_after_s,
        random=secrets.token_bytes,
    )  # fmt: skip
    server, keeping = None, None
    if own is not None:
        await own.put(CONTROLLER_KEY, controller_value(entry.host, entry.door, job=entry.job, term=entry.term))
        server = StoreServer(own.engine, entry.token, job=entry.name, random=secrets.token_bytes)
    elif entry.store is not None and entry.lease is not None:
        held = HeldLease(entry.store, entry.lease, LEADER_LEASE_S, clock=time.monotonic)
        keeping = asyncio.create_task(held.run(asyncio.sleep))
    await hub.start(entry.host, entry.door)
    try:
        if server is not None:
            await server.start(meeting.host, meeting.port, listener=entry.listener)
        yield
    finally:
        await hub.stop(patience_s)
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        if server is not None:
            await server.stop()
        if entry.store is not None:
            with contextlib.suppress(StoreError):
                if entry.lease is not None:
                    await entry.store.revoke(entry.lease)
            await entry.store.aclose()
