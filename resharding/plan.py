"""Who sends which slice to whom: the boxes held before, intersected with the boxes needed after.

The planner is pure and deterministic. Every rank runs it over the same lists and gets the same assignment, so
no plan travels over the wire. The method is that of Universal Checkpointing (state under names and
coordinates that do not depend on the parallelism), applied from memory to memory.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from resharding.assign import DROPPABLE, Item, PieceOf, Unplannable, assign, layer_of, natural
from resharding.boxes import DTYPE_SIZES_BYTES, Box, Shape
from resharding.listing import Listing
from resharding.order import Layer, order_of_layers

__all__ = [
    "DROPPABLE",
    "Copy",
    "Cut",
    "Fill",
    "RankPlan",
    "Totals",
    "Transfer",
    "Unplannable",
    "plan_all",
    "plan_for",
    "totals_of",
]

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
    source_layers: tuple[int, ...] = ()
    """of each source piece: when its layer moves, if layers move one by one; see ``order``"""
    target_layers: tuple[int, ...] = ()
    """of each target piece"""

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


Boxes = Sequence[Sequence[Box]] | Sequence[Listing]
"""What every rank holds or needs: all boxes, or a description they follow from (see ``listing.exchange``)."""


def plan_for(
    rank: int, old: Boxes, new: Boxes, hosts: Sequence[str]
) -> RankPlan:
    """Return what ``rank`` does so that every element of every new box is written exactly once.

    ``old``, ``new`` and ``hosts`` are indexed by rank in the bridge group (the union of the old world's
    members and the joiners): boxes held, boxes needed, name of the host. A joiner's old list is empty, so is
    a leaver's new list. Lists of boxes do for small worlds; with the listings of ``listing.exchange`` a rank of
    thousands plans in a second.

    What a rank holds it copies locally. What it does not hold comes from the replicas that do, on the same host
    where there are any; they share it so that their loads come out even. For boxes marked
    ``padded`` the global shapes of old and new may differ: what lies within both moves, what only the new one
    has becomes zeros.

    Raises ``Unplannable`` where an element has no source, a key of the old world has no place in the new one
    (but see ``DROPPABLE``), or element types or global shapes disagree; ``ValueError`` for lists of unequal
    length.
    """
    return _plans(old, new, hosts, only=[rank])[0]


def plan_all(
    old: Boxes, new: Boxes, hosts: Sequence[str]
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


def _plans(old: Boxes, new: Boxes, hosts: Sequence[str], only: Sequence[int]) -> list[RankPlan]:
    if not len(old) == len(new) == len(hosts):
        raise ValueError(
            f"{len(old)} old, {len(new)} new lists of boxes and {len(hosts)} hosts are not as many"
        )
    before, after = _listings(old), _listings(new)
    found = assign(before, after, hosts, only)
    order = order_of_layers(before, after)
    plans = {
        rank: RankPlan(
            rank,
            len(old),
            source_layers=_layers(before[rank], order),
            target_layers=_layers(after[rank], order),
        )
        for rank in only
    }
    sources = {rank: _bases(before[rank]) for rank in only}
    targets = {rank: _bases(after[rank]) for rank in only}
    for item, kind in _ordered(found.items):
        tensor = item.unit[kind]
        nbytes = math.prod(item.shape) * DTYPE_SIZES_BYTES[tensor.dtype]
        receiver, sender = plans.get(item.target_rank), plans.get(item.source_rank)
        into = out_of = None
        if receiver:
            base = targets[item.target_rank][item.target.position]
            into = _cut(item.target, base + kind, item)
        if sender:
            held = _holding(found.held[item.source_rank][item.unit], item)
            out_of = _cut(held, sources[item.source_rank][held.position] + kind, item)
        if item.source_rank < 0:
            if receiver and into:
                receiver.fills.append(Fill(into, nbytes))
        elif item.source_rank == item.target_rank:
            if receiver and into and out_of:
                receiver.copies.append(Copy(out_of, into, nbytes))
        else:
            if sender and out_of:
                sender.sends.append(Transfer(item.target_rank, out_of, nbytes))
            if receiver and into:
                receiver.recvs.append(Transfer(item.source_rank, into, nbytes))
    return [plans[rank] for rank in only]


def _listings(side: Boxes) -> list[Listing]:
    return [boxes if isinstance(boxes, Listing) else Listing.explicit(boxes) for boxes in side]


def _layers(listing: Listing, order: Mapping[Layer, int]) -> tuple[int, ...]:
    return tuple(
        order[layer_of(tensor.key)]
        for block, index in listing.entries
        for unit in block.rows([index]).unit.tolist()
        for tensor in block.units[unit]
    )


def _bases(listing: Listing) -> list[int]:
    """Return the index of each block's first piece."""
    counts = (block.num_boxes(index) for block, index in listing.entries)
    return [0, *itertools.accumulate(counts)]


def _cut(piece: PieceOf, base: int, item: Item) -> Cut:
    start = tuple(i - o for i, o in zip(item.offset, piece.offset, strict=True))
    return Cut(base + piece.first, start, item.shape)


def _holding(pieces: Sequence[PieceOf], item: Item) -> PieceOf:
    """Return the first piece that an item lies within."""
    return next(
        piece
        for piece in pieces
        if all(
            o <= i and i + n <= o + m
            for o, m, i, n in zip(piece.offset, piece.shape, item.offset, item.shape, strict=True)
        )
    )


def _ordered(items: Iterable[Item]) -> list[tuple[Item, int]]:
    """Sort by layer, then tensor, then place: the same on every rank, and a layer's state moves together."""
    rows = [(item, kind) for item in items for kind in range(len(item.unit))]
    places = {tensor.key: natural(tensor.key) for unit in {item.unit for item, _ in rows} for tensor in unit}

    def order(row: tuple[Item, int]) -> tuple[object, ...]:
        item, kind = row
        place = places[item.unit[kind].key]
        target = item.target
        return (place, item.offset, item.target_rank, target.position, target.first, item.source_rank)

    return sorted(rows, key=order)
