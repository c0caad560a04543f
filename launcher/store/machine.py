"""The store as a pure state machine: records go in, in order; the same records give the same state anywhere.

A *record* is one accepted step, a flat JSON object. ``plan_*`` methods look and answer with the record that would
do what is asked, or with a refusal; :meth:`Machine.apply` does it. Between the two the record is written to the
journal, so what is in memory is never ahead of what is on disk.

======== =================================================== ==========================================
``t``    further fields                                      meaning
======== =================================================== ==========================================
write    ``r`` revision, ``c`` [[key, value or null], ...],  keys written or removed together
         ``l`` lease or null, ``q`` request
grant    ``i`` lease, ``ttl`` seconds, ``q`` request         a lease opened
end      ``i`` lease, ``r`` revision, ``c`` as in write      a lease ended, its keys removed
fence    ``g`` generation                                    writers of earlier generations are refused
term     ``n`` number                                        the store's place changed hands
seal     ``n`` number, ``to`` place                          the store moves: nothing is done here again
======== =================================================== ==========================================
"""

from __future__ import annotations

import bisect
import json
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.store import limits
from launcher.store.contract import Change, Entry
from launcher.store.errors import AheadError, CompactedError, FullError, LeaseEndedError

Record = dict[str, Any]


@dataclass(slots=True)
class _Held:
    value: str
    revision: int
    lease: int | None


