"""Who sends which slice to whom: the boxes held before, intersected with the boxes needed after.

The planner is pure and deterministic. Every rank runs it over the same lists and gets the same assignment, so
no plan travels over the wire. The method is that of Universal Checkpointing (state under names and
coordinates that do not depend on the parallelism), applied from memory to memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from resharding.boxes import Box, Shape, overlap, subtract

DROPPABLE = ("rng/",)
"""Prefixes of keys that need no place in the new world: a stream of random numbers goes with a rank."""


class Unplannable(ValueError):  # noqa: N818 - reads as what it is
    """The new boxes cannot be filled from the old ones; the message names the key and says why."""


@dataclass(frozen=True)
class Cut:
    """A part of one piece: ``[start, start + shape)`` along each axis of the piece's own box."""

    piece: int
    """index in the rank's holding"""
    start: Shape
    shape: Shape


@dataclass(frozen=True)
class Copy:
    """A slice that this rank already holds."""

    source: Cut
    target: Cut
    nbytes: int


@dataclass(frozen=True)
class Transfer:
    """A slice that goes to ``peer`` (cut of a source piece) or comes from it (cut of a target piece)."""

    peer: int
    """rank in the bridge group"""
    cut: Cut
    nbytes: int


@dataclass(frozen=True)
class Fill:
    """A slice of a target piece that no layout has data for (more padding than before): zeros."""

    target: Cut
    nbytes: int


