"""A copy of the store that an agent keeps beside it, so that it can be brought back when its node is lost.

A copy is a whole state and the records since, checked link by link by the same chain of digests as the journal, so
two copies with the same ``seq`` and ``digest`` are equal in everything that came before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from launcher.store.client import RemoteStore
from launcher.store.engine import SNAPSHOT_HISTORY, state_bytes
from launcher.store.errors import JournalError, StoreError
from launcher.store.journal import chain
from launcher.store.machine import Machine
from launcher.store.snapshot import Snapshot

KEEP_EVERY_S = 0.5


class Mirror:
    """Follows a store. ``path``: where the copy also lies as a file, written whole, mode 0600."""

    def __init__(
        self, store: RemoteStore, *, path: Path | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        self._store = store
        self._path = path
        self._sleep = sleep
        self._machine: Machine | None = None
        self._seq = 0
        self._digest = b""

    @property
    def seq(self) -> int:
        """The last record of the copy."""
        return self._seq

    async def run(self) -> None:
        """Follow until cancelled; a store that is away is waited for."""
        while True:
            try:
                if await self.catch_up():
                    self._write()
            except StoreError:  # away, moved or restored: the client finds it again
                pass
            await self._sleep(KEEP_EVERY_S)

    async def catch_up(self) -> bool:
        """Take over what is new; whether anything was. Raises ``StoreError``."""
        records = None if self._machine is None else await self._store.records_after(self._seq, self._digest)
        if records is None:
            self._begin(await self._store.snapshot())
            return True
        assert self._machine is not None
        for seq, body in records:
            self._digest = chain(self._digest, seq, body)
            self._seq = seq
            self._machine.apply(json.loads(body))
        return bool(records)

    def snapshot(self) -> Snapshot:
        """Return the copy as it is. Raises ``StoreError`` before there is one."""
        if self._machine is None:
            raise StoreError("no copy of the store has been made yet")
        state = state_bytes(self._machine, history=SNAPSHOT_HISTORY)
        return Snapshot(term=self._machine.term, seq=self._seq, digest=self._digest, state=state)

    def _begin(self, snapshot: Snapshot) -> None:
        self._machine, self._seq, self._digest = snapshot.machine(), snapshot.seq, snapshot.digest

    def _write(self) -> None:
        if self._path is None:
            return
        draft = self._path.with_name(f".{self._path.name}.new")
        draft.touch(mode=0o600)
        draft.write_bytes(self.snapshot().dumps())
        draft.replace(self._path)


def read_copy(path: Path) -> Snapshot:
    """Read a copy from its file. Raises ``JournalError`` or ``OSError``."""
    data = path.read_bytes()
    try:
        return Snapshot.loads(data)
    except JournalError as error:
        raise JournalError(f"{path}: {error}", offset=error.offset) from None
