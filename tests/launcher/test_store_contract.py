"""What every store promises, run on each implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.store import Change, EmbeddedStore, Store

Open = Callable[[], EmbeddedStore]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["embedded"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Store]:
    opened = EmbeddedStore(tmp_path / "store.db", clock=clock)
    yield opened
    opened.close()


def test_every_write_has_a_new_revision_and_an_absent_key_is_none(store: Store) -> None:
    async def scene() -> None:
        assert await store.get("a") is None
        first = await store.put("a", "1")
        second = await store.put("b", "2")
        assert 0 < first < second
        entry = await store.get("a")
        assert entry is not None
        assert (entry.value, entry.revision) == ("1", first)
        assert [entry.key for entry in await store.list("")] == ["a", "b"]
        assert [entry.key for entry in await store.list("b")] == ["b"]

    asyncio.run(scene())


def test_compare_and_set_writes_all_or_nothing(store: Store) -> None:
    async def scene() -> None:
        active = await store.put("job/active", "1")
        assert await store.compare_and_set({"job/active": active + 1}, {"job/active": "9", "x": "9"}) is None
        assert await store.get("x") is None
        won = await store.compare_and_set({"job/active": active, "x": 0}, {"job/active": "2", "x": "2"})
        assert won is not None
        assert await store.compare_and_set({"job/active": active}, {"job/active": "3"}) is None
        assert [entry.revision for entry in await store.list("")] == [won, won]
        assert await store.compare_and_set({"x": won}, {"x": None}) is not None
        assert await store.get("x") is None

    asyncio.run(scene())


def test_of_many_that_want_the_same_number_each_gets_its_own(store: Store) -> None:
    async def take() -> int:
        while True:
            entry = await store.get("next")
            assert entry is not None
            await asyncio.sleep(0)
            if await store.compare_and_set({"next": entry.revision}, {"next": str(int(entry.value) + 1)}):
                return int(entry.value)

    async def scene() -> None:
        await store.put("next", "1")
        taken = await asyncio.gather(*(take() for _ in range(20)))
        assert sorted(taken) == list(range(1, 21))

    asyncio.run(scene())


def test_a_lease_that_is_not_kept_alive_takes_its_keys_with_it(store: Store, clock: Clock) -> None:
    async def scene() -> None:
        lease = await store.grant(10.0)
        await store.put("node/n1", "here", lease=lease)
        clock.now += 9
        assert await store.keep_alive(lease)
        clock.now += 9
        assert await store.get("node/n1") is not None
        clock.now += 1
        assert await store.get("node/n1") is None
        assert not await store.keep_alive(lease)
        with pytest.raises(KeyError):
            await store.put("node/n1", "again", lease=lease)
        other = await store.grant(10.0)
        await store.put("node/n2", "here", lease=other)
        await store.revoke(other)
        assert await store.list("node/") == []

    asyncio.run(scene())


def test_a_watch_sees_every_change_after_its_revision_in_order(store: Store, clock: Clock) -> None:
    async def scene() -> None:
        before = await store.put("a/1", "old")
        await store.put("a/2", "two")
        await store.put("b/1", "elsewhere")
        watch = store.watch("a/", before)
        assert (await anext(watch)).value == "two"
        coming = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        assert not coming.done()
        lease = await store.grant(5.0)
        revision = await store.put("a/3", "three", lease=lease)
        assert await coming == Change(key="a/3", value="three", revision=revision)
        clock.now += 5
        await store.list("")
        assert (await anext(watch)).value is None

    asyncio.run(scene())


def test_nothing_is_forgotten_when_the_store_is_opened_again(tmp_path: Path, clock: Clock) -> None:
    async def scene() -> None:
        first = EmbeddedStore(tmp_path / "store.db", clock=clock)
        revision = await first.put("job/active", "7")
        lease = await first.grant(10.0)
        await first.put("node/n1", "here", lease=lease)
        clock.now += 9
        first.close()
        again = EmbeddedStore(tmp_path / "store.db", clock=clock)
        entry = await again.get("job/active")
        assert entry is not None
        assert (entry.value, entry.revision) == ("7", revision)
        assert await again.put("x", "") > revision + 1
        clock.now += 9  # a restart never shortens a lease
        assert await again.get("node/n1") is not None
        again.close()

    asyncio.run(scene())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans(), st.booleans()),
        min_size=1,
        max_size=20,
    )
)
def test_the_store_agrees_with_a_dictionary(steps: list[tuple[str, int, bool, bool]]) -> None:
    async def scene() -> None:
        store = EmbeddedStore(Path(":memory:"), clock=Clock())
        model: dict[str, tuple[str, int]] = {}
        for key, number, remove, guess_right in steps:
            expected = model.get(key, ("", 0))[1] if guess_right else number + 1_000
            revision = await store.compare_and_set({key: expected}, {key: None if remove else str(number)})
            assert (revision is not None) == guess_right
            if revision is not None:
                model.pop(key, None)
                if not remove:
                    model[key] = (str(number), revision)
        assert {entry.key: (entry.value, entry.revision) for entry in await store.list("")} == model
        store.close()

    asyncio.run(scene())
