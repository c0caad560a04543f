"""PREPARING, inside one worker: build the next world beside the present one.

In a thread of its own, while the training thread trains: the bridge, the next world's groups, the next model stack
(hollow), and the plan of what goes from whom to whom. Nothing the training thread can see changes.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from liverun import fence, groups, rng
from liverun.changes import Choice, Room, agree
from liverun.hollow import Hollow
from liverun.late import LateState, split
from liverun.memory import available_bytes
from liverun.messages import Member, Prepare
from liverun.reasons import in_short
from liverun.world import Training, World
from resharding import boxes, listing, megatron
from resharding.pages import is_disjoint
from resharding.plan import RankPlan, plan_for

Build = Callable[[World], Training]


@dataclass(kw_only=True)
class Standing:
    """A world this worker has built, with its share of it: what is needed to train in it and to leave it again."""

    world: World
    globals: fence.Globals
    training: Training
    holding: boxes.Holding
    """where every piece of model and optimizer state lies in this rank's memory"""


@dataclass(kw_only=True)
class Next:
    """Everything that is ready for one change of world."""

    spec: Prepare
    bridge: fence.Globals
    standing: Standing | None
    """none for a worker that leaves"""
    plan: RankPlan
    source: boxes.Holding
    target: boxes.Holding
    outgoing: dict[str, torch.Tensor]
    """where this rank's random streams are laid out to be sent; filled at the boundary"""
    incoming: dict[str, torch.Tensor]
    """where the streams of this rank's new role arrive; empty where streams are seeded anew"""
    choice: Choice
    """how the state moves: what all members have agreed on"""
    late: LateState | None
    """the part of the state that moves after the commit"""
    touched_bytes: int
    """memory of the new stack that the system has found already, beside the training"""
    prepare_s: float

    def give_up_bridge(self) -> None:
        """Close the bridge's connections, so that nobody waits for this member any longer."""
        fence.destroy(self.bridge.groups)
        self.bridge.default_pg = None

    @property
    def late_moved(self) -> int:
        """Bytes that this rank receives after the commit."""
        return self.late.plan.bytes_received if self.late else 0

    @property
    def late_local(self) -> int:
        """Bytes that this rank copies after the commit."""
        return self.late.plan.bytes_local if self.late else 0

    def discard(self) -> None:
        """Give back everything that was built for the change."""
        self.give_up_bridge()
        if self.late is not None:
            self.late.give_up()
        if self.standing is not None:
            megatron.let_go(self.standing.training.model)
            fence.destroy(self.standing.globals.groups)


def _touch(holding: boxes.Holding) -> int:
    """Let the operating system find the pages now, beside the training, rather than in the pause.

    For an old state that is kept until the commit: the pages are needed beside it in any case. Where they could be
    short, they are left to the moment they are written. Returns the bytes written.
    """
    views = [view for view in _storages(holding).values() if view.device.type == "cpu"]
    num_bytes: int = sum(view.untyped_storage().nbytes() for view in views)
    if num_bytes > available_bytes() // 4:
        return 0
    for view in views:
        torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()).zero_()
    return num_bytes


def _storages(holding: boxes.Holding) -> dict[int, torch.Tensor]:
    return {view.untyped_storage().data_ptr(): view for view in (piece.view() for piece in holding.pieces)}


def _room(host: str, source: boxes.Holding, target: boxes.Holding) -> Room:
    """Say what the new state takes here, and whether the old one can make room for it layer by layer.

    Weights tell: optimizer state, which may not exist before the first step, is made anew for every world.
    """
    weights = boxes.Holding.of([piece for piece in source.pieces if piece.box.key.startswith("weight/")])
    old, new = _storages(weights), _storages(target)
    on_host = all(view.device.type == "cpu" for view in (*old.values(), *new.values()))
    frees = on_host and not old.keys() & new.keys() and is_disjoint(weights)
    return Room(host=host, needed_bytes=target.nbytes, available_bytes=available_bytes(), frees=frees)


def names_of(training: Training) -> dict[str, list[str]]:
    """Return by what names the small state of a world is found in another one."""
    parts = [f"extra[{name!r}]" for name in training.extra]
    if training.scheduler is not None:
        parts.append("scheduler")
    return {"parts": sorted(parts), "groups": sorted(megatron.group_names(training.optimizer))}


