"""Move the bytes of a plan: local copies, then chunks through bounded staging buffers.

Protocol between ``N`` ranks that run ``execute`` with plans of the same assignment and the same
``staging_bytes``:

1. The transfers from ``s`` to ``t`` are cut into messages. Both ends do so alone and alike, since both see
   the same list of sizes: small slices share a message, a large one has messages of its own.
2. Message ``k`` from ``s`` to ``t`` belongs to slot ``(k, (t - s) mod N)``. In a slot a rank sends at most
   one message and receives at most one. Slots are passed in ascending order.
3. At most ``WINDOW`` slots are under way on a rank, and only as many as find room in the staging; before one more
   starts, the first has ended and is unpacked. So the packing of one slot overlaps the wire of those before.

No pattern can hang: of all unfinished messages, the one in the lowest slot has been posted by both its ends,
since all they wait for lies in lower slots. Within a slot, operations are posted in the order of the sending
rank, so this also holds for a transport that runs them strictly one after the other.

With ``keep=False`` layers move one after the other, in the plan's order and on all ranks alike: slots are
``(layer, k, (t - s) mod N)``, all of a layer have ended on a rank before it begins with the next, and then the
layer's sources are given back. Before the first of them is, every rank has moved and checked the first layer, and
asks once whether that is to be.

With ``verify``, the digest of everything sent is taken as it is sent, and of everything received as it then lies in
the state; in slots after all others of the layer the senders' digests follow, and each receiver compares.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from resharding.boxes import Holding, flat_range_boxes
from resharding.coverage import check_coverage
from resharding.plan import Cut, RankPlan
from resharding.slots import DIGEST_BYTES, FIRST_LAYER, Layers, Message, Part, Slot, digest_slots, slots_with
from resharding.staging import ALIGN_BYTES, Staging, aligned
from resharding.transport import Transport, Work
from resharding.verify import Checks, Verify

NUM_CHUNKS = 4
"""The staging holds two of the largest messages to send, and two that arrive."""
WINDOW = 16
"""Slots under way at most."""


@dataclass(frozen=True, kw_only=True)
class StreamReport:
    """What one rank's ``execute`` did."""

    bytes_moved: int
    """received over the wire, without padding"""
    bytes_sent: int
    """sent over the wire, without padding"""
    bytes_local: int
    """copied from what this rank held"""
    staging_bytes: int
    """allocated for staging, at most what was allowed"""
    num_messages: int
    """sent and received"""
    num_direct: int
    """of these, sent from or received into the state's own storage"""
    local_s: float
    """time for local copies"""
    wire_s: float
    """time for everything else"""
    verify_s: float = 0.0
    """the part of both that went into digests and comparing"""
    bytes_verified: int = 0
    """received or copied, and compared with what was sent"""

    @property
    def seconds(self) -> float:
        """Time in all."""
        return self.local_s + self.wire_s


def execute(
    plan: RankPlan,
    source: Holding,
    target: Holding,
    transport: Transport,
    staging_bytes: int,
    *,
    verify: Verify = "full",
    keep: bool = True,
    claim: Callable[[int], object] | None = None,
    before_release: Callable[[], object] | None = None,
    release: Callable[[int], object] | None = None,
) -> StreamReport:
    """Write every target piece of this rank, and serve the others; all ranks of the plan call it together.

    ``source`` and ``target`` are the holdings the plan was made from. Sources are only read. At most
    ``staging_bytes`` are allocated here, send and receive sides together, on the transport's device; nothing
    else is. ``staging_bytes`` has to be the same on every rank. Slices that are contiguous where they lie
    skip staging. ``verify``, also the same on every rank, compares what arrived with what was sent: all of it, a
    sample of one slice in ``SAMPLE``, or nothing.

    Without ``keep``, the same on every rank once more, layers move one by one, in an order that suits all ranks
    (see ``order``): ``claim`` is called with the index of a target piece before its layer is written, ``release``
    with that of a source piece once its last reader, here or elsewhere, has it. If storage is given back there (see
    ``pages.PageReturner``), a rank holds no more than the larger of its two states, the largest layer and the
    staging; and from the first release on there is no way back. So ``before_release`` is called once on every rank,
    also on one that holds nothing, after the layer that is the first of all has moved and before anything is
    released: ranks may vote there. What it raises ends the stream with every source whole.

    Raises ``ValueError`` for less staging than 64 bytes, and before anything moves ``NotCovered`` if the plan does
    not write each element of ``target`` exactly once; ``Damaged`` after everything, or without ``keep`` the layer,
    has moved; and whatever the transport raises. The target is then undefined, and the source untouched but for what
    was released. Transfers posted before stay posted, so the transport's group has to be given up.
    """
    chunk_bytes = staging_bytes // NUM_CHUNKS // ALIGN_BYTES * ALIGN_BYTES
    if chunk_bytes < ALIGN_BYTES:
        raise ValueError(f"staging of {staging_bytes} bytes is less than {NUM_CHUNKS * ALIGN_BYTES}")
    started = time.perf_counter()
    check_coverage(plan, [piece.box for piece in target.pieces])
    checks = Checks(verify)
    local_s = 0.0
    layers = Layers(plan, keep=keep)
    with torch.no_grad():
        wire = _Wire(
            plan, source, target, transport, chunk_bytes=chunk_bytes, checks=checks, layers=layers
        )
        for layer in layers.order:
            copying = time.perf_counter()
            if claim is not None:
                for piece in layers.targets[layer]:
                    claim(piece)
            for fill in layers.fills[layer]:
                _slice(target, fill.target).zero_()
            for copy in layers.copies[layer]:
                there, here = _slice(target, copy.target), _slice(source, copy.source)
                there.copy_(here)
                checks.copied(copy, here, there, target.pieces[copy.target.piece].box)
            local_s += time.perf_counter() - copying
            wire.run(layer)
            checks.raise_if_damaged()
            if layer == FIRST_LAYER and not keep and before_release is not None:
                before_release()
            if release is not None:
                for piece in layers.sources[layer]:
                    release(piece)
    return StreamReport(
        bytes_moved=plan.bytes_received,
        bytes_sent=plan.bytes_sent,
        bytes_local=plan.bytes_local,
        staging_bytes=wire.allocated_bytes,
        num_messages=wire.num_messages,
        num_direct=wire.num_direct,
        local_s=local_s,
        wire_s=time.perf_counter() - started - local_s,
        verify_s=checks.seconds,
        bytes_verified=checks.num_bytes,
    )