def encode_record(record: Record) -> bytes:
    """Return the one text of a record: the same record always gives the same bytes."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


class Machine:
    """All state of a store but for the clock. ``deadlines`` are the caller's business."""

    def __init__(self) -> None:
        self.revision = 0
        self.term = 0
        self.fence = 0
        self.sealed: dict[str, Any] | None = None
        self.leases: dict[int, float] = {}
        """time to live of every open lease"""
        self._entries: dict[str, _Held] = {}
        self._keys: list[str] = []
        self._lease_keys: dict[int, set[str]] = {}
        self._history: deque[Change] = deque()
        self._history_bytes = 0
        self._compacted = 0
        self._next_lease = 1
        self._outcomes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0

    # --- reading ------------------------------------------------------------------------------------------

    def get(self, key: str) -> Entry | None:
        """One key, or ``None``."""
        held = self._entries.get(key)
        return None if held is None else Entry(key=key, value=held.value, revision=held.revision)

    def under(self, prefix: str) -> list[Entry]:
        """Every key under ``prefix``, sorted."""
        start = bisect.bisect_left(self._keys, prefix)
        found = []
        for index in range(start, len(self._keys)):
            key = self._keys[index]
            if not key.startswith(prefix):
                break
            held = self._entries[key]
            found.append(Entry(key=key, value=held.value, revision=held.revision))
        return found

    def lease_of(self, key: str) -> int | None:
        """Return the lease a key hangs on."""
        return self._entries[key].lease

    def after(self, prefix: str, revision: int) -> list[Change]:
        """Every kept change after ``revision`` under ``prefix``. Raises ``CompactedError`` or ``AheadError``."""
        if revision < self._compacted:
            raise CompactedError(
                f"changes up to revision {self._compacted} are no longer kept, {revision} was asked for; list again"
            )
        if revision > self.revision:
            raise AheadError(
                f"revision {revision} was asked for, this store is at {self.revision} (term {self.term}); list again"
            )
        found: list[Change] = []
        for change in reversed(self._history):
            if change.revision <= revision:
                break
            if change.key.startswith(prefix):
                following = found[-1].revision if found else None
                last = change.revision != following
                found.append(Change(key=change.key, value=change.value, revision=change.revision, last=last))
        found.reverse()
        return found

    def outcome(self, request: str | None) -> int | None:
        """Return what a request that was done already led to: a revision or a lease."""
        return None if request is None else self._outcomes.get(request)

    # --- planning -----------------------------------------------------------------------------------------

    def plan_write(
        self,
        expected: Mapping[str, int],
        writes: Mapping[str, str | None],
        lease: int | None,
        request: str | None = None,
    ) -> Record | None:
        """Plan a compare-and-set; ``None`` if a key is not as expected.

        A record without changes writes nothing. Raises ``LimitError``, ``LeaseEndedError`` or ``FullError``.
        """
        limits.check_write(expected, writes)
        for key, revision in expected.items():
            held = self._entries.get(key)
            if (held.revision if held else 0) != revision:
                return None
        if lease is not None and lease not in self.leases:
            raise LeaseEndedError(f"lease {lease} has ended; grant another and write again")
        effective = {key: value for key, value in writes.items() if value is not None or key in self._entries}
        changes = [[key, value] for key, value in effective.items()]
        grown = self._bytes + sum(self._growth(key, value) for key, value in effective.items())
        if grown > limits.MAX_STORE_BYTES and grown > self._bytes:
            raise FullError(f"the store holds {self._bytes} bytes and takes {limits.MAX_STORE_BYTES}; remove keys")
        record: Record = {"t": "write", "r": self.revision + bool(changes), "c": changes, "l": lease}
        return record if request is None else {**record, "q": request}

    def plan_grant(self, ttl_s: float, request: str | None = None) -> Record:
        """Plan to open a lease. Raises ``LimitError`` or ``FullError``."""
        limits.check_ttl(ttl_s)
        if len(self.leases) >= limits.MAX_LEASES:
            raise FullError(f"{len(self.leases)} leases are open; a store takes {limits.MAX_LEASES}")
        record: Record = {"t": "grant", "i": self._next_lease, "ttl": ttl_s}
        return record if request is None else {**record, "q": request}

    def plan_end(self, lease: int) -> Record:
        """Plan to end a lease that is open."""
        changes = [[key, None] for key in sorted(self._lease_keys.get(lease, ()))]
        return {"t": "end", "i": lease, "r": self.revision + bool(changes), "c": changes}

    # --- doing --------------------------------------------------------------------------------------------

    def apply(self, record: Record) -> Sequence[Change]:
        """Do one record; the changes it made."""
        kind = record["t"]
        changes: list[tuple[str, str | None]] = []
        if kind == "write":
            changes = [(key, value) for key, value in record["c"]]
            self._remember(record, record["r"])
            self._write(changes, record["r"], record["l"])
        elif kind == "grant":
            lease = record["i"]
            self.leases[lease] = record["ttl"]
            self._next_lease = lease + 1
            self._remember(record, lease)
        elif kind == "end":
            changes = [(key, None) for key, _ in record["c"]]
            self._lease_keys.pop(record["i"], None)
            del self.leases[record["i"]]
            self._write(changes, record["r"], None)
        elif kind == "fence":
            self.fence = record["g"]
        elif kind == "term":
            self.term = record["n"]
            self.sealed = None
        elif kind == "seal":
            self.sealed = {"term": record["n"], "to": record["to"]}
        else:
            raise ValueError(f"a record of kind {kind!r} is unknown here")
        return self._note(changes, record.get("r", 0))

    def _write(self, changes: Sequence[tuple[str, str | None]], revision: int, lease: int | None) -> None:
        for key, value in changes:
            self._bytes += self._growth(key, value)
            held = self._entries.get(key)
            if held is not None and held.lease is not None and held.lease in self._lease_keys:
                self._lease_keys[held.lease].discard(key)
            if value is None:
                if held is not None:
                    del self._entries[key]
                    del self._keys[bisect.bisect_left(self._keys, key)]
                continue
            if held is None:
                bisect.insort(self._keys, key)
            self._entries[key] = _Held(value, revision, lease)
            if lease is not None:
                self._lease_keys.setdefault(lease, set()).add(key)
        self.revision = revision

    def _growth(self, key: str, value: str | None) -> int:
        held = self._entries.get(key)
        before = 0 if held is None else len(key.encode()) + len(held.value.encode())
        return (0 if value is None else len(key.encode()) + len(value.encode())) - before

    def _note(self, changes: Sequence[tuple[str, str | None]], revision: int) -> Sequence[Change]:
        end = len(changes) - 1
        noted = [
            Change(key=key, value=value, revision=revision, last=index == end)
            for index, (key, value) in enumerate(changes)
        ]
        self._history.extend(noted)
        self._history_bytes += sum(map(_size, noted))
        while len(self._history) > limits.HISTORY_KEPT or self._history_bytes > limits.HISTORY_BYTES:
            self.forget(self._history[0].revision)
        return noted

    def forget(self, revision: int) -> None:
        """Drop the changes up to ``revision``, whole revisions at a time."""
        while self._history and self._history[0].revision <= revision:
            self._history_bytes -= _size(self._history.popleft())
        self._compacted = max(self._compacted, revision)

    def recall(self, older: Sequence[Record]) -> None:
        """Take the changes of records before the present state as history; for a state that was just loaded."""
        made = [record for record in older if record.get("c")]
        if made and made[-1]["r"] == self.revision == self._compacted:
            self._compacted = made[0]["r"] - 1
            for record in made:
                self._note([(key, value) for key, value in record["c"]], record["r"])

    def _remember(self, record: Record, outcome: int) -> None:
        request = record.get("q")
        if request is not None:
            self._outcomes[request] = outcome
            while len(self._outcomes) > limits.REQUESTS_REMEMBERED:
                self._outcomes.popitem(last=False)

    # --- as a whole ---------------------------------------------------------------------------------------

    def dump(self, *, history: int = 0) -> dict[str, Any]:
        """Return everything as JSON values, with the newest ``history`` changes and a few more."""
        compacted = self.revision
        if history and self._history:
            compacted = self._history[max(0, len(self._history) - history)].revision - 1
        return {
            "revision": self.revision,
            "term": self.term,
            "fence": self.fence,
            "sealed": self.sealed,
            "next_lease": self._next_lease,
            "leases": [[lease, ttl] for lease, ttl in self.leases.items()],
            "entries": [[key, held.value, held.revision, held.lease] for key, held in sorted(self._entries.items())],
            "outcomes": [[request, outcome] for request, outcome in self._outcomes.items()],
            "compacted": max(compacted, self._compacted),
            "history": [[c.key, c.value, c.revision, c.last] for c in self._history if c.revision > compacted],
        }

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Machine:
        """Return the machine that :meth:`dump` described; its history begins there."""
        machine = cls()
        machine.revision, machine._compacted = values["revision"], values["compacted"]
        for key, value, revision, last in values["history"]:
            change = Change(key=key, value=value, revision=revision, last=last)
            machine._history.append(change)
            machine._history_bytes += _size(change)
        machine.term, machine.fence, machine.sealed = values["term"], values["fence"], values["sealed"]
        machine._next_lease = values["next_lease"]
        machine.leases = {lease: ttl for lease, ttl in values["leases"]}  # noqa: C416  (checks the pairs)
        for key, value, revision, lease in values["entries"]:
            machine._entries[key] = _Held(value, revision, lease)
            machine._keys.append(key)
            machine._bytes += len(key.encode()) + len(value.encode())
            if lease is not None:
                machine._lease_keys.setdefault(lease, set()).add(key)
        machine._outcomes = OrderedDict((request, outcome) for request, outcome in values["outcomes"])
        return machine


def _size(change: Change) -> int:
    return len(change.key) + len(change.value or "") + 200  # what Python adds to the text
