"""What the store's journal keeps when its files are cut, flipped, held twice, or the disk is full."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher.store import engine as engine_module
from launcher.store.engine import Engine
from launcher.store.errors import CompactedError, FullError, JournalError, StoreError
from launcher.store.journal import Journal

PAGE_BYTES = 1024
FLIPS = (0x01, 0xFF)


def clock() -> float:
    return 1.0


class History(NamedTuple):
    folder: Path
    states: list[str]
    """what the store held after each record, in order"""


def what(engine: Engine) -> str:
    return repr([(entry.key, entry.value, entry.revision) for entry in engine.machine.under("")])


def write_history(folder: Path, *, killed: bool) -> History:
    """A short history with a state saved in its middle; ``killed``: the log is not folded into the file."""
    engine = Engine(folder / "store.db", clock=clock)
    if killed:
        engine.write({}, {"job/id": "j"})
        engine.close()
        engine = Engine(folder / "store.db", clock=clock)  # the log holds only what follows
    states = [what(engine)]

    def note() -> None:
        states.append(what(engine))

    engine.write({}, {"job/active": "1"})
    note()
    lease = engine.grant(10.0)
    second = engine.write({}, {"node/n0": "here", "node/n1": "here"}, lease=lease)
    note()
    if not killed:
        engine._save()
    engine.write({"node/n0": second}, {"node/n0": None, "job/active": "2"})
    note()
    engine.fence(2)
    engine.write({}, {"x": "y" * 40})
    note()
    copy = folder / "copy"
    copy.mkdir()
    if not killed:
        engine.close()
    for path in folder.glob("store.db*"):
        shutil.copy(path, copy)
    engine.close()
    return History(copy, states)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A folder in memory: these tests open thousands of journals."""
    folder = Path("/dev/shm") / f"liverun-store-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def folded(scratch: Path) -> History:
    (scratch / "folded").mkdir()
    return write_history(scratch / "folded", killed=False)


@pytest.fixture(scope="module")
def killed(scratch: Path) -> History:
    (scratch / "killed").mkdir()
    return write_history(scratch / "killed", killed=True)


def reopen(history: History, scratch: Path, name: str, data: bytes) -> int | JournalError:
    """Open the history with one of its files replaced; the number of its states found, or the refusal."""
    found = reopened(history, scratch, name, data)
    return found if isinstance(found, JournalError) else found.state


class Found(NamedTuple):
    state: int
    """which of the history's states"""
    seq: int
    """the last record"""


def reopened(history: History, scratch: Path, name: str, data: bytes) -> Found | JournalError:
    trial = scratch / "trial"
    trial.mkdir(exist_ok=True)
    (trial / "store.db-wal").unlink(missing_ok=True)
    for path in history.folder.iterdir():
        write_private(trial / path.name, data if path.name == name else path.read_bytes())
    try:
        engine = Engine(trial / "store.db", clock=clock)
    except JournalError as error:
        return error
    found = what(engine)
    engine.close()
    assert found in history.states, f"a state that never was: {found}"
    return Found(history.states.index(found), engine.journal.seq)


def write_private(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)


def test_the_whole_history_comes_back(folded: History, killed: History, scratch: Path) -> None:
    assert {path.name for path in folded.folder.iterdir()} == {"store.db"}
    assert {path.name for path in killed.folder.iterdir()} == {"store.db", "store.db-wal"}
    for history in (folded, killed):
        data = (history.folder / "store.db").read_bytes()
        assert reopen(history, scratch, "store.db", data) == len(history.states) - 1


def test_a_flipped_byte_of_the_file_changes_nothing_or_is_refused_with_its_offset(
    folded: History, scratch: Path
) -> None:
    data = (folded.folder / "store.db").read_bytes()
    near = refused = 0
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= FLIPS[offset % 2]
        found = reopen(folded, scratch, "store.db", bytes(changed))
        if isinstance(found, JournalError):
            refused += 1
            near += abs(found.offset - offset) <= PAGE_BYTES
            assert 0 <= found.offset <= len(data)
            assert f"byte {found.offset}" in str(found)
        else:
            assert found == len(folded.states) - 1, f"byte {offset} flipped: writes were lost without a word"
    print(f"{refused} of {len(data)} flips refused, {near} with an offset within a page of the flip")
    assert near > 0.9 * refused > 0


def test_a_file_cut_anywhere_is_refused_with_its_offset(folded: History, scratch: Path) -> None:
    data = (folded.folder / "store.db").read_bytes()
    for length in range(1, len(data)):
        found = reopen(folded, scratch, "store.db", data[:length])
        assert isinstance(found, JournalError), f"{length} of {len(data)} bytes were taken for a store"
        assert abs(found.offset - length) <= PAGE_BYTES, f"cut at byte {length}, byte {found.offset} named"


