"""One controller at a time in a store that no agent carries: who stood still or was cut off leads anew, or gives way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from store_bed import Bed, Clock, open_bed, served

from launcher.events import EventLog
from launcher.leading import CONTROLLER_KEY, Leadership, claim
from launcher.ledger import Ledger, NotLeadingError
from launcher.model import World
from launcher.store.errors import FencedError
from launcher.store.lease import HeldLease
from liverun.layout import Layout

TTL_S = 3.0
Scene = Callable[[Bed], Awaitable[None]]


@pytest.fixture(params=["embedded", "served", "etcd"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scene], None]:
    """Run a scene on a fresh store of each kind."""
    more = {"etcd": request.getfixturevalue("etcd")} if request.param == "etcd" else {}

    def run(scene: Scene) -> None:
        async def whole() -> None:
            async with asyncio.timeout(30.0), open_bed(request.param, tmp_path, **more) as bed:
                await scene(bed)

        asyncio.run(whole())

    return run


class Agent:
    """What a controller has of the store: the right to lead, and the ledger."""

    def __init__(self, store: Any, leading: Leadership, folder: Path) -> None:
        self.store, self.leading = store, leading
        self.ledger = Ledger(store, EventLog(folder / "events.jsonl", lambda: 0.0, trouble=print), lambda _: None)
        self.ledger.leading = leading
        self.news = 0
        self._turns, self._asleep = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self._kept: asyncio.Task[None] | None = None

    async def keeps(self) -> bool:
        """Let it look once; false once it gives way."""
        if self._kept is None:
            self._kept = asyncio.create_task(self.leading.keep(self.ledger.unchanged, self._back, sleep=self._sleep))
            await self._asleep.acquire()
        self._turns.release()
        asleep = asyncio.create_task(self._asleep.acquire())
        await asyncio.wait({asleep, self._kept}, return_when=asyncio.FIRST_COMPLETED)
        asleep.cancel()
        return not self._kept.done()

    async def _sleep(self, seconds: float) -> None:
        assert seconds == TTL_S / 3
        self._asleep.release()
        await self._turns.acquire()

    def _back(self) -> None:
        self.news += 1

    async def close(self) -> None:
        if self._kept is not None:
            self._kept.cancel()
            await asyncio.gather(self._kept, return_exceptions=True)


async def agent(bed: Bed, name: str, clock: Clock, folder: Path) -> Agent | None:
    store = await bed.client()
    leading = await claim(store, name, TTL_S, clock=clock)
    return None if leading is None else Agent(store, leading, folder)


def world(generation: int) -> World:
    return World(generation=generation, layout=Layout(), ranks=("w0",))


def test_a_leader_that_stood_still_leads_anew_and_writes_nothing_meanwhile(
    play: Callable[[Scene], None], tmp_path: Path
) -> None:
    async def scene(bed: Bed) -> None:
        here = Clock()
        one = await agent(bed, "one", here, tmp_path)
        assert one is not None
        assert await agent(bed, "two", here, tmp_path) is None
        await one.ledger.begin("job")
        assert await one.ledger.activate(world(await one.ledger.next_generation()), {"w0": "n0"})
        assert await one.keeps()
        here.now += TTL_S + 1
        await bed.lapse(TTL_S + 1)
        assert not one.ledger.leads
        with pytest.raises(NotLeadingError):
            await one.ledger._write({}, {"node/next": "7"})
        with pytest.raises(NotLeadingError):
            await one.ledger._activate(9, {"job/active": "9"})
        assert await one.keeps()
        assert one.ledger.leads
        assert one.news == 1
        assert await agent(bed, "two", here, tmp_path) is None
        assert await one.ledger.activate(world(await one.ledger.next_generation()), {"w0": "n0"})
        active = await one.store.get("job/active")
        assert active is not None
        assert active.value == "2"
        await one.leading.resign(over=True)
        assert [entry.key for entry in await one.store.list("") if entry.key in (CONTROLLER_KEY, "job/id")] == []
        await one.close()

    play(scene)


@pytest.mark.parametrize(
    ("play", "then"),
    [
        ("served", "leads"), ("served", "has ended the job"), ("served", "is gone again"),
        ("embedded", "leads"), ("etcd", "leads"),
    ],
    indirect=["play"],
)  # fmt: skip
def test_a_leader_that_another_has_led_after_gives_way_and_can_write_nothing(
    play: Callable[[Scene], None], tmp_path: Path, then: str
) -> None:
    """A write that was on its way when the process stood still fails as well, though its own clock stood still too."""

    async def scene(bed: Bed) -> None:
        here = Clock()
        one = await agent(bed, "one", here, tmp_path)
        assert one is not None
        await one.ledger.begin("job")
        await one.ledger.activate(world(await one.ledger.next_generation()), {"w0": "n0"})
        assert await one.keeps()
        await bed.lapse(TTL_S + 1)
        two = await agent(bed, "two", here, tmp_path)
        assert two is not None
        assert (await two.ledger.begin("job")).active == 1
        assert one.ledger.leads  # by what it knows
        for attempt in (
            one.ledger._activate(2, {"job/active": "2"}), one.ledger._write({}, {"job/restarts": "9"}),
        ):  # fmt: skip
            with pytest.raises(NotLeadingError):
                await attempt
        assert await two.ledger.activate(world(await two.ledger.next_generation()), {"w0": "n1"})
        late = await bed.client(generation=1)
        with pytest.raises(FencedError):
            await late.put("node/next", "9")
        if then != "leads":
            await two.leading.resign(over=then == "has ended the job")
        assert not await one.keeps()
        with pytest.raises((NotLeadingError, FencedError)):
            await one.ledger._write({}, {"job/restarts": "9"})
        active = await two.store.get("job/active")
        assert active is not None
        assert active.value == "2"
        found = await two.store.get(CONTROLLER_KEY)
        assert (found.value if found is not None else None) == ("two" if then == "leads" else None)
        await one.close()

    play(scene)


def test_a_world_whose_record_was_not_confirmed_does_not_look_like_anothers(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served(tmp_path) as bed:
            here = Clock()
            one = await agent(bed, "one", here, tmp_path)
            assert one is not None
            await one.ledger.begin("job")
            written = asyncio.create_task(one.ledger.activate(world(1), {"w0": "n0"}))
            while await one.store.get("job/active") is None:  # noqa: ASYNC110  (it stops right after the write)
                await asyncio.sleep(0)
            written.cancel()  # its answer never comes
            await asyncio.gather(written, return_exceptions=True)
            one.ledger.active_revision = 0
            await bed.lapse(TTL_S + 1)
            assert await one.keeps()
            assert one.ledger.active_revision > 0
            await one.close()

    asyncio.run(scene())


def test_a_lease_that_ends_while_it_is_renewed_anew_leaves_the_controller_to_others(tmp_path: Path) -> None:
    """Of two that find it free at once only one has it."""

    async def scene() -> None:
        async with served(tmp_path) as bed:
            here = Clock()
            one = await agent(bed, "one", here, tmp_path)
            assert one is not None
            await one.ledger.begin("job")
            await bed.lapse(TTL_S + 1)
            others: list[Agent | None] = []

            async def unchanged() -> Mapping[str, int] | None:
                others.append(await agent(bed, "two", here, tmp_path))  # between its look and its write
                return await one.ledger.unchanged()

            assert not await one.leading._regain(unchanged)
            assert others[0] is not None
            found = await one.store.get(CONTROLLER_KEY)
            assert found is not None
            assert found.value == "two"
            assert isinstance(others[0].leading._lease, HeldLease)
            assert await others[0].leading._lease.keep()

    asyncio.run(scene())
