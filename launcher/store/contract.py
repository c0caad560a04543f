"""What every rendezvous store does, whatever carries it: this process, a service of our own, or etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key as it is now."""

    key: str
    value: str
    revision: int
    """the store's revision at which this value was written; never 0, never reused"""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One write or removal, as a watch sees it."""

    key: str
    value: str | None
    """``None``: removed, by hand or because its lease ended"""
    revision: int


class Store(Protocol):
    """A small, ordered, revisioned map.

    Every accepted write gives the store a new revision, one higher than the one before; several keys written
    together share it. Readers never see half of a write. Values are text of the caller's making.
    """

    async def get(self, key: str) -> Entry | None:
        """One key, or ``None``."""
        ...

    async def list(self, prefix: str) -> list[Entry]:
        """Every key that starts with ``prefix``, sorted."""
        ...

    async def put(self, key: str, value: str, *, lease: int | None = None) -> int:
        """Write one key whatever it was; the new revision. Raises ``KeyError`` for a lease that has ended."""
        ...

    async def compare_and_set(
        self, expected: Mapping[str, int], writes: Mapping[str, str | None], *, lease: int | None = None
    ) -> int | None:
        """Write all of ``writes`` (``None`` removes) if every key of ``expected`` still has that revision.

        Revision 0 stands for a key that does not exist. Returns the new revision, or ``None`` if nothing was
        written.
        """
        ...

    async def grant(self, ttl_s: float) -> int:
        """Open a lease. Keys written under it are removed ``ttl_s`` after the last :meth:`keep_alive`."""
        ...

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; false if it has ended already."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and remove its keys now."""
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Change]:
        """Every change after ``from_revision`` to keys under ``prefix``, in order, then the ones to come."""
        ...
