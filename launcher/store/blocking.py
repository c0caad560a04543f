"""A store on the network for a program that has no loop of its own."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from launcher.store.auth import Token
from launcher.store.client import RemoteStore
from launcher.store.errors import LeaseEndedError
from launcher.store.limits import MAX_KEYS_PER_WRITE
from launcher.store.link import Place

T = TypeVar("T")


class StoreThread:
    """A job's store for a program that has no loop: a thread of its own speaks to it, callers wait."""

    def __init__(
        self, place: Place, token: Token, *, job: str, lease_s: float, timeout_s: float = 30.0,
        context: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._lease_s = lease_s
        self._lease: int | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="liverun-store", daemon=True)
        self._thread.start()
        self.store = RemoteStore(
            [place], token, job=job, node=f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}",
            role="agent", random=secrets.token_bytes, timeout_s=timeout_s, ssl_context=context,
        )  # fmt: skip

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something in the thread and return what it returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Let go of the connection and end the thread."""
        if self._thread.is_alive():
            self.call(self.store.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def write(self, expected: Mapping[str, int], writes: Mapping[str, str | None]) -> int | None:
        """Compare and set under this agent's lease; the new revision, or ``None`` if nothing was written."""
        while True:
            if self._lease is None or not await self.store.keep_alive(self._lease):
                self._lease = await self.store.grant(self._lease_s)
            try:
                return await self.store.compare_and_set(expected, writes, lease=self._lease)
            except LeaseEndedError:  # between the two
                self._lease = None

    async def change(self, key: str, make: Callable[[str | None], str | None]) -> tuple[str | None, str | None]:
        """Replace a value by what ``make`` makes of it, at one moment; the old and the new one."""
        while True:
            entry = await self.store.get(key)
            old = None if entry is None else entry.value
            new = make(old)
            if new == old or await self.write({key: 0 if entry is None else entry.revision}, {key: new}) is not None:
                return old, new

    async def clear(self, prefix: str) -> None:
        """Remove every key under a prefix."""
        keys = [entry.key for entry in await self.store.list(prefix)]
        for first in range(0, len(keys), MAX_KEYS_PER_WRITE):
            await self.store.compare_and_set({}, dict.fromkeys(keys[first : first + MAX_KEYS_PER_WRITE]))
