"""The store inside the agent of a job on one node: SQLite, with its journal in the run folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from launcher.store.contract import Change, Entry, Listing
from launcher.store.engine import Engine


class EmbeddedStore:
    """A :class:`launcher.store.contract.Store` in this process.

    Writes outlive this process before they are acknowledged; not a power cut, unless ``power_safe``: its price, a
    sync of the disk, would hold up every worker that waits for a word. Leases are timed by ``clock`` and start anew
    when the journal is opened again: a restart never shortens one. Nothing of it is reachable from outside until a
    :class:`launcher.store.server.StoreServer` serves :attr:`engine`.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float], power_safe: bool = False) -> None:
        self.engine = Engine(path, clock=clock, power_safe=power_safe)
        self.generation: int | None = None

    @classmethod
    def on(cls, engine: Engine, *, generation: int | None = None) -> EmbeddedStore:
        """Another client of an engine that is open already, acting for ``generation``."""
        store = cls.__new__(cls)
        store.engine = engine
        store.generation = generation
        return store

    def close(self) -> None:
        """Close the journal; watches end."""
        self.engine.close()

    async def aclose(self) -> None:
        """Close the journal; watches end."""
        self.close()

    async def get(self, key: str) -> Entry | None:
        """One key, or ``None``."""
        return self.engine.get(key)

    async def list(self, prefix: str) -> list[Entry]:
        """Every key that starts with ``prefix``, sorted."""
        return list(self.engine.scan(prefix).entries)

    async def scan(self, prefix: str) -> Listing:
        """Return the same with the revision to watch from."""
        return self.engine.scan(prefix)

    async def put(self, key: str, value: str, *, lease: int | None = None) -> int:
        """Write one key whatever it was; the new revision."""
        revision = self.engine.write({}, {key: value}, lease=lease, generation=self.generation)
        assert revision is not None
        return revision

    async def compare_and_set(
        self, expected: Mapping[str, int], writes: Mapping[str, str | None], *, lease: int | None = None
    ) -> int | None:
        """Write all of ``writes`` if every key of ``expected`` still has that revision (0: absent)."""
        return self.engine.write(expected, writes, lease=lease, generation=self.generation)

    async def grant(self, ttl_s: float) -> int:
        """Open a lease."""
        return self.engine.grant(ttl_s, generation=self.generation)

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; false if it has ended already."""
        return self.engine.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        """End a lease and remove its keys now."""
        self.engine.revoke(lease, generation=self.generation)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Change]:
        """Every change after ``from_revision`` under ``prefix``, in order, then the ones to come."""
        seen = from_revision
        while not self.engine.closed:
            changed = self.engine.changed
            changes = self.engine.after(prefix, seen)
            seen = self.engine.machine.revision  # quiet prefixes do not fall behind what is kept
            for change in changes:
                yield change
            if not changes:
                await changed.wait()

    async def fence(self, generation: int) -> None:
        """Refuse writers of earlier generations."""
        self.engine.fence(generation, by=self.generation)

    def expire(self) -> None:
        """Remove the keys of leases that have run out; also done before every read and write."""
        self.engine.expire()
