"""The store's memory on disk: records in SQLite, each chained to the one before by a digest.

SQLite gives atomic appends, a log that is checked frame by frame after a crash, and clean failure on a full disk.
It does not check the pages of its main file, it takes a cut log for a shorter one, and it never says where a fault
is. So every record carries the digest of its text and of the digest before it; a ``head`` row, on a page of its own,
names the last one; and opening the journal computes them all again. A journal is accepted whole, or up to the
write at which its log was cut; anything else is refused with the byte at which the damage begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from launcher.store.errors import FullError, JournalError
from launcher.store.wal import check_wal

FORMAT = 2
ROOT_DIGEST = bytes(32)
"""what stands before the first record"""
SCHEMA = f"""
create table records (seq integer primary key, body blob not null, digest blob not null);
create table base (name text primary key, seq integer not null, digest blob not null, body blob not null);
create table head (one integer primary key, seq integer not null, digest blob not null);
insert into base values ('floor', 0, zeroblob(32), x''), ('state', 0, zeroblob(32), x'');
insert into head values (1, 0, zeroblob(32));
pragma user_version={FORMAT};
"""  # noqa: S608  (a number of ours)
FULL_CODES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}


class Loaded(NamedTuple):
    """What a journal holds: the newest state saved whole, and every record since the one before it."""

    state: dict[str, Any] | None
    state_seq: int
    records: list[tuple[int, dict[str, Any]]]
    """older ones than ``state_seq`` too, as history"""


def chain(previous: bytes, seq: int, body: bytes) -> bytes:
    """Return the digest of a record, which vouches for every record before it."""
    return hashlib.blake2b(previous + seq.to_bytes(8, "big") + body, digest_size=32).digest()


def seal_state(digest: bytes, seq: int, state: bytes) -> bytes:
    """Return the digest of a whole state after record ``seq``; ``digest`` is that record's."""
    return hashlib.blake2b(b"state" + digest + seq.to_bytes(8, "big") + state, digest_size=32).digest()


