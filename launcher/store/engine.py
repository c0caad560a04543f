"""One store: its state in memory, its journal on disk, its leases on one clock. Synchronous, one step at a time."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.store import limits
from launcher.store.contract import Change, Entry, Listing
from launcher.store.errors import FencedError, FullError, GateError, MovedError, StoreError
from launcher.store.journal import Journal, Loaded
from launcher.store.machine import Machine, Record, encode_record
from launcher.store.snapshot import Snapshot

SAVE_EVERY_RECORDS = 5_000
SAVE_EVERY_BYTES = 4 * 1024 * 1024
MOST_AT_ONCE_BYTES = 4 * 1024 * 1024
"""records given to a copy elsewhere in one answer"""
SNAPSHOT_HISTORY = 1_000
"""changes a watch can go back to in a store that was moved"""


class Engine:
    """What :class:`~launcher.store.embedded.EmbeddedStore` and the server share.

    A step is in the journal before it is in memory, and in memory before anyone is told. ``gate`` is asked before
    every write: a sentence that it returns refuses the write.
    """

    def __init__(
        self, path: Path | str, *, clock: Callable[[], float], power_safe: bool = False, salvage: bool = False,
        gate: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        self.clock = clock
        self.gate = gate
        self.journal = Journal(path, power_safe=power_safe, salvage=salvage)
        try:
            loaded = self.journal.load()
            self.machine = _replay(loaded)
        except BaseException:
            self.journal.close()
            raise
        self._unsaved_records = self.journal.seq - loaded.state_seq
        self._unsaved_bytes = 0
        self._deadlines: dict[int, float] = {}
        self._due: list[tuple[float, int]] = []
        self.changed = asyncio.Event()
        self.closed = False
        for lease in self.machine.leases:
            self._renew(lease)
        if self.machine.term == 0:
            self._commit([{"t": "term", "n": 1}])

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        """Which holder of the store this is; grows with every move."""
        return self.machine.term

    def scan(self, prefix: str) -> Listing:
        """Every key under ``prefix`` now."""
        limits.check_prefix(prefix)
        self._ready()
        return Listing(revision=self.machine.revision, entries=tuple(self.machine.under(prefix)))

    def get(self, key: str) -> Entry | None:
        """One key."""
        limits.check_key(key)
        self._ready()
        return self.machine.get(key)

    def after(self, prefix: str, revision: int) -> list[Change]:
        """Return the changes after ``revision``. Raises ``CompactedError`` or ``AheadError``."""
        limits.check_prefix(prefix)
        limits.check_revision(revision)
        self._ready()
        return self.machine.after(prefix, revision)

    # --- writing ------------------------------------------------------------------------------------------

    def write(
        self, expected: Mapping[str, int], writes: Mapping[str, str | None], *, lease: int | None = None,
        request: str | None = None, generation: int | None = None,
    ) -> int | None:  # fmt: skip
        """Compare and set; the new revision, or ``None``. A ``request`` done already is not done again."""
        done = self._may_write(generation, request)
        if done is not None:
            return done
        record = self.machine.plan_write(expected, writes, lease, request)
        if record is None:
            return None
        if record["c"]:
            self._commit([record])
        return int(record["r"])

    def grant(self, ttl_s: float, *, request: str | None = None, generation: int | None = None) -> int:
        """Open a lease."""
        done = self._may_write(generation, request)
        if done is not None:
            return done
        record = self.machine.plan_grant(ttl_s, request)
        self._commit([record])
        lease = int(record["i"])
        self._renew(lease)
        return lease

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease; false if it has ended. A fenced holder may: its keys go by fencing, not by time."""
        self._ready()
        if lease not in self.machine.leases:
            return False
        self._renew(lease)
        return True

    def revoke(self, lease: int, *, generation: int | None = None) -> None:
        """End a lease."""
        self._may_write(generation, None)
        if lease in self.machine.leases:
            self._commit([self.machine.plan_end(lease)])
            self._deadlines.pop(lease, None)

    def fence(self, generation: int, *, by: int | None = None) -> None:
        """Refuse writers of generations before this one."""
        limits.check_revision(generation)
        self._may_write(by, None)
        if generation > self.machine.fence:
            self._commit([{"t": "fence", "g": generation}])

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = self.clock()
        over: list[int] = []
        while self._due and self._due[0][0] <= now:
            _, lease = heapq.heappop(self._due)
            deadline = self._deadlines.get(lease)
            if deadline is None or lease not in self.machine.leases:
                continue
            if deadline <= now:
                over.append(lease)
            else:
                heapq.heappush(self._due, (deadline, lease))
        for index, lease in enumerate(over):
            try:
                self._commit([self.machine.plan_end(lease)])
            except FullError:  # it ends once its end can be written down
                for again in over[index:]:
                    heapq.heappush(self._due, (self._deadlines[again], again))
                return
            self._deadlines.pop(lease, None)

    def next_due_s(self) -> float | None:
        """Seconds until :meth:`expire` may have something to do."""
        return None if not self._due else max(0.0, self._due[0][0] - self.clock())

    # --- moving -------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Copy the store as it is."""
        state = state_bytes(self.machine, history=SNAPSHOT_HISTORY)
        return Snapshot(term=self.term, seq=self.journal.seq, digest=self.journal.digest, state=state)

    def seal(self, to: str, *, term: int) -> Snapshot:
        """Do nothing here any more, and say where to go; the copy with which the new place begins ``term``."""
        self._ready()
        self._check_term(term)
        self._commit([{"t": "seal", "n": term, "to": to}])
        return self.snapshot()

    def begin_term(self, term: int) -> None:
        """Serve under a later term; also how a sealed store whose new place never came takes over again."""
        self._check_term(term)
        self._commit([{"t": "term", "n": term}])

    @classmethod
    def restore(
        cls, path: Path | str, snapshot: Snapshot, *, term: int, clock: Callable[[], float], power_safe: bool = False,
    ) -> Engine:  # fmt: skip
        """Begin ``term`` at ``path`` with a copy. Raises ``StoreError`` if the journal there knows a later one."""
        engine = cls(path, clock=clock, power_safe=power_safe)
        if engine.journal.seq > 1 and engine.snapshot().rank > snapshot.rank:
            engine.close()
            raise StoreError(
                f"{path} holds term {engine.term}, record {engine.journal.seq}: newer than the copy "
                f"(term {snapshot.term}, record {snapshot.seq})"
            )
        engine.journal.replace(snapshot.seq, snapshot.digest, snapshot.state)
        engine.machine = snapshot.machine()
        engine._deadlines.clear()
        engine._due.clear()
        for lease in engine.machine.leases:
            engine._renew(lease)
        promised = engine.machine.sealed["term"] if engine.machine.sealed else 0
        if term <= engine.term or term < promised:
            engine.close()
            known = max(snapshot.term, promised - 1)
            raise StoreError(f"term {term} is not later than {known}, which the copy names")
        engine._commit([{"t": "term", "n": term}])
        return engine

    def records_after(self, seq: int, digest: bytes) -> list[tuple[int, bytes]] | None:
        """Return some records after ``seq``, for a copy kept elsewhere; ``None`` if it has to begin anew.

        It has to if it is too far behind, or if its last record was never this store's: ``digest`` tells.
        """
        self._ready()
        if self.journal.digest_of(seq) != digest:
            return None
        return self.journal.bodies_after(seq, most_bytes=MOST_AT_ONCE_BYTES)

    def close(self) -> None:
        """Close the journal; watches end."""
        if not self.closed:
            self.closed = True
            self.journal.close()
            self._wake()

    # --- inside -------------------------------------------------------------------------------------------

    def _check_term(self, term: int) -> None:
        promised = self.machine.sealed["term"] if self.machine.sealed else self.term
        if term <= promised:
            raise StoreError(f"term {term} is not later than {promised}, the one this store knows")

    def _ready(self) -> None:
        if self.closed:
            raise MovedError("this store is closed")
        if self.machine.sealed is not None:
            raise MovedError(f"the store moved to {self.machine.sealed['to']}, term {self.machine.sealed['term']}")
        self.expire()

    def _may_write(self, generation: int | None, request: str | None) -> int | None:
        self._ready()
        done = self.machine.outcome(request)
        if done is not None:
            return done
        if generation is not None and generation < self.machine.fence:
            raise FencedError(f"generation {generation} is over; {self.machine.fence} is active")
        refusal = self.gate()
        if refusal is not None:
            raise GateError(refusal)
        return None

    def _renew(self, lease: int) -> None:
        deadline = self.clock() + self.machine.leases[lease]
        if lease not in self._deadlines:
            heapq.heappush(self._due, (deadline, lease))
        self._deadlines[lease] = deadline

    def _commit(self, records: list[Record]) -> None:
        bodies = [encode_record(record) for record in records]
        self.journal.append(bodies)
        for record in records:
            self.machine.apply(record)
        self._unsaved_records += len(bodies)
        self._unsaved_bytes += sum(map(len, bodies))
        if self._unsaved_records >= SAVE_EVERY_RECORDS or self._unsaved_bytes >= SAVE_EVERY_BYTES:
            self._save()
        self._wake()

    def _save(self) -> None:
        self._unsaved_records = self._unsaved_bytes = 0
        with contextlib.suppress(FullError):  # the records are there; the state is saved another time
            self.journal.save_state(state_bytes(self.machine))

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def _replay(loaded: Loaded) -> Machine:
    machine = Machine() if loaded.state is None else Machine.load(loaded.state)
    machine.recall([record for seq, record in loaded.records if seq <= loaded.state_seq])
    for seq, record in loaded.records:
        if seq > loaded.state_seq:
            machine.apply(record)
    return machine


def state_bytes(machine: Machine, *, history: int = 0) -> bytes:
    """Return the one text of a state."""
    values = machine.dump(history=history)
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