@dataclass
class RankPlan:
    """What one rank does. Transfers between two ranks stand in the same order in both ranks' plans."""

    rank: int
    num_ranks: int
    """size of the bridge group: members of the old world, and joiners"""
    copies: list[Copy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)
    recvs: list[Transfer] = field(default_factory=list)

    @property
    def bytes_local(self) -> int:
        """Bytes this rank copies from what it already holds."""
        return sum(copy.nbytes for copy in self.copies)

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank sends."""
        return sum(send.nbytes for send in self.sends)

    @property
    def bytes_received(self) -> int:
        """Bytes this rank receives."""
        return sum(recv.nbytes for recv in self.recvs)

    @property
    def bytes_moved(self) -> int:
        """Bytes that arrive here over the wire; summed over ranks, what crosses the wire, once each."""
        return self.bytes_received

    @property
    def bytes_sent_to(self) -> dict[int, int]:
        """Bytes to each peer, peers without any left out."""
        return _by_peer(self.sends)

    @property
    def bytes_received_from(self) -> dict[int, int]:
        """Bytes from each peer, peers without any left out."""
        return _by_peer(self.recvs)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """A whole plan in numbers, all in bytes."""

    bytes_moved: int
    """over the wire, all ranks together"""
    bytes_local: int
    """copied within ranks"""
    bytes_zeroed: int
    """new padding"""
    bytes_between_hosts: int
    """the part of ``bytes_moved`` that leaves a host"""
    most_bytes_sent: int
    """by the busiest sender"""
    most_bytes_received: int
    """by the busiest receiver"""


@dataclass(frozen=True)
class _Item:
    """One slice of one target piece, and the source piece it comes from; ``source_rank`` is -1 for zeros."""

    source_rank: int
    source_piece: int
    target_rank: int
    target_piece: int
    offset: Shape
    shape: Shape


def plan_for(
    rank: int, old: Sequence[Sequence[Box]], new: Sequence[Sequence[Box]], hosts: Sequence[str]
) -> RankPlan:
    """Return what ``rank`` does so that every element of every new box is written exactly once.

    ``old``, ``new`` and ``hosts`` are indexed by rank in the bridge group (the union of the old world's
    members and the joiners): boxes held, boxes needed, name of the host. A joiner's old list is empty, so is
    a leaver's new list.

    What a rank holds it copies locally. What it does not hold comes from one of the replicas that do, on the
    same host where there is one; among equals from the one that sends least so far. For boxes marked
    ``padded`` the global shapes of old and new may differ: what lies within both moves, what only the new one
    has becomes zeros.

    Raises ``Unplannable`` where an element has no source, a key of the old world has no place in the new one
    (but see ``DROPPABLE``), or element types or global shapes disagree; ``ValueError`` for lists of unequal
    length.
    """
    return _plans(old, new, hosts, only=[rank])[0]


def plan_all(
    old: Sequence[Sequence[Box]], new: Sequence[Sequence[Box]], hosts: Sequence[str]
) -> list[RankPlan]:
    """Return ``plan_for`` of every rank, computed once."""
    return _plans(old, new, hosts, only=range(len(old)))


def totals_of(plans: Sequence[RankPlan], hosts: Sequence[str]) -> Totals:
    """Add up the plans of all ranks."""
    return Totals(
        bytes_moved=sum(plan.bytes_moved for plan in plans),
        bytes_local=sum(plan.bytes_local for plan in plans),
        bytes_zeroed=sum(fill.nbytes for plan in plans for fill in plan.fills),
        bytes_between_hosts=sum(
            recv.nbytes for plan in plans for recv in plan.recvs if hosts[recv.peer] != hosts[plan.rank]
        ),
        most_bytes_sent=max((plan.bytes_sent for plan in plans), default=0),
        most_bytes_received=max((plan.bytes_received for plan in plans), default=0),
    )


def _by_peer(transfers: Iterable[Transfer]) -> dict[int, int]:
    sums: dict[int, int] = defaultdict(int)
    for transfer in transfers:
        sums[transfer.peer] += transfer.nbytes
    return dict(sums)


def _plans(
    old: Sequence[Sequence[Box]], new: Sequence[Sequence[Box]], hosts: Sequence[str], only: Sequence[int]
) -> list[RankPlan]:
    if not len(old) == len(new) == len(hosts):
        raise ValueError(
            f"{len(old)} old, {len(new)} new lists of boxes and {len(hosts)} hosts are not as many"
        )
    _check(old, new)
    plans = {rank: RankPlan(rank, len(old)) for rank in only}
    places = {key: _natural(key) for key in {box.key for boxes in new for box in boxes}}
    items = list(_assign(old, new, hosts))
    items.sort(key=lambda item: _order(item, places[new[item.target_rank][item.target_piece].key]))
    for item in items:
        target = new[item.target_rank][item.target_piece]
        part = target.part(item.offset, item.shape)
        into = Cut(item.target_piece, target.start_of(part), item.shape)
        receiver, sender = plans.get(item.target_rank), plans.get(item.source_rank)
        if item.source_rank < 0:
            if receiver:
                receiver.fills.append(Fill(into, part.nbytes))
            continue
        if not (receiver or sender):
            continue
        source = old[item.source_rank][item.source_piece]
        out_of = Cut(item.source_piece, source.start_of(part), item.shape)
        if item.source_rank == item.target_rank:
            if receiver:
                receiver.copies.append(Copy(out_of, into, part.nbytes))
            continue
        if sender:
            sender.sends.append(Transfer(item.target_rank, out_of, part.nbytes))
        if receiver:
            receiver.recvs.append(Transfer(item.source_rank, into, part.nbytes))
    return [plans[rank] for rank in only]


def _check(old: Sequence[Sequence[Box]], new: Sequence[Sequence[Box]]) -> None:
    """Raise ``Unplannable`` unless both sides agree on each tensor, and every old key has a place."""
    before, after = _tensors(old, "old"), _tensors(new, "new")
    for key, box in after.items():
        source = before.get(key)
        if source is None:
            raise Unplannable(f"{key}: the old world holds nothing of it")
        if source.dtype != box.dtype:
            raise Unplannable(f"{key}: is {source.dtype} in the old world, {box.dtype} in the new one")
        flexible = source.padded and box.padded and len(source.global_shape) == len(box.global_shape)
        if source.global_shape != box.global_shape and not flexible:
            raise Unplannable(
                f"{key}: has shape {source.global_shape} in the old world, {box.global_shape} in the new one"
            )
    for key in before:
        if key not in after and not key.startswith(DROPPABLE):
            raise Unplannable(f"{key}: the new world has no place for it")


def _tensors(side: Sequence[Sequence[Box]], name: str) -> dict[str, Box]:
    found: dict[str, Box] = {}
    for boxes in side:
        for box in boxes:
            first = found.setdefault(box.key, box)
            if first is not box and (first.dtype, first.global_shape, first.padded) != (
                box.dtype,
                box.global_shape,
                box.padded,
            ):
                raise Unplannable(
                    f"{box.key}: ranks of the {name} world disagree, {first.dtype} {first.global_shape} "
                    f"and {box.dtype} {box.global_shape}"
                )
    return found


def _assign(
    old: Sequence[Sequence[Box]], new: Sequence[Sequence[Box]], hosts: Sequence[str]
) -> Iterator[_Item]:
    """Choose a source for every element of every target, largest targets first so that loads come out even.

    A target is taken whole from one replica wherever one has it whole. Cutting single large tensors between
    replicas, and looking up sources by position rather than one by one, belong here once worlds have hundreds
    of ranks.
    """
    holders: dict[str, dict[int, list[tuple[int, Box]]]] = defaultdict(lambda: defaultdict(list))
    for rank, boxes in enumerate(old):
        for piece, box in enumerate(boxes):
            if box.numel:
                holders[box.key][rank].append((piece, box))
    sent_bytes = [0] * len(old)
    targets = [
        (rank, piece, box) for rank, boxes in enumerate(new) for piece, box in enumerate(boxes) if box.numel
    ]
    targets.sort(
        key=lambda target: (-target[2].nbytes, target[2].key, target[2].offset, target[0], target[1])
    )
    for rank, piece, box in targets:
        sources = holders[box.key]
        extent = next(iter(sources.values()))[0][1].global_shape if sources else ()
        missing = [(box.offset, box.shape)]
        if box.padded and extent != box.global_shape:
            real = overlap(box.offset, box.shape, (0,) * len(extent), extent)
            padding = [(box.offset, box.shape)] if real is None else subtract(box.offset, box.shape, *real)
            for offset, shape in padding:
                yield _Item(-1, -1, rank, piece, offset, shape)
            missing = [] if real is None else [real]
        left = {peer: pieces for peer, pieces in sources.items() if peer != rank}
        chosen: int | None = rank
        while missing and chosen is not None:
            for source_piece, held in sources.get(chosen, ()):
                rest: list[tuple[Shape, Shape]] = []
                for offset, shape in missing:
                    found = overlap(offset, shape, held.offset, held.shape)
                    if found is None:
                        rest.append((offset, shape))
                        continue
                    yield _Item(chosen, source_piece, rank, piece, *found)
                    if chosen != rank:
                        sent_bytes[chosen] += box.part(*found).nbytes
                    rest.extend(subtract(offset, shape, *found))
                missing = rest
            left = {peer: pieces for peer, pieces in left.items() if peer != chosen and _any(pieces, missing)}
            chosen = min(
                left,
                key=lambda peer: (hosts[peer] != hosts[rank], sent_bytes[peer], (peer - rank) % len(old)),
                default=None,
            )
        if missing:
            offset, shape = missing[0]
            raise Unplannable(
                f"{box.key}: no rank of the old world holds the elements at {offset} of shape {shape}"
            )


def _any(pieces: Sequence[tuple[int, Box]], missing: Sequence[tuple[Shape, Shape]]) -> bool:
    return any(
        overlap(offset, shape, held.offset, held.shape) is not None
        for _, held in pieces
        for offset, shape in missing
    )


def _order(item: _Item, place: tuple[object, ...]) -> tuple[object, ...]:
    """Sort by layer, then tensor, then place: the same on every rank, and a layer's state moves together."""
    return (place, item.offset, item.target_rank, item.target_piece, item.source_rank)


def _natural(key: str) -> tuple[object, ...]:
    """Split ``kind/name`` so that names come before kinds and numbers sort as numbers."""
    kind, _, name = key.rpartition("/")
    parts = re.split(r"(\d+)", name)
    return (tuple((part, 0) if i % 2 == 0 else ("", int(part)) for i, part in enumerate(parts)), kind)
