"""What every rendezvous store does, whatever carries it: this process, a service of our own, or etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
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
    last: bool = field(default=True, compare=False)
    """whether every change of this revision under the prefix has now been given: the revision to go on from"""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Every key under a prefix at one moment, and the revision of that moment: watch from it without a gap."""

    revision: int
    entries: tuple[Entry, ...]


class Store(Protocol):
    """A small, ordered, revisioned map, linearizable: every call takes effect at one moment between its start and
    its end, and all see those moments in the same order.

    Every write that changes something gives the store a new revision, higher than every one before; several keys
    written together share it. Readers never see half of a write. Values are text of the caller's making.

    All sizes are bounded (:mod:`launcher.store.limits`); what is beyond raises ``LimitError`` before anything is
    sent. What a store cannot do it refuses with a :class:`launcher.store.errors.StoreError`; after
    ``UnavailableError`` a write may or may not have been done.

    Leases are timed by the store's own monotonic clock alone, from when it heard of them: no two hosts' clocks are
    ever compared. A store that is restarted or moved gives every lease its whole time again.

    ``generation`` is that of the world this client acts for. Once :meth:`fence` has named a later one, this client
    may read, and so learn what happened, but writes nothing (``FencedError``). ``None`` is never fenced.
    """  # noqa: D205

    generation: int | None

    async def get(self, key: str) -> Entry | None:
        """One key, or ``None``."""
        ...

    async def list(self, prefix: str) -> list[Entry]:
        """Every key that starts with ``prefix``, sorted."""
        ...

    async def scan(self, prefix: str) -> Listing:
        """Return the same with the revision from which :meth:`watch` goes on without a gap."""
        ...

    async def put(self, key: str, value: str, *, lease: int | None = None) -> int:
        """Write one key whatever it was; the new revision. Raises ``KeyError`` for a lease that has ended."""
        ...

    async def compare_and_set(
        self, expected: Mapping[str, int], writes: Mapping[str, str | None], *, lease: int | None = None
    ) -> int | None:
        """Write all of ``writes`` (``None`` removes) if every key of ``expected`` still has that revision.

        Revision 0 stands for a key that does not exist. Returns the new revision, or ``None`` if nothing was
        written. Removing a key that is not there changes nothing; a write that changes nothing returns the
        present revision. A key written without a lease leaves the lease it had.
        """
        ...

    async def grant(self, ttl_s: float) -> int:
        """Open a lease. Keys written under it are removed ``ttl_s`` after the last :meth:`keep_alive`.

        Not earlier; a store may round ``ttl_s`` up.
        """
        ...

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; false if it has ended already."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and remove its keys now; one that has ended already is fine."""
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Change]:
        """Every change after ``from_revision`` to keys under ``prefix``, in order, then the ones to come.

        Without a gap and without a repeat, across lost connections too. Raises ``CompactedError`` when the
        changes since ``from_revision`` are no longer kept, and ``AheadError`` for a revision not yet reached.
        """
        ...

    async def fence(self, generation: int) -> None:
        """Refuse the writes of every client of an earlier generation from now on. Never goes back."""
        ...

    async def aclose(self) -> None:
        """Let go of connections, tasks and files; watches end."""
        ...