@dataclass(frozen=True)
class _UnderWay:
    """A slot whose operations are posted."""

    works: tuple[Work, ...]
    received: Message | None
    data: torch.Tensor | None
    """where it arrives"""
    is_packed: bool
    """what is sent lies in the staging"""
    is_staged: bool
    """what arrives lies in the staging, and is still to be unpacked"""


class _Wire:
    """The slots of one rank, run in order with a few of them under way."""

    def __init__(
        self,
        plan: RankPlan,
        source: Holding,
        target: Holding,
        transport: Transport,
        *,
        chunk_bytes: int,
        checks: Checks,
        layers: Layers,
    ) -> None:
        self._rank = plan.rank
        self._source = source
        self._target = target
        self._transport = transport
        self._checks = checks
        self._sends = slots_with(plan, plan.sends, source, chunk_bytes, layers, sign=1)
        self._recvs = slots_with(plan, plan.recvs, target, chunk_bytes, layers, sign=-1)
        self.num_messages = len(self._sends) + len(self._recvs)
        for messages, is_send, sign in ((self._sends, True, 1), (self._recvs, False, -1)):
            for (layer, *_), message in messages.items():
                checks.plan(layer, message.peer, message.parts, is_send=is_send)
            for (layer, peer, sends), count in checks.num_digests.items():
                if sends == is_send:
                    messages.update(digest_slots(plan, layer, peer, count, chunk_bytes, sign=sign))
        self._out, self._in = (
            Staging(min(2 * chunk_bytes, sum(aligned(sent.nbytes) for sent in messages.values())), transport.device)
            for messages in (self._sends, self._recvs)
        )
        self.allocated_bytes = self._out.num_bytes + self._in.num_bytes
        self.num_direct = 0
        self._by_layer: dict[int, list[Slot]] = defaultdict(list)
        for slot in sorted(self._sends.keys() | self._recvs.keys()):
            self._by_layer[slot[0]].append(slot)
        self._digests: dict[int, list[int]] = defaultdict(list)

    def run(self, layer: int) -> None:
        """Pass every slot of a layer, and compare what arrived with what was sent."""
        self._checks.next_layer()
        self._digests.clear()
        under_way: deque[_UnderWay] = deque()
        for slot in self._by_layer[layer]:
            if len(under_way) == WINDOW:
                self._finish(under_way.popleft())
            under_way.append(self._post(self._sends.get(slot), self._recvs.get(slot), under_way))
        while under_way:
            self._finish(under_way.popleft())
        for peer, digests in self._digests.items():
            self._checks.compare(peer, digests)

    def _post(self, sent: Message | None, received: Message | None, under_way: deque[_UnderWay]) -> _UnderWay:
        """Start what a slot sends and receives; slots under way are finished until there is room for it."""
        outgoing = incoming = None
        is_packed = is_staged = False
        if sent is not None:
            outgoing = self._direct(self._source, sent)
            is_packed = outgoing is None
            if outgoing is None:
                outgoing = self._room(self._out, sent, under_way)
            self._pack(sent, outgoing, is_packed=is_packed)
        if received is not None:
            incoming = self._direct(self._target, received)
            is_staged = incoming is None
            if incoming is None:
                incoming = self._room(self._in, received, under_way)
        works: list[Work] = []
        sends_first = received is None or self._rank < received.peer
        for is_send in (sends_first, not sends_first):
            if is_send and sent is not None and outgoing is not None:
                works.append(self._transport.isend(outgoing, sent.peer))
            elif not is_send and received is not None and incoming is not None:
                works.append(self._transport.irecv(incoming, received.peer))
        return _UnderWay(tuple(works), received, incoming, is_packed, is_staged)

    def _room(self, staging: Staging, message: Message, under_way: deque[_UnderWay]) -> torch.Tensor:
        while (room := staging.take(message.nbytes)) is None:
            self._finish(under_way.popleft())
        return room

    def _direct(self, holding: Holding, message: Message) -> torch.Tensor | None:
        """Return the message as bytes of the state's own storage, or ``None`` where they do not lie so."""
        if len(message.parts) != 1:  # several slices, or digests
            return None
        part = message.parts[0]
        tensor = _slice(holding, part.transfer.cut)
        if not tensor.is_contiguous() or tensor.device != self._transport.device:
            return None
        self.num_direct += 1
        at = tensor.storage_offset() + part.first  # view(-1) would keep an odd stride of an axis of size 1
        return tensor.as_strided((part.last - part.first,), (1,), at).view(torch.uint8)

    def _pack(self, message: Message, data: torch.Tensor, *, is_packed: bool) -> None:
        """Gather a message into ``data``, unless it lies there as it is, and take its digests."""
        if message.digests is not None:
            numbers = self._checks.digests_for(message.peer)[slice(*message.digests)]
            raw = b"".join(number.to_bytes(DIGEST_BYTES, "little") for number in numbers)
            data.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
            return
        for part in message.parts:
            if is_packed:
                for staged, live in _mapped(data, part, self._source):
                    staged.copy_(live)
            if self._checks.wants(part):
                box = self._source.pieces[part.transfer.cut.piece].box
                self._checks.sent(message.peer, part, box, data[part.at : part.at + part.nbytes])

    def _finish(self, slot: _UnderWay) -> None:
        """Wait for a slot, scatter what arrived in the staging, and give its room back."""
        for work in slot.works:
            work.wait()
        if slot.is_packed:
            self._out.give_back()
        if slot.received is not None and slot.data is not None:
            self._unpack(slot.received, slot.data, is_staged=slot.is_staged)
            if slot.is_staged:
                self._in.give_back()

    def _unpack(self, message: Message, data: torch.Tensor, *, is_staged: bool) -> None:
        if message.digests is not None:
            raw = bytes(data.tolist())
            numbers = (raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES))
            self._digests[message.peer].extend(int.from_bytes(number, "little") for number in numbers)
            return
        for part in message.parts:
            if is_staged:
                for staged, live in _mapped(data, part, self._target):
                    live.copy_(staged)
            if self._checks.wants(part):
                if is_staged:  # read back what lies in the state now
                    for staged, live in _mapped(data, part, self._target):
                        staged.copy_(live)
                box = self._target.pieces[part.transfer.cut.piece].box
                self._checks.arrived(message.peer, part, box, data[part.at : part.at + part.nbytes])