def check_names(olds: Sequence[dict[str, list[str]] | None], news: Sequence[dict[str, list[str]] | None]) -> None:
    """Raise ``ValueError`` unless small state has the same names in both worlds; ``None`` for who is not in one.

    Every member has the same lists, so all of them say the same, before anything moves.
    """
    before, after = ([one for one in side if one is not None] for side in (olds, news))
    parts = [frozenset(one["parts"]) for one in (*before, *after)]
    if differing := frozenset[str]().union(*parts) - parts[0].intersection(*parts):
        raise ValueError(
            f"{', '.join(sorted(differing))} is there on some ranks or in one of the worlds only; build() has to "
            "give every rank of every world the same scheduler and extra state"
        )
    known = set().union(*(one["groups"] for one in before))
    if missing := set().union(*(one["groups"] for one in after)) - known:
        raise ValueError(f"no state for parameter group {min(missing)}; the old world has {sorted(known)}")


def moves_streams(spec: Prepare, present: World | None) -> bool:
    """Whether random streams move with the role: layout and size are the same before and after."""
    old_size = sum(member.old_rank is not None for member in spec.members)
    return old_size == spec.world_size and (present is None or present.layout == spec.layout)


class Preparation:
    """One attempt to prepare a generation, in a thread. Ends with ``on_ready`` or ``on_failed``, never both."""

    def __init__(
        self,
        spec: Prepare,
        *,
        worker: str,
        build: Build,
        present: Standing | None,
        device: torch.device,
        wish: Choice,
        on_ready: Callable[[Next], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        self.spec = spec
        self._wish = wish
        self._worker = worker
        self._build = build
        self._present = present
        self._device = device
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._deciding = threading.Lock()
        self._dropped = False
        self._ready: Next | None = None
        self._discarding: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=f"liverun-prepare-{spec.generation}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def drop(self) -> None:
        """Give everything back: now if it is ready, else as soon as the thread gets there. Does not block."""
        with self._deciding:
            self._dropped = True
            ready, self._ready = self._ready, None
        if ready is not None:
            self._discarding = threading.Thread(target=ready.discard, name="liverun-discard", daemon=True)
            self._discarding.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until nothing of this attempt runs any more; its own time-outs bound it, or ``timeout_s``."""
        self._thread.join(timeout_s)
        if self._discarding is not None:
            self._discarding.join(timeout_s)

    def take(self) -> Next:
        """Hand over what is ready; from here on it is the caller's."""
        with self._deciding:
            ready, self._ready = self._ready, None
        assert ready is not None, "Go came for a generation that is not ready"
        return ready

    def _run(self) -> None:
        made: list[fence.Globals] = []
        built: list[Training] = []
        try:
            ready = self._prepare(made, built)
        except Exception as error:  # noqa: BLE001 - whatever a script's build raises must not end the training
            for training in built:
                megatron.let_go(training.model)
            for there in made:
                fence.destroy(there.groups)
            with self._deciding:
                dropped = self._dropped
            if not dropped:
                self._on_failed(self.spec.generation, in_short(error))
            return
        with self._deciding:
            if not self._dropped:
                self._ready = ready
        if self._ready is None:
            ready.discard()
        else:
            self._on_ready(ready)

    def _prepare(self, made: list[fence.Globals], built: list[Training]) -> Next:
        started = time.perf_counter()
        spec, device = self.spec, self._device
        limit = timedelta(seconds=spec.timeout_s)
        place, me = next((i, m) for i, m in enumerate(spec.members) if m.worker == self._worker)
        store = groups.connect_store(spec.store_host, spec.store_port, timeout=limit)
        bridge = groups.open_bridge(
            store, generation=spec.generation, rank=place, size=len(spec.members), device=device, timeout=limit
        )
        made.append(bridge)
        present = self._present
        with_streams = moves_streams(spec, present.world if present else None)
        standing = None
        if me.rank is not None:
            there = fence.new_globals(spec.generation)
            made.append(there)
            standing = self._build_beside(spec, me, there, store)
            built.append(standing.training)
        outgoing: dict[str, torch.Tensor] = {}
        incoming: dict[str, torch.Tensor] = {}
        source = present.holding if present else boxes.Holding.of([])
        target = standing.holding if standing else boxes.Holding.of([])
        if me.old_rank is not None:
            outgoing = {name: torch.empty_like(state) for name, state in rng.capture().items()}
            source = boxes.Holding.of([*source.pieces, *stream_pieces(outgoing, me.old_rank)])
        # every member has to ask the same question: a joiner cannot know the layout that was, so rank 0 says
        said = groups.allgather_json(
            bridge.default_pg,
            {
                "streams": {name: len(state) for name, state in outgoing.items()} if with_streams else {},
                "wish": self._wish.as_dict(),
                "room": _room(me.host, source, target).as_dict(),
                "old": names_of(present.training) if present else None,
                "new": names_of(standing.training) if standing else None,
            },
            device,
        )
        check_names([one["old"] for one in said], [one["new"] for one in said])
        choice = agree([Choice(**one["wish"]) for one in said], [Room(**one["room"]) for one in said])
        touched_bytes = _touch(standing.holding) if standing and choice.keeps else 0
        names = [one["streams"] for one in said]
        late_source = late_target = boxes.Holding.of([])
        if choice.defer == "optimizer":
            source, late_source = split(source)
            target, late_target = split(target)
        if me.rank is not None:
            role = next((i for i, m in enumerate(spec.members) if m.old_rank == me.rank), None)
            sizes = names[role] if role is not None and all(_old(names, spec)) else {}
            incoming = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
            target = boxes.Holding.of([*target.pieces, *stream_pieces(incoming, me.rank)])

        def plan(source: boxes.Holding, target: boxes.Holding) -> RankPlan:
            old, new = listing.exchange(
                lambda data: groups.allgather_bytes(bridge.default_pg, data, device), place,
                listing.listing_of(source), listing.listing_of(target),
            )
            return plan_for(place, old, new, [member.host for member in spec.members])

        late = None
        if choice.defer == "optimizer":
            late_bridge = groups.open_bridge(
                store, generation=spec.generation, rank=place, size=len(spec.members), device=device, timeout=limit,
                name="late",
            )
            made.append(late_bridge)
            late = LateState(
                bridge=late_bridge, plan=plan(late_source, late_target), source=late_source, target=late_target,
                choice=choice, device=device, generation=spec.generation,
            )
        made_plan = plan(source, target)
        return Next(
            spec=spec, bridge=bridge, standing=standing, plan=made_plan, source=source, target=target,
            outgoing=outgoing, incoming=incoming, choice=choice, late=late, touched_bytes=touched_bytes,
            prepare_s=time.perf_counter() - started,
        )

    def _build_beside(self, spec: Prepare, me: Member, there: fence.Globals, store: object) -> Standing:
        assert me.rank is not None
        groups.open_world(
            there, layout=spec.layout, device=self._device, timeout=timedelta(seconds=spec.timeout_s), store=store,
            rank=me.rank, size=spec.world_size,
        )
        world = world_of(spec, me, self._device, rng.Seeding())
        hollow = Hollow()
        with fence.seen_by_this_thread(there):
            with hollow:
                training = self._build(world)
                megatron.materialize_optimizer_state(training.optimizer, empty=True)
            holding = megatron.holding_of(training.model, training.optimizer)
            hollow.check_buffers(training.model, (piece.view() for piece in holding.pieces))
        return Standing(world=world, globals=there, training=training, holding=holding)


def world_of(spec: Prepare, me: Member, device: torch.device, streams: rng.Seeding) -> World:
    """Return the ``World`` that ``spec`` describes, as ``me`` sees it."""
    assert me.rank is not None
    return World(
        generation=spec.generation, rank=me.rank, world_size=spec.world_size, local_rank=me.local_rank,
        local_world_size=me.local_world_size, node_rank=me.node_rank, layout=spec.layout, device=device,
        streams=streams,
    )


def _old(names: list[dict[str, int]], spec: Prepare) -> list[bool]:
    return [bool(sizes) for sizes, member in zip(names, spec.members, strict=True) if member.old_rank is not None]


def stream_pieces(streams: dict[str, torch.Tensor], role: int) -> list[boxes.Piece]:
    """Return the random streams of a rank's role as pieces, so that they move and are saved like tensors."""
    return [
        boxes.Piece(
            boxes.Box(f"rng/{role}/{name}", "uint8", (len(state),), (0,), (len(state),)),
            functools.partial(_itself, state),
        )
        for name, state in streams.items()
    ]


def _itself(state: torch.Tensor) -> torch.Tensor:
    return state
