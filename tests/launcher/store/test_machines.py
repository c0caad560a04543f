"""Random lives of leases and watches against a model, on a clock moved by hand, with restarts in between."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from launcher.store import engine as engine_module
from launcher.store import limits
from launcher.store.contract import Change
from launcher.store.engine import Engine
from launcher.store.errors import AheadError, CompactedError, LeaseEndedError
from launcher.store.snapshot import Snapshot

KEYS = st.sampled_from(["n/0", "n/1", "n/2", "o/0"])
RUN = settings(max_examples=40, stateful_step_count=30, deadline=None)
KEPT = 6


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HISTORY_KEPT", KEPT)
    monkeypatch.setattr(engine_module, "SAVE_EVERY_RECORDS", 7)


class Life(RuleBasedStateMachine):
    """One engine, closed and opened again at will."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="liverun-store-life-"))
        self.now = 0.0
        self.engine = self.open()

    def open(self) -> Engine:
        return Engine(self.folder / "store.db", clock=lambda: self.now)

    def teardown(self) -> None:
        self.engine.close()
        shutil.rmtree(self.folder)


class Leases(Life):
    """The model: every lease's deadline, and which keys hang on it."""

    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.deadlines: dict[int, tuple[float, float]] = {}
        self.held: dict[str, tuple[str, int | None]] = {}
        self.granted: set[int] = set()

    def settle(self) -> None:
        for lease, (_, deadline) in list(self.deadlines.items()):
            if deadline <= self.now:
                self.end(lease)

    def end(self, lease: int) -> None:
        del self.deadlines[lease]
        self.held = {key: pair for key, pair in self.held.items() if pair[1] != lease}

    @rule(target=leases, ttl_s=st.sampled_from([1.0, 2.5, 10.0]))
    def grant(self, ttl_s: float) -> int:
        self.settle()
        lease = self.engine.grant(ttl_s)
        assert lease not in self.granted, "a lease's number was given twice"
        self.granted.add(lease)
        self.deadlines[lease] = (ttl_s, self.now + ttl_s)
        return lease

    @rule(lease=leases, key=KEYS)
    def put_under(self, lease: int, key: str) -> None:
        self.settle()
        if lease in self.deadlines:
            self.engine.write({}, {key: str(self.now)}, lease=lease)
            self.held[key] = (str(self.now), lease)
        else:
            with pytest.raises(LeaseEndedError):
                self.engine.write({}, {key: "never"}, lease=lease)

    @rule(key=KEYS, remove=st.booleans())
    def put(self, key: str, remove: bool) -> None:
        self.settle()
        self.engine.write({}, {key: None if remove else "free"})
        self.held.pop(key, None)
        if not remove:
            self.held[key] = ("free", None)

    @rule(lease=leases)
    def keep_alive(self, lease: int) -> None:
        self.settle()
        assert self.engine.keep_alive(lease) == (lease in self.deadlines)
        if lease in self.deadlines:
            ttl_s = self.deadlines[lease][0]
            self.deadlines[lease] = (ttl_s, self.now + ttl_s)

    @rule(lease=consumes(leases))
    def revoke(self, lease: int) -> None:
        self.settle()
        self.engine.revoke(lease)
        if lease in self.deadlines:
            self.end(lease)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def restart(self) -> None:
        self.engine.expire()
        self.settle()
        self.engine.close()
        self.now += 100.0  # however long it was away
        self.engine = self.open()
        self.deadlines = {lease: (ttl_s, self.now + ttl_s) for lease, (ttl_s, _) in self.deadlines.items()}

    @invariant()
    def same(self) -> None:
        self.settle()
        found = {entry.key: entry.value for entry in self.engine.scan("").entries}
        assert found == {key: value for key, (value, _) in self.held.items()}
        assert set(self.engine.machine.leases) == set(self.deadlines)
        assert (self.engine.next_due_s() is None) or self.engine.next_due_s() >= 0  # type: ignore[operator]


class Watches(Life):
    """The model: every change there ever was."""

    watches = Bundle("watches")

    @initialize()
    def start(self) -> None:
        self.all: list[Change] = []
        self.present: set[str] = set()
        self.seen: dict[int, tuple[str, int]] = {}
        self.count = 0

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3, unique=True), remove=st.booleans())
    def write(self, keys: list[str], remove: bool) -> None:
        self.count += 1
        writes: dict[str, str | None] = dict.fromkeys(keys, None if remove else str(self.count))
        revision = self.engine.write({}, writes)
        assert revision is not None
        for key, value in writes.items():
            if value is not None or key in self.present:
                self.all.append(Change(key=key, value=value, revision=revision))
        self.present = self.present - set(keys) if remove else self.present | set(keys)

    @rule(target=watches, prefix=st.sampled_from(["", "n/", "n/1", "z"]), back=st.integers(0, 12))
    def open_watch(self, prefix: str, back: int) -> int:
        self.seen[len(self.seen)] = (prefix, max(0, self.engine.machine.revision - back))
        return len(self.seen) - 1

    @rule(number=watches)
    def follow(self, number: int) -> None:
        prefix, after = self.seen[number]
        due = [change for change in self.all if change.revision > after and change.key.startswith(prefix)]
        try:
            found = self.engine.after(prefix, after)
        except CompactedError:
            missed = [change for change in self.all if change.revision > after]
            assert len(missed) >= KEPT or self.moved, "told of a gap that is none"
            self.seen[number] = (prefix, self.engine.machine.revision)
            return
        assert found == due
        for index, change in enumerate(found):
            following = found[index + 1].revision if index + 1 < len(found) else None
            assert change.last == (change.revision != following)
        self.seen[number] = (prefix, self.engine.machine.revision)

    moved = False

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.engine = self.open()
        self.moved = True  # a saved state may have cost history; never order or content

    @rule(target=watches)
    def ahead(self) -> object:
        with pytest.raises(AheadError):
            self.engine.after("", self.engine.machine.revision + 1)
        return multiple()

    @rule()
    def move(self) -> None:
        term = self.engine.term + 1
        copy = Snapshot.loads(self.engine.seal("127.0.0.1:1", term=term).dumps())
        self.engine.close()
        self.folder.joinpath("store.db").rename(self.folder / f"old-{term}.db")
        self.engine = Engine.restore(self.folder / "store.db", copy, term=term, clock=lambda: self.now)
        self.moved = True


TestLeases = Leases.TestCase
TestLeases.settings = RUN
TestWatches = Watches.TestCase
TestWatches.settings = RUN
