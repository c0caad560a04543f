"""Random concurrent histories: is there one order of the calls that explains every answer?

Each seed runs a few clients that get, put, remove and compare-and-set a few keys at random, noting when each call
began and ended. The checker (Wing and Gong's search, with Lowe's memory of states seen) looks for an order that
agrees with real time and with a plain dictionary.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from store_bed import Clock, EmbeddedBed, open_bed, served

from launcher.store import Store
from launcher.store.engine import Engine

KEYS = ("a", "b")

class Call(NamedTuple):
    began: int
    ended: int
    what: str
    args: tuple[Any, ...]
    answer: Any


def step(state: dict[str, tuple[str, int]], revision: int, call: Call) -> tuple[dict[str, Any], int] | None:
    """The state after a call, or ``None`` if it could not have given its answer here."""
    if call.what == "get":
        return (state, revision) if state.get(call.args[0]) == call.answer else None
    expected, writes = call.args
    matches = all((state[key][1] if key in state else 0) == number for key, number in expected.items())
    if not matches:
        return (state, revision) if call.answer is None else None
    changed = {key: value for key, value in writes.items() if value is not None or key in state}
    if call.answer is None or (changed and call.answer <= revision):
        return None
    number = call.answer if changed else revision
    after = dict(state)
    for key, value in changed.items():
        if value is None:
            after.pop(key)
        else:
            after[key] = (value, number)
    return after, number


def linearizable(calls: list[Call]) -> bool:
    """Whether one order explains all answers."""
    seen: set[tuple[frozenset[int], Any]] = set()
    stack: list[tuple[frozenset[int], dict[str, Any], int]] = [(frozenset(range(len(calls))), {}, -1)]
    while stack:
        left, state, revision = stack.pop()
        if not left:
            return True
        mark = (left, tuple(sorted(state.items())))
        if mark in seen:
            continue
        seen.add(mark)
        first_end = min(calls[index].ended for index in left)
        for index in left:
            if calls[index].began > first_end:
                continue
            after = step(state, revision, calls[index])
            if after is not None:
                stack.append((left - {index}, *after))
    return False


async def history(clients: list[Store], seed: int, steps: int) -> list[Call]:
    dice = random.Random(seed)
    now = itertools.count()
    calls: list[Call] = []

    async def one(store: Store, dice: random.Random) -> None:
        known: dict[str, int] = {}
        for number in range(steps):
            key = dice.choice(KEYS)
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
            began = next(now)
            if dice.random() < 0.4:
                entry = await store.get(key)
                known[key] = entry.revision if entry else 0
                answer = (entry.value, entry.revision) if entry else None
                calls.append(Call(began, next(now), "get", (key,), answer))
                continue
            keys = KEYS if dice.random() < 0.3 else (key,)
            value = None if dice.random() < 0.2 else f"{seed}.{began}.{number}"
            writes = dict.fromkeys(keys, value)
            expected = {name: known.get(name, 0) for name in keys} if dice.random() < 0.7 else {}
            answer = await store.compare_and_set(expected, writes)
            if answer is not None:
                known.update(dict.fromkeys(keys, 0 if value is None else answer))
            calls.append(Call(began, next(now), "write", (expected, writes), answer))

    await asyncio.gather(*(one(store, random.Random(dice.random())) for store in clients))
    return calls


@pytest.mark.parametrize("block", range(4))
def test_two_hundred_random_histories_over_the_network_are_linearizable(tmp_path: Path, block: int) -> None:
    async def scene() -> None:
        async with served(tmp_path) as bed:
            clients: list[Store] = [await bed.client() for _ in range(4)]
            won = 0
            for seed in range(block * 50, block * 50 + 50):
                calls = await history(clients, seed, steps=6)
                assert linearizable(calls), f"seed {seed}: {calls}"
                won += sum(call.what == "write" and call.answer is not None for call in calls)
                await clients[0].compare_and_set({}, dict.fromkeys(KEYS))
            assert won > 150

    asyncio.run(scene())


def test_histories_with_connections_cut_in_their_midst_are_linearizable(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served(tmp_path) as bed:
            clients: list[Any] = [await bed.client() for _ in range(4)]
            for seed in range(1000, 1015):
                dice = random.Random(seed)

                async def cut(dice: random.Random) -> None:
                    for _ in range(4):
                        await asyncio.sleep(dice.random() * 0.01)
                        for session in list(bed.server._sessions):
                            if dice.random() < 0.5:
                                transport = session._ws._req.transport  # type: ignore[union-attr]
                                if transport is not None:
                                    transport.abort()

                cutting = asyncio.create_task(cut(dice))
                calls = await history(clients, seed, steps=6)
                await cutting
                assert linearizable(calls), f"seed {seed}: {calls}"
                await clients[0].compare_and_set({}, dict.fromkeys(KEYS))

    asyncio.run(scene())


@pytest.mark.parametrize("kind", ["embedded", "etcd"])
def test_histories_on_the_other_stores_are_linearizable(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    async def scene(**more: Any) -> None:
        async with open_bed(kind, tmp_path, **more) as bed:
            clients = [await bed.client() for _ in range(4)]
            for seed in range(2000, 2020):
                calls = await history(clients, seed, steps=6)
                assert linearizable(calls), f"seed {seed}: {calls}"
                await clients[0].compare_and_set({}, dict.fromkeys(KEYS))

    more = {"etcd": request.getfixturevalue("etcd")} if kind == "etcd" else {}
    asyncio.run(scene(**more))


def test_the_checker_sees_a_stale_read_a_lost_write_and_a_write_done_twice() -> None:
    wrote = Call(0, 1, "write", ({}, {"a": "1"}), 1)
    assert linearizable([wrote, Call(2, 3, "get", ("a",), ("1", 1))])
    assert linearizable([wrote, Call(0, 3, "get", ("a",), None)])
    assert not linearizable([wrote, Call(2, 3, "get", ("a",), None)])
    assert not linearizable([wrote, Call(2, 3, "get", ("a",), ("1", 2))])
    both = [Call(2, 5, "write", ({"a": 1}, {"a": text}), number) for text, number in (("x", 2), ("y", 3))]
    assert not linearizable([wrote, *both])


def test_a_store_that_reads_before_others_writes_are_in_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checker and the histories together are sharp enough to see a cache that is one write behind."""
    true = Engine.get
    stale: dict[str, Any] = {}

    def late(engine: Engine, key: str) -> Any:
        found = stale.get(key)
        stale[key] = true(engine, key)
        return found

    monkeypatch.setattr(Engine, "get", late)

    async def scene() -> bool:
        bed = EmbeddedBed(tmp_path, Clock())
        clients = [await bed.client() for _ in range(4)]
        fine = all([linearizable(await history(clients, seed, steps=6)) for seed in range(5)])
        await bed.close()
        return fine

    assert not asyncio.run(scene())
