"""The embedded store goes to another agent, or is brought back there: never do two of them write."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from store_bed import HOST, JOB, TOKEN, Bytes

from launcher import doors as doors_module
from launcher.controller import Controller
from launcher.doors import doors
from launcher.entering import open_door
from launcher.entry import Entry
from launcher.events import EventLog
from launcher.model import HandOver, JobState, Node
from launcher.options import Meeting
from launcher.orders import DoorsOpen, OpenDoors, Order, TakeOver
from launcher.store import EmbeddedStore
from launcher.store.client import RemoteStore
from launcher.store.engine import Engine
from launcher.store.errors import GateError, MovedError
from launcher.store.link import Place
from launcher.store.snapshot import Snapshot
from launcher.succession import Chosen, Succession

HORIZON_S = 5.0


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(30.0):
            await scene()

    asyncio.run(whole())


class Leading:
    """What an agent that carries the store opens to the others."""

    def __init__(self, folder: Path, **entry: Any) -> None:
        self.own = EmbeddedStore(folder / "store.db", clock=time.monotonic)
        events = EventLog(folder / "events.jsonl", time.time, trouble=print)
        node = Node(id="n0", host=HOST, nproc=1, standbys=0, pin=None, arrived=0, leads=True)
        self.controller = Controller(
            JobState(nodes={"n0": node}), job="job", store=self.own, events=events, say=lambda _: None
        )
        self.entry = Entry(
            job="job", host=HOST, token=TOKEN, name=JOB, listener=open_door(HOST), door=open_door(HOST), term=1, **entry
        )  # fmt: skip
        assert self.entry.listener is not None
        self.place = Place(*self.entry.listener.getsockname()[:2])

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        meeting = Meeting(min_nodes=1, max_nodes=3, host=HOST, port=0, lost_after_s=HORIZON_S)
        try:
            async with doors(self.controller, self.entry, self.own, meeting, own_name="a", patience_s=1.0):
                yield
        finally:
            self.own.close()


def test_a_handover_that_nobody_confirms_leaves_one_store_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor serves, and its word of that is lost on the way."""
    monkeypatch.setattr(doors_module, "HANDOVER_S", 0.2)
    served: list[Engine] = []

    async def scene() -> None:
        first = Leading(tmp_path)

        def successor(order: Order) -> None:
            if isinstance(order, OpenDoors):
                first.controller.heard("n1", DoorsOpen(host=HOST, store_port=1, port=2))
            if isinstance(order, TakeOver):
                copy = Snapshot.loads(order.copy.encode())
                served.append(Engine.restore(tmp_path / "n1.db", copy, term=order.term, clock=time.monotonic))

        async with first.opened():
            first.controller.world_changed(1, ["b", "c"])
            first.controller.reach("n1", successor)
            assert first.controller.on_hand_over is not None
            await first.controller.on_hand_over(HandOver(node="n1", leaver="n0", reason="drain", wish=None))
            served[0].write({}, {"generation/next": "7"})
            with pytest.raises(MovedError):
                first.own.engine.write({}, {"generation/next": "7"})
            assert first.controller.ended.is_set()
            served[0].close()
        assert first.controller.end is not None
        assert first.controller.end.outcome == "left"
        assert "the controller is on node n1, which has not confirmed it" in (tmp_path / "events.jsonl").read_text()

    play(scene)


def test_a_store_that_was_brought_back_writes_only_with_half_of_the_last_worlds_nodes_in_sight(tmp_path: Path) -> None:
    """Cut off before its first world, it does nothing: the others can bring the store back once more."""

    async def scene() -> None:
        back = Leading(tmp_path, voters=("gone", "a", "b", "c"))
        async with back.opened():
            with pytest.raises(GateError, match="1 of 4 nodes in sight within 5 s; 2 are needed"):
                await back.own.put("a", "1")
            other = RemoteStore([back.place], TOKEN, job=JOB, node="b", role="agent", random=Bytes())
            assert await other.get("a") is None
            while back.own.engine.gate() is not None:  # noqa: ASYNC110  (an answer to a beat has no event)
                await asyncio.sleep(0.01)
            await back.own.put("a", "1")
            back.controller.world_changed(2, ["a"])
            back.controller.world_known(2, "a")
            assert back.own.engine.gate() is None
            await other.aclose()

    play(scene)


class Silent:
    """A client of a store that is gone."""

    term = 1
    places = (Place(HOST, 1),)
    silent_s = 99.0

    def relocate(self, place: Place, *, term: int) -> None:
        """Listen to no earlier term."""


@pytest.mark.parametrize(("worlds", "chosen"), [((2, 2, 2), True), ((2, 2, 3), False), ((3, 2, 2), True)])
def test_who_knows_of_a_later_world_does_not_help_one_that_counts_by_a_former(
    worlds: tuple[int, int, int], chosen: bool
) -> None:
    async def scene() -> None:
        names = ("b", "c", "d")
        open_doors = {name: open_door(HOST) for name in names}
        nodes = {
            f"n{number}": {"host": HOST, "agent": name, "peers": open_doors[name].getsockname()[1] if name in names else 0}
            for number, name in enumerate("abcde")
        }  # fmt: skip
        peers = []
        for name, world in zip(names, worlds, strict=True):
            store: Any = Silent()
            peer = Succession(
                store, TOKEN, job=JOB, agent=name, horizon_s=HORIZON_S,
                voters=lambda world=world: (world, nodes), generation=lambda: 7,
            )  # fmt: skip
            await peer.listen(HOST, listener=open_doors[name])
            peers.append(peer)
        found = await peers[0].look()
        if chosen:
            assert isinstance(found, Chosen)
            assert (found.term, found.generation, found.voters) == (2, 7, tuple("abcde"))
        else:
            assert found is None
        assert [await peer.look() for peer in itertools.islice(peers, 1, None)] == [None, None]  # not the lowest
        for peer in peers:
            await peer.stop()

    play(scene)