def commit_ends(log: bytes) -> list[int]:
    """Where each commit of a write-ahead log ends: the frames that say how large the file is from then on."""
    frame_bytes = 24 + PAGE_BYTES
    starts = range(32, len(log), frame_bytes)
    return [start + frame_bytes for start in starts if any(log[start + 4 : start + 8])]


def test_a_log_cut_anywhere_gives_the_longest_valid_prefix(killed: History, scratch: Path) -> None:
    whole = (killed.folder / "store.db-wal").read_bytes()
    ends = commit_ends(whole)
    data = whole[: ends[2]]
    nothing = reopened(killed, scratch, "store.db-wal", b"")
    assert isinstance(nothing, Found)
    assert nothing.state == 0
    last = nothing
    for length in range(1, len(data) + 1):
        found = reopened(killed, scratch, "store.db-wal", data[:length])
        assert isinstance(found, Found), found
        assert found.seq == nothing.seq + sum(end <= length for end in ends), f"cut at byte {length}"
        assert found.state >= last.state
        last = found
    assert last == (2, nothing.seq + 3)
    assert reopened(killed, scratch, "store.db-wal", whole) == (len(killed.states) - 1, nothing.seq + len(ends))


def test_an_empty_file_is_a_new_store_only_where_no_log_lies_beside_it(killed: History, scratch: Path) -> None:
    found = reopen(killed, scratch, "store.db", b"")
    assert isinstance(found, JournalError)
    assert "store.db: empty, and writes lie in" in str(found)
    (scratch / "trial" / "store.db-wal").unlink()
    engine = Engine(scratch / "trial" / "store.db", clock=clock)
    assert engine.journal.seq == 1
    engine.close()


def test_a_flipped_byte_of_the_log_costs_at_most_the_last_write_or_is_refused_with_its_offset(
    killed: History, scratch: Path
) -> None:
    data = (killed.folder / "store.db-wal").read_bytes()
    frame_bytes = 24 + PAGE_BYTES
    refused = 0
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= FLIPS[offset % 2]
        found = reopen(killed, scratch, "store.db-wal", bytes(changed))
        if isinstance(found, JournalError):
            refused += 1
            frame = 0 if offset < 32 else 32 + (offset - 32) // frame_bytes * frame_bytes
            assert found.offset == frame, f"byte {offset} flipped, byte {found.offset} named"
        else:
            assert found >= len(killed.states) - 2, f"byte {offset} flipped: more than the last write was lost"
    assert refused > len(data) // 2


def test_salvage_goes_on_from_the_writes_before_the_damage(killed: History, tmp_path: Path) -> None:
    shutil.copytree(killed.folder, tmp_path / "s")
    path = tmp_path / "s" / "store.db-wal"
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match="committed writes follow"):
        Engine(tmp_path / "s" / "store.db", clock=clock)
    engine = Engine(tmp_path / "s" / "store.db", clock=clock, salvage=True)
    assert 0 < killed.states.index(what(engine)) < len(killed.states) - 1
    engine.close()


def test_one_record_changed_by_a_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    engine = Engine(path, clock=clock)
    engine.write({}, {"job/active": "1"})
    engine.write({}, {"job/active": "2"})
    engine.close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("update records set body = cast(replace(cast(body as text), '\"1\"', '\"3\"') as blob) where seq = 2")
    with pytest.raises(JournalError, match="record 2 is not what was written"):
        Engine(path, clock=clock)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("delete from records where seq = 3")
        db.execute("update records set body = cast(replace(cast(body as text), '\"3\"', '\"1\"') as blob) where seq = 2")
    with pytest.raises(JournalError, match="record 2 is the last one found, 3 was written"):
        Engine(path, clock=clock)


def test_a_journal_in_use_a_link_and_a_strangers_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    engine = Engine(path, clock=clock)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(BlockingIOError, match="in use by another process"):
        Engine(path, clock=clock)
    engine.close()
    (tmp_path / "link.db").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        Engine(tmp_path / "link.db", clock=clock)
    (tmp_path / "other.db").touch(mode=0o600)
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as db, db:
        db.execute("create table t (x)")
    with pytest.raises(JournalError, match="format 0"):
        Engine(tmp_path / "other.db", clock=clock)


