"""Which messages two ranks exchange, of which slices, and when; both ends work it out alone and alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from resharding.boxes import Holding
from resharding.plan import Copy, Fill, RankPlan, Transfer
from resharding.staging import aligned

DIRECT_BYTES = 256 * 1024
"""A slice of at least this size is a message of its own, and skips staging where it lies contiguous."""
FIRST_LAYER = 0
"""The turn of the layer that moves first, over all ranks."""
Slot = tuple[int, int, int]
"""Layer, number of the message between its two ranks, and how far apart they are: the order of all messages."""
_LAST = 2**62
"""Messages of digests count from here: they come after all others of their layer."""
DIGEST_BYTES = 8


@dataclass(frozen=True)
class Part:
    """Elements ``[first, last)`` of a transfer's slice, at byte ``at`` of a message."""

    transfer: Transfer
    first: int
    last: int
    at: int
    nbytes: int
    number: int
    """of the parts between these two ranks"""


@dataclass(frozen=True)
class Message:
    """What goes to a peer, or comes from it, in one piece."""

    peer: int
    parts: tuple[Part, ...]
    nbytes: int
    digests: tuple[int, int] | None = None
    """in place of parts: which digests of the pair"""


class Layers:
    """What belongs to which layer, layers in the order in which they move; with ``keep`` all is one layer."""

    def __init__(self, plan: RankPlan, *, keep: bool) -> None:
        self._of_source = [0] * len(plan.source_layers) if keep else plan.source_layers
        self._of_target = [0] * len(plan.target_layers) if keep else plan.target_layers
        self.fills: dict[int, list[Fill]] = defaultdict(list)
        self.copies: dict[int, list[Copy]] = defaultdict(list)
        self.sources: dict[int, list[int]] = defaultdict(list)
        self.targets: dict[int, list[int]] = defaultdict(list)
        for fill in plan.fills:
            self.fills[self._of_target[fill.target.piece]].append(fill)
        for copy in plan.copies:
            self.copies[self._of_target[copy.target.piece]].append(copy)
        for layers, found in ((self._of_source, self.sources), (self._of_target, self.targets)):
            for piece, layer in enumerate(layers):
                found[layer].append(piece)
        self.order = sorted({FIRST_LAYER, *self._of_source, *self._of_target})

    def of(self, transfer: Transfer, *, is_send: bool) -> int:
        """Return the layer of a transfer."""
        return (self._of_source if is_send else self._of_target)[transfer.cut.piece]


def slots_with(
    plan: RankPlan,
    transfers: Sequence[Transfer],
    holding: Holding,
    chunk_bytes: int,
    layers: Layers,
    *,
    sign: int,
) -> dict[Slot, Message]:
    """Cut the transfers with each peer into messages and give each its slot; ``sign`` is -1 to receive."""
    by_peer: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_peer[layers.of(transfer, is_send=sign > 0), transfer.peer].append(transfer)
    numbers: dict[int, int] = defaultdict(int)
    slots = {}
    for layer, peer in sorted(by_peer):
        messages = _messages(peer, by_peer[layer, peer], holding, chunk_bytes, numbers[peer])
        for index, message in enumerate(messages):
            slots[layer, index, sign * (peer - plan.rank) % plan.num_ranks] = message
            numbers[peer] += len(message.parts)
    return slots


def _messages(
    peer: int, transfers: Sequence[Transfer], holding: Holding, chunk_bytes: int, number: int
) -> Iterator[Message]:
    """Cut one pair's transfers into messages of at most ``chunk_bytes``, from sizes alone.

    Parts are numbered from ``number`` on.
    """
    shared: list[Part] = []
    filled = 0
    for transfer in transfers:
        itemsize = holding.pieces[transfer.cut.piece].box.itemsize_bytes
        numel = transfer.nbytes // itemsize
        room = chunk_bytes // itemsize
        if transfer.nbytes >= DIRECT_BYTES or transfer.nbytes * 2 > chunk_bytes:  # messages of its own
            for first in range(0, numel, room):
                last = min(first + room, numel)
                yield _message(peer, [Part(transfer, first, last, 0, (last - first) * itemsize, number)])
                number += 1
            continue
        if filled + transfer.nbytes > chunk_bytes:
            yield _message(peer, shared)
            shared, filled = [], 0
        shared.append(Part(transfer, 0, numel, filled, transfer.nbytes, number))
        number += 1
        filled = aligned(filled + transfer.nbytes)
    if shared:
        yield _message(peer, shared)


def _message(peer: int, parts: Sequence[Part]) -> Message:
    return Message(peer, tuple(parts), parts[-1].at + parts[-1].nbytes)


def digest_slots(
    plan: RankPlan, layer: int, peer: int, count: int, chunk_bytes: int, *, sign: int
) -> dict[Slot, Message]:
    """Return the messages with the digests of one pair and layer, in slots after all others of the layer."""
    room = chunk_bytes // DIGEST_BYTES
    found = {}
    for index, first in enumerate(range(0, count, room)):
        last = min(first + room, count)
        slot = (layer, _LAST + index, sign * (peer - plan.rank) % plan.num_ranks)
        found[slot] = Message(peer, (), (last - first) * DIGEST_BYTES, (first, last))
    return found