class Journal:
    """One journal file, held by this process alone (a second opener is refused)."""

    def __init__(self, path: Path | str, *, power_safe: bool = False, salvage: bool = False) -> None:
        """Open or make the journal, mode 0600.

        ``power_safe`` waits for the disk at every write. ``salvage`` takes a damaged log up to the damage.
        Raises ``JournalError``, ``FullError``, or ``OSError`` for a file that cannot be opened, is in use, or that
        someone else can read or write.
        """
        self.path = path
        self.seq = 0
        self.digest = ROOT_DIGEST
        in_memory = str(path) == ":memory:"
        if not in_memory:
            self._judge(Path(path))
            if not salvage:
                check_wal(Path(f"{path}-wal"))
        self._db = sqlite3.connect(path, isolation_level=None, timeout=0)
        with self._faults("open"), self._closed_on_error():
            self._db.execute("pragma locking_mode=exclusive")
            self._db.execute("pragma page_size=1024")
            self._db.execute("pragma journal_mode=wal")
            self._db.execute(f"pragma synchronous={'full' if power_safe else 'normal'}")
            self._db.execute("pragma wal_autocheckpoint=1000")
            self._db.execute("pragma cell_size_check=on")
            found = self._db.execute("pragma user_version").fetchone()[0]
            tables = self._db.execute("select count(*) from sqlite_master").fetchone()[0]
            if (found, tables) == (0, 0):
                self._db.executescript(f"begin immediate; {SCHEMA} commit;")
            elif found != FORMAT:
                raise JournalError(f"{path}: byte 60: format {found}; this version reads {FORMAT}", offset=60)

    @staticmethod
    def _judge(path: Path) -> None:
        """Make the file if there is none, and look at it and at its log before SQLite trusts either."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            found = os.fstat(file)
        finally:
            os.close(file)
        check_owned(path, found)
        log = Path(f"{path}-wal")
        with contextlib.suppress(FileNotFoundError):
            beside = log.lstat()
            check_owned(log, beside)
            if found.st_size == 0 and beside.st_size > 0:
                raise JournalError(f"{path}: empty, and writes lie in {log}; restore a copy of the store", offset=0)
        if 0 < found.st_size < 512:  # SQLite would take it for an empty one
            size = found.st_size
            raise JournalError(f"{path}: cut at byte {size}; restore a copy of the store", offset=size)

    def load(self) -> Loaded:
        """Read and check everything. Raises ``JournalError`` with the byte at which the damage begins."""
        with self._faults("load"):
            found = self._rows("select name, seq, digest, body from base")
            bases = {name: (seq, digest, body) for name, seq, digest, body in found}
            heads = self._rows("select seq, digest from head")
            rows = self._rows("select seq, body, digest from records order by seq")
            if set(bases) != {"floor", "state"} or len(heads) != 1:
                raise self._damaged("its base or head row is missing", b"floor")
            return self._check(bases, heads[0], rows)

    def _rows(self, query: str, *values: int) -> list[Any]:
        with contextlib.closing(self._db.execute(query, values)) as cursor:  # an open one would keep the file held
            return cursor.fetchall()

    def _check(
        self, bases: dict[str, tuple[int, bytes, bytes]], head: tuple[int, bytes],
        rows: list[tuple[int, bytes, bytes]],
    ) -> Loaded:
        floor_seq, digest, _ = bases["floor"]
        state_seq, state_digest, state_body = bases["state"]
        state: dict[str, Any] | None = None
        records: list[tuple[int, dict[str, Any]]] = []
        seq, at_state = floor_seq, digest if floor_seq == state_seq else None
        for found_seq, body, found_digest in rows:
            seq += 1
            digest = chain(digest, seq, body)
            if found_seq != seq or digest != found_digest:
                raise self._damaged(f"record {seq} is not what was written", found_digest)
            if seq == state_seq:
                at_state = digest
            records.append((seq, json.loads(body)))
        if (seq, digest) != tuple(head):
            raise self._damaged(f"record {seq} is the last one found, {head[0]} was written", head[1])
        if at_state is None or (
            state_body and seal_state(at_state, state_seq, state_body) != state_digest
        ) or (not state_body and state_seq != 0):
            raise self._damaged(f"the state saved after record {state_seq} is not what was written", state_digest)
        if state_body:
            state = json.loads(state_body)
        self.seq, self.digest = seq, digest
        return Loaded(state, state_seq, records)

    def append(self, bodies: list[bytes]) -> None:
        """Write records, all or none. Raises ``FullError`` and leaves the journal as it was."""
        seq, digest = self.seq, self.digest
        rows = []
        for body in bodies:
            seq += 1
            digest = chain(digest, seq, body)
            rows.append((seq, body, digest))
        with self._transaction():
            self._db.executemany("insert into records values (?, ?, ?)", rows)
            self._db.execute("update head set seq = ?, digest = ? where one = 1", (seq, digest))
        self.seq, self.digest = seq, digest

    def digest_of(self, seq: int) -> bytes | None:
        """Return the digest of a record that is still there; of the last one, always."""
        if seq == self.seq:
            return self.digest
        rows = self._rows("select digest from records where seq = ?", seq)
        return rows[0][0] if rows else None

    def bodies_after(self, seq: int, *, most_bytes: int) -> list[tuple[int, bytes]]:
        """Return records after ``seq``: at least one if there is one, no more than ``most_bytes`` else."""
        found: list[tuple[int, bytes]] = []
        query = "select seq, body from records where seq > ? order by seq"
        with contextlib.closing(self._db.execute(query, (seq,))) as rows:
            size = 0
            for number, body in rows:
                size += len(body)
                if found and size > most_bytes:
                    break
                found.append((number, body))
        return found

    def save_state(self, state: bytes) -> None:
        """Save the whole state as of the last record; records before the last saved state are dropped."""
        sealed = seal_state(self.digest, self.seq, state)
        with self._transaction():
            old = self._db.execute("select seq from base where name = 'state'").fetchone()[0]
            row = self._db.execute("select digest from records where seq = ?", (old,)).fetchone()
            if row is not None:
                self._db.execute("update base set seq = ?, digest = ? where name = 'floor'", (old, row[0]))
            self._db.execute("delete from records where seq <= ?", (old,))
            self._db.execute(
                "update base set seq = ?, digest = ?, body = ? where name = 'state'", (self.seq, sealed, state)
            )

    def replace(self, seq: int, digest: bytes, state: bytes) -> None:
        """Forget everything and begin at a state from elsewhere, after its record ``seq``."""
        with self._transaction():
            self._db.execute("delete from records")
            self._db.execute("update base set seq = ?, digest = ? where name = 'floor'", (seq, digest))
            self._db.execute(
                "update base set seq = ?, digest = ?, body = ? where name = 'state'",
                (seq, seal_state(digest, seq, state), state),
            )
            self._db.execute("update head set seq = ?, digest = ? where one = 1", (seq, digest))
        self.seq, self.digest = seq, digest

    def close(self) -> None:
        """Close the file; the log is folded into it."""
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._faults("write"):
            self._db.execute("begin immediate")
            try:
                yield
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._db.close()
            raise

    @contextlib.contextmanager
    def _faults(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0)
            if code & 0xFF in FULL_CODES:
                raise FullError(f"{self.path}: the disk takes no more ({error}); nothing of it was kept") from error
            if code & 0xFF == sqlite3.SQLITE_BUSY:
                raise BlockingIOError(f"{self.path} is in use by another process") from error
            if doing == "write" and code & 0xFF == sqlite3.SQLITE_READONLY:
                raise FullError(f"{self.path}: {error}; nothing of it was kept") from error
            raise self._damaged(str(error), None) from error
        except (ValueError, TypeError, OverflowError) as error:  # a row of another shape than was ever written
            raise self._damaged(str(error), None) from error

    def _damaged(self, what: str, near: bytes | None) -> JournalError:
        self.close()
        offset = find_damage(Path(self.path), near)
        sentence = f"{self.path}: damaged at byte {offset}: {what}; restore a copy of the store"
        return JournalError(sentence, offset=offset)


def check_owned(path: Path, found: os.stat_result) -> None:
    """Accept a regular file that only we (or root) can touch. Raises ``OSError``."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no regular file; give the store another journal")
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            f"{path} belongs to uid {found.st_uid}, not to {os.geteuid()} or root; give the store another journal"
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(f"{path} has mode {mode:04o}; make it 0600 if you trust what is in it")


def find_damage(path: Path, near: bytes | None) -> int:
    """Byte at which the damage is: the end of a file that was cut, where ``near`` lies in it, the page, else 0."""
    try:
        data = path.read_bytes()
        page_bytes, pages = int.from_bytes(data[16:18], "big"), int.from_bytes(data[28:32], "big")
        if len(data) < page_bytes * pages:
            return len(data)
        place = data.find(near) if near else -1
        if place >= 0:
            return place
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0)) as db:
            page_bytes = int(db.execute("pragma page_size").fetchone()[0])
            for (line,) in db.execute("pragma integrity_check"):
                match = re.search(r"page (\d+)", str(line), re.IGNORECASE)
                if match:
                    return (int(match[1]) - 1) * page_bytes
    except (OSError, sqlite3.Error, ValueError):
        pass
    return 0
