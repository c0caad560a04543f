"""A whole store as one checked piece of text, to move it or to bring it back elsewhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from launcher.store.errors import JournalError
from launcher.store.journal import seal_state
from launcher.store.machine import Machine

MAGIC = "liverun-store-1"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A store after its record ``seq``. Of two of one job, the one with the greater ``rank`` knows more."""

    term: int
    seq: int
    digest: bytes
    """of record ``seq``; vouches for every record before it"""
    state: bytes
    """JSON, as :meth:`launcher.store.machine.Machine.dump` gives it"""

    @property
    def rank(self) -> tuple[int, int]:
        """``(term, seq)``: a later term wins whatever it holds."""
        return self.term, self.seq

    def machine(self) -> Machine:
        """Return the state as a machine."""
        return Machine.load(json.loads(self.state))

    def dumps(self) -> bytes:
        """Return one line of header, then the state."""
        seal = seal_state(self.digest, self.seq, self.state).hex()
        header = {"magic": MAGIC, "term": self.term, "seq": self.seq, "digest": self.digest.hex(), "seal": seal}
        return json.dumps(header).encode() + b"\n" + self.state

    @staticmethod
    def loads(data: bytes) -> Snapshot:
        """Read what :meth:`dumps` gave. Raises ``JournalError`` for anything else, damaged or cut."""
        line, _, state = data.partition(b"\n")
        try:
            header: dict[str, Any] = json.loads(line)
            known = header["magic"] == MAGIC
            term, seq, digest = int(header["term"]), int(header["seq"]), bytes.fromhex(header["digest"])
            seal = bytes.fromhex(header["seal"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise JournalError(f"not a copy of a store: its first line is damaged ({error})", offset=0) from None
        if not known or seal_state(digest, seq, state) != seal:
            raise JournalError("this copy of a store is damaged or cut", offset=len(line) + 1)
        snapshot = Snapshot(term=term, seq=seq, digest=digest, state=state)
        if snapshot.machine().term != term:
            raise JournalError("this copy of a store names a term that is not its own", offset=0)
        return snapshot