def _slice(holding: Holding, cut: Cut) -> torch.Tensor:
    """Return the live tensor of a cut; raises ``RuntimeError`` if the piece has changed its shape or type."""
    piece = holding.pieces[cut.piece]
    tensor = piece.view()
    if tuple(tensor.shape) != piece.box.shape or str(tensor.dtype) != f"torch.{piece.box.dtype}":
        raise RuntimeError(
            f"{piece.box.key}: storage is {tensor.dtype} {tuple(tensor.shape)} now, "
            f"the plan was made for {piece.box.dtype} {piece.box.shape}"
        )
    for axis, (start, size) in enumerate(zip(cut.start, cut.shape, strict=True)):
        if size != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, size)
    return tensor


def _mapped(
    buffer: torch.Tensor, part: Part, holding: Holding
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of equal shape: a place in the staging buffer, and the live elements that belong there."""
    live = _slice(holding, part.transfer.cut)
    staged = buffer[part.at : part.at + part.nbytes].view(live.dtype)
    shape = part.transfer.cut.shape
    if part.last - part.first == math.prod(shape):
        yield staged.view(shape), live
        return
    at = 0
    for offset, size in flat_range_boxes(shape, part.first, part.last):
        inner = live
        for axis, (start, length) in enumerate(zip(offset, size, strict=True)):
            inner = inner.narrow(axis, start, length)
        numel = math.prod(size)
        yield staged[at : at + numel].view(size), inner
        at += numel
