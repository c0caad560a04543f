"""What every store promises, run on each implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_bed import Bed, Clock, open_bed

from launcher.store import Change, EmbeddedStore, limits
from launcher.store.errors import AheadError, FencedError, LimitError

Scene = Callable[[Bed], Awaitable[None]]
Play = Callable[[Scene], None]
SOON_S = 10.0


@pytest.fixture(params=["embedded", "served", "served-tls", "etcd"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Run a scene on a fresh store of each kind."""
    kind = request.param
    more = {}
    if kind == "etcd":
        more["etcd"] = request.getfixturevalue("etcd")
    if kind == "served-tls":
        more["tls"] = request.getfixturevalue("tls")

    def run(scene: Scene) -> None:
        async def whole() -> None:
            async with asyncio.timeout(30.0), open_bed(kind, tmp_path, **more) as bed:
                await scene(bed)

        asyncio.run(whole())

    return run


def test_every_write_has_a_new_revision_and_an_absent_key_is_none(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
        assert await store.get("a") is None
        first = await store.put("a", "1")
        second = await store.put("b", "2")
        assert 0 < first < second
        entry = await store.get("a")
        assert entry is not None
        assert (entry.value, entry.revision) == ("1", first)
        assert [entry.key for entry in await store.list("")] == ["a", "b"]
        assert [entry.key for entry in await store.list("b")] == ["b"]
        listing = await store.scan("a")
        assert (listing.revision, [entry.value for entry in listing.entries]) == (second, ["1"])

    play(scene)


def test_what_one_client_wrote_another_reads_at_once(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        writer, reader = await bed.client(), await bed.client()
        for number in range(20):
            revision = await writer.put("k", str(number))
            entry = await reader.get("k")
            assert entry is not None
            assert (entry.value, entry.revision) == (str(number), revision)

    play(scene)


def test_any_text_comes_back_as_it_was(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
        texts = ["", " ", "\0\n\r\t", '"\\', "é漢\U0001f600", "x" * limits.MAX_VALUE_BYTES, "{}[]"]
        for number, text in enumerate(texts):
            await store.put(f"schlüssel/{number} ü", text)
        assert [entry.value for entry in await store.list("schlüssel/")] == texts

    play(scene)


def test_a_prefix_is_taken_literally(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
        for key in ("a", "a/", "a/1", "a0", "b%", "b_", "bx", "ÿ", "\U0010ffff", "\U0010ffff1"):
            await store.put(key, "")
        assert [entry.key for entry in await store.list("a/")] == ["a/", "a/1"]
        assert [entry.key for entry in await store.list("b%")] == ["b%"]
        assert [entry.key for entry in await store.list("\U0010ffff")] == ["\U0010ffff", "\U0010ffff1"]
        assert len(await store.list("")) == 10

    play(scene)


def test_compare_and_set_writes_all_or_nothing(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
        active = await store.put("job/active", "1")
        assert await store.compare_and_set({"job/active": active + 1}, {"job/active": "9", "x": "9"}) is None
        assert await store.get("x") is None
        won = await store.compare_and_set({"job/active": active, "x": 0}, {"job/active": "2", "x": "2"})
        assert won is not None
        assert await store.compare_and_set({"job/active": active}, {"job/active": "3"}) is None
        assert [entry.revision for entry in await store.list("")] == [won, won]
        assert await store.compare_and_set({"x": won}, {"x": None}) is not None
        assert await store.get("x") is None
        assert await store.compare_and_set({"x": 0}, {"x": "again"}) is not None

    play(scene)


def test_removing_what_is_not_there_changes_nothing(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
        before = await store.put("a", "1")
        assert await store.compare_and_set({}, {"absent": None}) == before
        after = await store.compare_and_set({}, {"a": "2", "absent": None})
        watch = store.watch("", before)
        assert await anext(watch) == Change(key="a", value="2", revision=after or 0)
        await store.put("end", "")
        assert (await anext(watch)).key == "end"
        await watch.aclose()  # type: ignore[attr-defined]

    play(scene)


def test_of_many_that_want_the_same_number_each_gets_its_own(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        clients = [await bed.client() for _ in range(4)]

        async def take(number: int) -> int:
            store = clients[number % len(clients)]
            while True:
                entry = await store.get("next")
                assert entry is not None
                await asyncio.sleep(0)
                if await store.compare_and_set({"next": entry.revision}, {"next": str(int(entry.value) + 1)}):
                    return int(entry.value)

        await clients[0].put("next", "1")
        taken = await asyncio.gather(*(take(number) for number in range(20)))
        assert sorted(taken) == list(range(1, 21))

    play(scene)


def test_a_lease_that_is_not_kept_alive_takes_its_keys_with_it(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
        lease = await store.grant(3.0)
        before = await store.put("node/n1", "here", lease=lease)
        await store.put("node/free", "here", lease=lease)
        await store.put("node/free", "stays")  # written again without the lease
        watch = store.watch("node/n1", before)
        await bed.lapse(2.0)
        assert await store.keep_alive(lease)
        await bed.lapse(2.0)
        assert await store.get("node/n1") is not None
        await bed.lapse(2.0)
        assert (await asyncio.wait_for(anext(watch), SOON_S)).value is None
        assert await store.get("node/n1") is None
        assert await store.get("node/free") is not None
        assert not await store.keep_alive(lease)
        with pytest.raises(KeyError, match="has ended"):
            await store.put("node/n1", "again", lease=lease)
        assert await store.get("node/n1") is None
        await watch.aclose()  # type: ignore[attr-defined]

    play(scene)


def test_a_revoked_lease_takes_its_keys_at_once_and_may_be_revoked_again(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
        lease = await store.grant(60.0)
        before = await store.put("node/n2", "here", lease=lease)
        await store.compare_and_set({"node/n2": before}, {"node/n3": "here", "node/n4": "here"}, lease=lease)
        await store.revoke(lease)
        assert await store.list("node/") == []
        await store.revoke(lease)
        assert not await store.keep_alive(lease)
        assert not await store.keep_alive(12345)

    play(scene)


def test_a_watch_sees_every_change_after_its_revision_in_order(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
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
        await store.revoke(lease)
        removed = await anext(watch)
        assert (removed.key, removed.value) == ("a/3", None)
        assert removed.revision > revision
        await watch.aclose()  # type: ignore[attr-defined]

    play(scene)


def test_keys_written_together_come_together_and_the_last_is_marked(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
        before = (await store.scan("")).revision
        one = await store.compare_and_set({}, {"a/1": "x", "b/1": "x", "a/2": "x"})
        two = await store.put("a/3", "x")
        watch = store.watch("a/", before)
        seen = [await anext(watch) for _ in range(3)]
        assert [(change.key, change.revision, change.last) for change in seen] == [
            ("a/1", one, False), ("a/2", one, True), ("a/3", two, True),
        ]  # fmt: skip
        await watch.aclose()  # type: ignore[attr-defined]

    play(scene)


def test_watches_of_several_clients_see_all_writes_of_all_without_gap_or_repeat(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        clients = [await bed.client() for _ in range(3)]
        before = (await clients[0].scan("")).revision

        async def write(number: int) -> None:
            for step in range(15):
                await clients[number].put(f"w/{number}", str(step))

        async def read(number: int) -> list[tuple[str, str | None, int]]:
            seen = []
            watch = clients[number].watch("w/", before)
            async for change in watch:
                seen.append((change.key, change.value, change.revision))
                if len(seen) == 45:
                    break
            await watch.aclose()  # type: ignore[attr-defined]
            return seen

        reads = [asyncio.create_task(read(number)) for number in range(3)]
        await asyncio.gather(*(write(number) for number in range(3)))
        seen = await asyncio.gather(*reads)
        assert seen[0] == seen[1] == seen[2]
        revisions = [revision for _, _, revision in seen[0]]
        assert revisions == sorted(set(revisions))
        for number in range(3):
            assert [value for key, value, _ in seen[0] if key == f"w/{number}"] == [str(n) for n in range(15)]

    play(scene)


def test_a_watch_from_a_revision_that_never_was_is_refused(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
        revision = await store.put("a", "1")
        with pytest.raises(AheadError, match="list again"):
            await anext(store.watch("", revision + 1000))

    play(scene)


def test_a_fenced_writer_writes_nothing_and_still_reads(play: Play) -> None:
    async def scene(bed: Bed) -> None:
        old, new, free = await bed.client(3), await bed.client(4), await bed.client()
        held = await old.put("job/active", "3")
        await new.fence(4)
        await new.fence(2)  # never goes back
        for attempt in (
            old.put("job/active", "stale"),
            old.compare_and_set({"job/active": held}, {"job/active": "stale"}),
            old.fence(9),
        ):
            with pytest.raises(FencedError, match="generation 3 is over; 4 is active"):
                await attempt
        entry = await old.get("job/active")
        assert entry is not None
        assert entry.revision == held
        assert await new.compare_and_set({"job/active": held}, {"job/active": "4"}) is not None
        await free.put("free", "")
        old.generation = 4
        await old.put("caught up", "")

    play(scene)


@pytest.mark.parametrize(
    ("expected", "writes"),
    [
        ({}, {}),
        ({}, {"": "x"}),
        ({}, {"k" * (limits.MAX_KEY_BYTES + 1): "x"}),
        ({}, {"k\0": "x"}),
        ({}, {"k": "v" * (limits.MAX_VALUE_BYTES + 1)}),
        ({}, {"k": "\ud800"}),
        ({}, {f"k{number}": "" for number in range(limits.MAX_KEYS_PER_WRITE + 1)}),
        ({}, {f"k{number}": "v" * limits.MAX_VALUE_BYTES for number in range(5)}),
        ({"k": -1}, {"k": "v"}),
    ],
    ids=["none", "no key", "long key", "zero", "long value", "surrogate", "many", "large", "negative"],
)
def test_what_is_too_large_or_malformed_is_refused(
    play: Play, expected: dict[str, int], writes: dict[str, str]
) -> None:
    async def scene(bed: Bed) -> None:
        store = await bed.client()
        with pytest.raises(LimitError):
            await store.compare_and_set(expected, writes)
        for ttl_s in (0.0, -1.0, float("nan"), float("inf"), 1e9):
            with pytest.raises(LimitError):
                await store.grant(ttl_s)
        assert await store.list("") == []
        await store.put("k", "fine")

    play(scene)


# --- the embedded store alone -------------------------------------------------------------------------------


def test_nothing_is_forgotten_when_the_store_is_opened_again(tmp_path: Path) -> None:
    async def scene() -> None:
        clock = Clock()
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
