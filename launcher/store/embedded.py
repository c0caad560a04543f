"""The store inside the agent of a job on one node: SQLite, with its journal in the run folder."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from launcher.store.contract import Change, Entry

SCHEMA = """
create table if not exists entries (
    key text primary key, value text not null, revision integer not null, lease integer
);
create table if not exists history (revision integer not null, key text not null, value text);
create index if not exists history_by_revision on history (revision);
create table if not exists leases (id integer primary key autoincrement, ttl_s real not null);
create table if not exists meta (name text primary key, number integer not null);
insert or ignore into meta values ('revision', 0);
"""
HISTORY_KEPT = 10_000
"""changes a watcher can still go back to"""


class EmbeddedStore:
    """A :class:`launcher.store.contract.Store` in this process; nothing of it is reachable from outside.

    Writes outlive this process (WAL) before they are acknowledged; not a power cut, which the job would not
    outlive either, and whose price, a sync of the disk, would hold up every worker that waits for a word.
    Leases are timed by ``clock`` and start anew when the journal is opened again: a restart never shortens
    one.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=normal")
        self._db.executescript(SCHEMA)
        self._deadlines: dict[int, float] = {}
        for lease, ttl_s in self._db.execute("select id, ttl_s from leases"):
            self._deadlines[lease] = clock() + ttl_s
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Close the journal; watches end."""
        self._db.close()
        self._changed.set()

    async def get(self, key: str) -> Entry | None:
        """One key, or ``None``."""
        self._expire()
        row = self._db.execute("select key, value, revision from entries where key = ?", (key,)).fetchone()
        return None if row is None else Entry(key=row[0], value=row[1], revision=row[2])

    async def list(self, prefix: str) -> list[Entry]:
        """Every key that starts with ``prefix``, sorted."""
        self._expire()
        rows = self._db.execute(
            "select key, value, revision from entries where substr(key, 1, ?) = ? order by key",
            (len(prefix), prefix),
        )
        return [Entry(key=key, value=value, revision=revision) for key, value, revision in rows]

    async def put(self, key: str, value: str, *, lease: int | None = None) -> int:
        """Write one key whatever it was; the new revision."""
        self._expire()
        return self._write({key: value}, lease)

    async def compare_and_set(
        self, expected: Mapping[str, int], writes: Mapping[str, str | None], *, lease: int | None = None
    ) -> int | None:
        """Write all of ``writes`` if every key of ``expected`` still has that revision (0: absent)."""
        self._expire()
        for key, revision in expected.items():
            row = self._db.execute("select revision from entries where key = ?", (key,)).fetchone()
            if (row[0] if row else 0) != revision:
                return None
        return self._write(writes, lease)

    async def grant(self, ttl_s: float) -> int:
        """Open a lease."""
        cursor = self._db.execute("insert into leases (ttl_s) values (?)", (ttl_s,))
        assert cursor.lastrowid is not None
        self._deadlines[cursor.lastrowid] = self._clock() + ttl_s
        return cursor.lastrowid

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; false if it has ended already."""
        self._expire()
        row = self._db.execute("select ttl_s from leases where id = ?", (lease,)).fetchone()
        if row is None:
            return False
        self._deadlines[lease] = self._clock() + row[0]
        return True

    async def revoke(self, lease: int) -> None:
        """End a lease and remove its keys now."""
        self._end_lease(lease)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Change]:
        """Every change after ``from_revision`` under ``prefix``, in order, then the ones to come."""
        seen = from_revision
        while True:
            changed = self._changed
            try:
                rows = self._db.execute(
                    "select key, value, revision from history where revision > ? and substr(key, 1, ?) = ?"
                    " order by rowid",
                    (seen, len(prefix), prefix),
                ).fetchall()
            except sqlite3.ProgrammingError:  # closed
                return
            for key, value, revision in rows:
                seen = revision
                yield Change(key=key, value=value, revision=revision)
            if not rows:
                await changed.wait()

    def expire(self) -> None:
        """Remove the keys of leases that have run out; also done before every read and write."""
        self._expire()

    def _expire(self) -> None:
        now = self._clock()
        for lease in [lease for lease, deadline in self._deadlines.items() if deadline <= now]:
            self._end_lease(lease)

    def _end_lease(self, lease: int) -> None:
        self._deadlines.pop(lease, None)
        keys = [row[0] for row in self._db.execute("select key from entries where lease = ?", (lease,))]
        self._db.execute("delete from leases where id = ?", (lease,))
        if keys:
            self._write(dict.fromkeys(keys), None)

    def _write(self, writes: Mapping[str, str | None], lease: int | None) -> int:
        if lease is not None and lease not in self._deadlines:
            raise KeyError(f"lease {lease} has ended")
        self._db.execute("begin immediate")
        try:
            self._db.execute("update meta set number = number + 1 where name = 'revision'")
            revision = int(self._db.execute("select number from meta where name = 'revision'").fetchone()[0])
            for key, value in writes.items():
                if value is None:
                    self._db.execute("delete from entries where key = ?", (key,))
                else:
                    self._db.execute(
                        "replace into entries values (?, ?, ?, ?)", (key, value, revision, lease)
                    )
                self._db.execute("insert into history values (?, ?, ?)", (revision, key, value))
            self._db.execute("delete from history where revision <= ?", (revision - HISTORY_KEPT,))
        except sqlite3.Error:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")
        self._changed.set()
        self._changed = asyncio.Event()
        return revision
