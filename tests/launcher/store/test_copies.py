"""What lets the store's own node go: copies, terms, who may write and who takes over, and leases that end in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_bed import Clock, served

from launcher.store import engine as engine_module
from launcher.store.engine import Engine
from launcher.store.errors import GateError, JournalError, MovedError, StoreError, UnavailableError
from launcher.store.lease import HeldLease, hold
from launcher.store.mirror import Mirror, read_copy
from launcher.store.quorum import CLOCK_MARGIN, WriteGate, majority, successor
from launcher.store.snapshot import Snapshot

VOTERS = ("n0", "n1", "n2", "n3", "n4")


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(30.0):
            await scene()

    asyncio.run(whole())


def filled(path: Path) -> Engine:
    engine = Engine(path, clock=Clock())
    lease = engine.grant(10.0)
    engine.write({}, {"a": "1", "b": "é\0"}, lease=lease, request="0" * 32)
    engine.write({}, {"a": None})
    engine.fence(3)
    return engine


def test_a_snapshot_holds_everything_and_a_damaged_or_cut_one_is_refused(tmp_path: Path) -> None:
    engine = filled(tmp_path / "a.db")
    data = engine.snapshot().dumps()
    copy = Snapshot.loads(data)
    moved = Engine.restore(tmp_path / "b.db", copy, term=2, clock=Clock())
    assert moved.machine.dump() == {**engine.machine.dump(), "term": 2}
    assert moved.after("", 1) == engine.after("", 1)
    assert moved.write({}, {"a": "never twice"}, request="0" * 32) == 1
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= 0x01
        with pytest.raises(JournalError):
            Snapshot.loads(bytes(changed))
        with pytest.raises(JournalError):
            Snapshot.loads(data[:offset])
    engine.close()
    moved.close()
    again = Engine(tmp_path / "b.db", clock=Clock())
    assert (again.term, again.machine.fence) == (2, 3)
    again.close()


def test_a_sealed_store_does_nothing_until_a_later_term(tmp_path: Path) -> None:
    engine = filled(tmp_path / "a.db")
    copy = engine.seal("10.0.0.2:7", term=2)
    for attempt in (
        lambda: engine.write({}, {"a": "1"}), lambda: engine.get("a"), lambda: engine.keep_alive(1),
        lambda: engine.seal("elsewhere:1", term=3), lambda: engine.after("", 0),
    ):  # fmt: skip
        with pytest.raises(MovedError, match=r"moved to 10.0.0.2:7, term 2"):
            attempt()
    engine.close()
    again = Engine(tmp_path / "a.db", clock=Clock())  # a restart does not unseal it
    with pytest.raises(MovedError):
        again.get("b")
    with pytest.raises(StoreError, match="term 2 is not later than 2"):
        again.begin_term(2)
    again.begin_term(3)  # the new place never came
    again.write({}, {"a": "1"})
    again.close()
    with pytest.raises(StoreError, match="not later"):
        Engine.restore(tmp_path / "c.db", copy, term=1, clock=Clock())


def test_an_older_copy_never_replaces_what_a_journal_knows(tmp_path: Path) -> None:
    engine = filled(tmp_path / "a.db")
    old = engine.snapshot()
    engine.write({}, {"later": "1"})
    engine.close()
    with pytest.raises(StoreError, match="newer than the copy"):
        Engine.restore(tmp_path / "a.db", old, term=9, clock=Clock())
    again = Engine(tmp_path / "a.db", clock=Clock())
    assert again.get("later") is not None
    again.close()


def test_a_mirror_follows_and_brings_the_store_back_when_its_node_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SAVE_EVERY_RECORDS", 10)

    async def scene() -> None:
        async with served(tmp_path) as bed:
            store = await bed.client()
            mirror = Mirror(store, path=tmp_path / "copy")
            with pytest.raises(StoreError, match="no copy"):
                mirror.snapshot()
            assert await mirror.catch_up()
            for number in range(45):
                await store.put(f"k{number % 7}", str(number))
                if number % 4 == 0 or number < 3:
                    assert await mirror.catch_up()
            while await mirror.catch_up():
                pass
            mirror._write()
            copy = read_copy(tmp_path / "copy")
            assert (copy.seq, copy.digest) == (bed.engine.journal.seq, bed.engine.journal.digest)
            assert copy.machine().dump() == bed.engine.machine.dump()
            assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
            back = Engine.restore(tmp_path / "back.db", copy, term=2, clock=Clock())
            assert back.get("k2").value == "44"  # type: ignore[union-attr]
            back.close()

    play(scene)


def test_a_mirror_of_another_past_begins_anew(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served(tmp_path) as bed:
            store = await bed.client()
            mirror = Mirror(store)
            await store.put("a", "1")
            await mirror.catch_up()
            mirror._digest = bytes(32)  # as after a restore from an older copy
            await store.put("a", "2")
            assert await mirror.catch_up()
            assert mirror.snapshot().digest == bed.engine.journal.digest

    play(scene)


# --- who may write, who takes over --------------------------------------------------------------------------


def test_a_store_that_sees_no_majority_says_so_and_reads_on(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served(tmp_path) as bed:
            gate = WriteGate("s", bed.server.heard, voters=("s", "n0", "n1"), horizon_s=5.0, clock=bed.clock)
            bed.engine.gate = gate
            store = await bed.client(clock=bed.clock)  # is n0
            await store.get("a")
            with pytest.raises(GateError, match="1 of 3"):
                await store.put("a", "1")

            async def beat() -> None:
                asked = bed.clock.now
                await bed.server.beat()
                bed.clock.now += 1.0  # the answer counts from the question
                while bed.server.heard.get("n0") != asked:  # noqa: ASYNC110  (the answer has no event)
                    await asyncio.sleep(0)

            await beat()
            await store.put("a", "1")
            bed.clock.now += 3.5
            assert store.silent_s >= 3.5
            await store.put("a", "2")
            await beat()
            bed.clock.now += 3.5
            await store.put("a", "2")
            bed.clock.now += 0.5
            assert gate() == "1 of 3 nodes in sight within 5 s; 2 are needed"
            late = bed.server
            late.heard["stranger"] = late.heard["n9"] = bed.clock.now
            with pytest.raises(GateError, match="1 of 3"):
                bed.engine.write({}, {"a": "3"})
            gate.set_voters(1, ["s"])
            gate.knows(1, "n0")
            with pytest.raises(GateError, match="1 of 3"):
                bed.engine.write({}, {"a": "4"})  # s and n1 may still count by the former three
            gate.knows(1, "s")
            bed.engine.write({}, {"a": "4"})

    play(scene)


@given(
    heard_ago=st.dictionaries(st.sampled_from(VOTERS[1:]), st.floats(0, 20)),
    claims=st.sets(st.sampled_from(VOTERS[1:])),
    horizon_s=st.floats(0.5, 10),
    rates=st.lists(st.floats(1 - CLOCK_MARGIN / 2.2, 1 + CLOCK_MARGIN / 2.2), min_size=4, max_size=4),
)
def test_never_do_the_old_store_and_its_successor_both_have_a_majority(
    heard_ago: dict[str, float], claims: set[str], horizon_s: float, rates: list[float]
) -> None:
    """A voter claims to be without the store for as long as its own clock says, at a rate of its own."""
    clock = Clock()
    heard = {node: clock.now - ago for node, ago in heard_ago.items()}
    gate = WriteGate("n0", heard, voters=VOTERS, horizon_s=horizon_s, clock=clock)
    without = {
        node: heard_ago.get(node, 1000.0) * rate for node, rate in zip(VOTERS[1:], rates, strict=True) if node in claims
    }
    chosen, reason = successor(VOTERS, without, horizon_s=horizon_s)
    assert not (chosen is not None and gate() is None), reason
    if chosen is None:
        assert "are needed" in reason


def test_the_lowest_of_a_majority_takes_over_and_a_minority_nobody() -> None:
    lost = {"n3": 10.6, "n1": 11.0, "n4": 30.0}
    assert successor(VOTERS, lost, horizon_s=10.0) == ("n1", "3 of 5 nodes have lost the store; n1 is the lowest of them")
    many = [f"n{number}" for number in range(12)]
    assert successor(many, dict.fromkeys(many[2:], 11.0), horizon_s=10.0)[0] == "n2"
    chosen, reason = successor(VOTERS, {**lost, "n1": 10.4}, horizon_s=10.0)
    assert (chosen, reason) == (None, "2 of 5 nodes have been without the store for 10.5 s; 3 are needed")
    assert successor(("n0", "n1"), {"n1": 99.0}, horizon_s=10.0)[0] is None
    assert [majority(count) for count in (1, 2, 3, 4, 5)] == [1, 2, 2, 3, 3]


# --- leases that are held -----------------------------------------------------------------------------------


def test_a_held_lease_is_over_here_before_it_is_over_there(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served(tmp_path) as bed:
            store = await bed.client(timeout_s=0.2)
            here = Clock()
            async with hold(store, 10.0, clock=here, sleep=forever) as held:
                assert held.valid
                here.now += 9.4
                bed.clock.now += 9.4
                assert held.valid
                assert await held.keep()
                assert held.left_s == pytest.approx(9.5)
                await bed.server.stop()
                with pytest.raises(UnavailableError):
                    await held.keep()
                here.now += 9.6
                bed.clock.now += 9.6
                assert not held.valid
                assert bed.engine.keep_alive(held.id)  # the store would still have waited

    play(scene)


def test_a_lease_kept_in_the_background_lives_and_is_ended_with_its_block(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served(tmp_path) as bed:
            store = await bed.client()
            beats = asyncio.Semaphore(0)

            async def sleep(seconds: float) -> None:
                assert seconds == 1.0
                await beats.acquire()

            async with hold(store, 3.0, clock=bed.clock, sleep=sleep) as held:
                await store.put("leader", "me", lease=held.id)
                for _ in range(10):
                    bed.clock.now += 1.0
                    beats.release()
                    before = held.left_s
                    while held.left_s <= before:  # noqa: ASYNC110  (a renewal has no event)
                        await asyncio.sleep(0)
                assert await store.get("leader") is not None
            assert await store.get("leader") is None
            gone = HeldLease(store, held.id, 3.0, clock=bed.clock)
            assert not await gone.keep()
            assert gone.lost.is_set()
            assert not gone.valid

    play(scene)


async def forever(_: float) -> None:
    await asyncio.Event().wait()


def test_the_copy_is_json(tmp_path: Path) -> None:
    engine = filled(tmp_path / "a.db")
    first, state = engine.snapshot().dumps().split(b"\n", 1)
    assert json.loads(first)["magic"] == "liverun-store-1"
    assert isinstance(json.loads(state), dict)
    engine.close()
