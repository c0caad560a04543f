"""What the controller keeps in the store, and its patience with a store that is away."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from launcher.events import EventLog
from launcher.leading import CONTROLLER_KEY, Leadership
from launcher.model import World
from launcher.store import Entry, Store, StoreError
from launcher.store.errors import FencedError, GateError, MovedError, UnavailableError

STORE_RETRY_S = 0.5
LEAD_RETRY_S = 0.2
GATE_QUIET_TRIES = 10
"""for which too few nodes in sight are not worth a word: those of a store just brought back are on their way"""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an earlier controller of the job has left."""

    node_ids: int
    """the number of the next node"""
    resumed: bool
    """the job had a controller before"""
    active: int | None = None
    """the generation that was active"""
    restarts: int = 0


class NotLeadingError(StoreError):
    """Nothing was written: ``controller`` is not as this controller has written it."""


class Ledger:
    """Writes what must outlive the controller, under these keys; only while ``controller`` is as it wrote it.

    So one that another has taken the place of writes nothing, however late it learns of it.

    ``generation/next``        the number the next proposal gets; taken by compare-and-set, never given twice
    ``generation/<g>/world``   layout and worker ids of a generation that was committed, and their nodes
    ``job/active``             the generation that is the job; moved by compare-and-set only: older ones are
    fenced
    ``job/id``                 the job's id; removed at its end
    ``job/restarts``           how much of the restart budget is used
    ``node/<id>``              address of a node and of its agent
    ``node/next``              the number of the next node
    ``controller``             where the controller is (:mod:`launcher.entering`)
    ``resize/last``            how the last resize went
    """

    def __init__(self, store: Store, events: EventLog, say: Callable[[str], None]) -> None:
        self.active_revision = 0
        """of ``job/active``, as this controller knows it"""
        self.leading: Leadership | None = None
        """none where there can be no other controller, or none yet"""
        self.over = False
        """another controller acts; whoever waits for a write waits for good"""
        self._store = store
        self._events = events
        self._say = say
        self._is_away = False
        self._job_revision = 0
        self._activating: str | None = None

    @property
    def leads(self) -> bool:
        """Whether this controller may act as the only one now."""
        return not self.over and (self.leading is None or self.leading.valid)

    async def leading_again(self) -> None:
        """Wait until this controller may act."""
        while not self.leads:  # noqa: ASYNC110  (a lease ends by the clock, not by an event)
            await asyncio.sleep(LEAD_RETRY_S)

    async def unchanged(self) -> Mapping[str, int] | None:
        """Return the revisions that say that no other controller has acted since; ``None`` if one has."""
        active = await self._store.get("job/active")
        job = await self._store.get("job/id")
        if active is not None and active.value == self._activating:
            self.active_revision = active.revision  # the answer was lost
        if job is None or job.revision != self._job_revision:
            return None
        if (active.revision if active is not None else 0) != self.active_revision:
            return None
        return {"job/active": self.active_revision, "job/id": self._job_revision}

    async def begin(self, job: str) -> Found:
        """Read what is there, and begin what is not. Raises ``StoreError``."""
        while True:
            try:
                return await self._begin(job)
            except NotLeadingError:
                if self.over:
                    raise
                await asyncio.sleep(LEAD_RETRY_S)

    async def _begin(self, job: str) -> Found:
        store = self._store
        if await store.get("generation/next") is None:
            await self._write({"generation/next": 0}, {"generation/next": "1"})
        active = await store.get("job/active")
        self.active_revision = active.revision if active is not None else 0
        following = await store.get("node/next")
        node_ids = int(following.value) if following is not None else 0
        known = await store.get("job/id")
        if known is None or known.value != job:
            self._job_revision = await self._write({}, {"job/id": job, "job/restarts": "0"}) or 0
            return Found(node_ids=node_ids, resumed=False)
        self._job_revision = known.revision
        restarts = await store.get("job/restarts")
        return Found(
            node_ids=node_ids, resumed=True, active=int(active.value) if active is not None else None,
            restarts=int(restarts.value) if restarts is not None else 0,
        )  # fmt: skip

    async def next_generation(self) -> int:
        """Take the next generation number. Raises ``StoreError`` for what waiting does not mend."""
        while True:
            entry = await self._patiently(lambda: self._store.get("generation/next"))
            assert entry is not None
            if await self._patiently(functools.partial(self._take, entry)):
                return int(entry.value)

    async def _take(self, entry: Entry) -> bool:
        """Take the number that an entry holds; one that was taken though no answer came is lost, and does no harm."""
        expected = {"generation/next": entry.revision}
        return await self._write(expected, {"generation/next": str(int(entry.value) + 1)}) is not None

    async def activate(self, world: World, nodes: Mapping[str, str]) -> bool:
        """Record a world as the active one; false if another generation is. ``nodes``: those of its workers."""
        value = json.dumps({"layout": world.layout.as_dict(), "ranks": list(world.ranks), "nodes": dict(nodes)})
        writes = {"job/active": str(world.generation), f"generation/{world.generation}/world": value}
        self._activating = str(world.generation)
        return await self._patiently(lambda: self._activate(world.generation, writes), whatever=True)

    async def _activate(self, generation: int, writes: Mapping[str, str]) -> bool:
        """Move ``job/active``; also true if an earlier try had done it, whose answer was lost."""
        revision = await self._write({"job/active": self.active_revision}, writes)
        if revision is None:
            now = await self._store.get("job/active")
            if now is None or now.value != str(generation):
                return False
            revision = now.revision
        self.active_revision = revision
        self._store.generation = generation
        await self._store.fence(generation)
        return True

    async def _write(self, expected: Mapping[str, int], writes: Mapping[str, str]) -> int | None:
        """Compare and set, as the controller. Raises ``NotLeadingError``."""
        if self.leading is None:
            return await self._store.compare_and_set(expected, writes)
        mine = self.leading.revision
        revision = await self._store.compare_and_set({**expected, CONTROLLER_KEY: mine}, writes)
        if revision is None:
            now = await self._store.get(CONTROLLER_KEY)
            if not expected or now is None or now.revision != mine or mine != self.leading.revision:
                raise NotLeadingError("this agent's lease as the controller is over")
        return revision

    async def put(self, key: str, value: Mapping[str, Any] | int) -> None:
        """Write what is of use to people and to a later controller, but nothing waits for."""
        await self._patiently(lambda: self._write({}, {key: json.dumps(value)}), whatever=True)

    async def _patiently(self, ask: Callable[[], Awaitable[T]], *, whatever: bool = False) -> T:
        """Ask the store until it answers; the training goes on meanwhile.

        Raises ``StoreError`` for what waiting does not mend, unless ``whatever`` it is has to be done.
        """
        tries = 0
        while True:
            try:
                answer = await ask()
            except StoreError as error:
                if not whatever and not isinstance(error, UnavailableError | GateError | NotLeadingError):
                    raise
                if self.over or isinstance(error, MovedError | FencedError):
                    await asyncio.Event().wait()  # this controller's time is over
                if not self._is_away and (tries >= GATE_QUIET_TRIES or not isinstance(error, GateError)):
                    self._is_away = True
                    self._say(f"the store does not take what has to be written ({error}); the training goes on")
                    self._events.write("store_away", 0, str(error), {})
                await asyncio.sleep(STORE_RETRY_S)
                tries += 1
                continue
            if self._is_away:
                self._is_away = False
                self._say("the store is back")
                self._events.write("store_back", 0, "the store is back", {})
            return answer