def test_a_journal_that_others_can_touch_is_refused(killed: History, tmp_path: Path) -> None:
    shutil.copytree(killed.folder, tmp_path / "s")
    path, log = tmp_path / "s" / "store.db", tmp_path / "s" / "store.db-wal"

    def refused(match: str) -> None:
        with pytest.raises(OSError, match=match):
            Engine(path, clock=clock)

    for which in (path, log):
        for mode in (0o666, 0o640, 0o604):
            which.chmod(mode)
            refused(f"{which.name} has mode {mode:04o}; make it 0600")
        which.chmod(0o600)
        if os.geteuid() == 0:
            os.chown(which, 12345, -1)
            refused(f"{which.name} belongs to uid 12345, not to 0 or root")
            os.chown(which, 0, -1)
    kept = log.rename(tmp_path / "log")
    log.symlink_to(kept)
    refused("store.db-wal is no regular file")
    log.unlink()
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(OSError, match="pipe is no regular file"):
        Engine(tmp_path / "pipe", clock=clock)
    kept.rename(log)
    engine = Engine(path, clock=clock)
    assert what(engine) == killed.states[-1]
    engine.close()


def test_saved_states_keep_the_file_small_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SAVE_EVERY_RECORDS", 20)
    engine = Engine(tmp_path / "store.db", clock=clock)
    for number in range(500):
        engine.write({}, {f"key/{number % 5}": str(number)})
        if number % 37 == 0:
            engine.close()
            engine = Engine(tmp_path / "store.db", clock=clock)
            assert engine.get(f"key/{number % 5}").value == str(number)  # type: ignore[union-attr]
            assert len(engine.after("", engine.machine.revision - min(number, 19))) == min(number, 19)
    with pytest.raises(CompactedError):
        engine.after("", 10)
    engine.close()
    assert (tmp_path / "store.db").stat().st_size < 64 * 1024


# --- a full disk --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "liverun-test", str(place)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"not to be had here: a small file system: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_told_and_leaves_nothing_half_written(small_disk: Path) -> None:
    engine = Engine(small_disk / "store.db", clock=clock)
    written: dict[str, str] = {}
    told = 0
    for number in range(400):
        pair = {f"a/{number}": str(number) * 300, f"b/{number}": str(number) * 300}
        try:
            engine.write({}, pair)
        except FullError as error:
            assert "the disk takes no more" in str(error)  # noqa: PT017
            told += 1
            if told == 3:
                break
        else:
            written |= pair
    assert told == 3
    assert {entry.key: entry.value for entry in engine.scan("").entries} == written
    (small_disk / "ballast").unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,size=2m", str(small_disk)], check=True)
    engine.write({}, {"after": "room"})  # the same store goes on once there is room
    engine.close()
    again = Engine(small_disk / "store.db", clock=clock)
    assert {entry.key: entry.value for entry in again.scan("").entries} == {**written, "after": "room"}
    again.close()


def test_a_journal_that_takes_no_more_keeps_a_lease_until_its_end_can_be_written(tmp_path: Path) -> None:
    now = [0.0]
    engine = Engine(tmp_path / "store.db", clock=lambda: now[0])
    lease = engine.grant(5.0)
    engine.write({}, {"node/n0": "here"}, lease=lease)
    engine.journal._db.execute("pragma query_only=on")
    now[0] = 9.0
    for _ in range(2):
        assert engine.get("node/n0") is not None
    engine.journal._db.execute("pragma query_only=off")
    assert engine.get("node/n0") is None
    assert not engine.keep_alive(lease)
    engine.close()


def test_a_database_at_its_bound_is_told_and_goes_on(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store.db", clock=clock)
    engine.write({}, {"a": "1"})
    room = engine.journal._db.execute("pragma page_count").fetchone()[0]
    engine.journal._db.execute(f"pragma max_page_count={room}")
    with pytest.raises(FullError, match="nothing of it was kept"):
        engine.write({}, {"k": "v" * 20_000})
    engine.journal._db.execute("pragma max_page_count=100000")
    engine.write({}, {"k": "v" * 20_000})
    engine.close()


def test_a_refused_append_leaves_the_chain_as_it_was(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    journal.load()
    journal.append([b"1"])
    kept = (journal.seq, journal.digest)
    journal._db.execute("pragma query_only=on")
    with pytest.raises(StoreError):
        journal.append([b"2", b"3"])
    assert (journal.seq, journal.digest) == kept
    journal._db.execute("pragma query_only=off")
    with pytest.raises(KeyboardInterrupt), journal._transaction():  # noqa: PT012  (what is raised is the point)
        journal._db.execute("insert into records values (2, x'', x'')")
        raise KeyboardInterrupt
    assert (journal.seq, journal.digest) == kept
    journal.append([b"2"])
    journal.close()
    again = Journal(tmp_path / "j.db")
    assert [record for _, record in again.load().records] == [1, 2]
    again.close()
