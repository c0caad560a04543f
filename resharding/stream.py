"""Move the bytes of a plan: local copies, then chunks through bounded staging buffers.

Protocol between ``N`` ranks that run ``execute`` with plans of the same assignment and the same
``staging_bytes``:

1. The transfers from ``s`` to ``t`` are cut into messages. Both ends do so alone and alike, since both see
   the same list of sizes: small slices share a message, a large one has messages of its own.
2. Message ``k`` from ``s`` to ``t`` belongs to slot ``(k, (t - s) mod N)``. In a slot a rank sends at most
   one message and receives at most one. Slots are passed in ascending order.
3. At most two slots are under way on a rank; before the third starts, the first has ended and is unpacked. So
   the packing of one slot overlaps the wire of the one before.

No pattern can hang: of all unfinished messages, the one in the lowest slot has been posted by both its ends,
since all they wait for lies in lower slots. Within a slot, operations are posted in the order of the sending
rank, so this also holds for a transport that runs them strictly one after the other.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from resharding.boxes import Holding, flat_range_boxes
from resharding.plan import Cut, RankPlan, Transfer

ALIGN_BYTES = 16
"""Every slice starts at a multiple of this in a message, so that it can be read as its own element type."""
NUM_BUFFERS = 4
"""Two to send from, two to receive into."""


class Work(Protocol):
    """A send or receive under way."""

    def wait(self) -> object:
        """Block until the buffer may be used again; raise if the transfer failed."""


class Transport(Protocol):
    """Moves 1-D uint8 tensors between ranks of the bridge group; messages of a pair keep their order."""

    @property
    def device(self) -> torch.device:
        """Where the tensors it is given have to lie."""

    def isend(self, tensor: torch.Tensor, peer: int) -> Work:
        """Start to send; the tensor is not changed until the work is done."""

    def irecv(self, tensor: torch.Tensor, peer: int) -> Work:
        """Start to receive exactly as many bytes as the tensor has."""


class ProcessGroupTransport:
    """Transport over a process group of its own; ranks are those of the group, no default group is needed."""

    def __init__(self, group: ProcessGroup, device: torch.device | str = "cpu", tag: int = 0) -> None:
        """Use ``group`` for tensors on ``device``; ``tag`` keeps these messages apart from others."""
        self._group = group
        self._device = torch.device(device)
        self._tag = tag

    @property
    def device(self) -> torch.device:
        """Where the tensors it is given have to lie."""
        return self._device

    def isend(self, tensor: torch.Tensor, peer: int) -> Work:
        """Start to send to ``peer``, a rank of the group."""
        work: Work = self._group.send([tensor], peer, self._tag)
        return work

    def irecv(self, tensor: torch.Tensor, peer: int) -> Work:
        """Start to receive from ``peer``, a rank of the group."""
        work: Work = self._group.recv([tensor], peer, self._tag)
        return work


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

    @property
    def seconds(self) -> float:
        """Time in all."""
        return self.local_s + self.wire_s


@dataclass(frozen=True)
class _Part:
    """Elements ``[first, last)`` of a transfer's slice, at byte ``at`` of a message."""

    transfer: Transfer
    first: int
    last: int
    at: int
    nbytes: int


@dataclass(frozen=True)
class _Message:
    peer: int
    parts: tuple[_Part, ...]
    nbytes: int


_Slot = tuple[int, int]


def execute(
    plan: RankPlan, source: Holding, target: Holding, transport: Transport, staging_bytes: int
) -> StreamReport:
    """Write every target piece of this rank, and serve the others; all ranks of the plan call it together.

    ``source`` and ``target`` are the holdings the plan was made from. Sources are only read. At most
    ``staging_bytes`` are allocated here, send and receive sides together, on the transport's device; nothing
    else is. ``staging_bytes`` has to be the same on every rank. Slices that are contiguous where they lie
    skip staging.

    Raises ``ValueError`` for less staging than 64 bytes, and whatever the transport raises; the target is
    then undefined and the source untouched. Transfers posted before stay posted, so the transport's group has
    to be given up.
    """
    chunk_bytes = staging_bytes // NUM_BUFFERS // ALIGN_BYTES * ALIGN_BYTES
    if chunk_bytes < ALIGN_BYTES:
        raise ValueError(f"staging of {staging_bytes} bytes is less than {NUM_BUFFERS * ALIGN_BYTES}")
    started = time.perf_counter()
    with torch.no_grad():
        for fill in plan.fills:
            _slice(target, fill.target).zero_()
        for copy in plan.copies:
            _slice(target, copy.target).copy_(_slice(source, copy.source))
        copied = time.perf_counter()
        wire = _Wire(plan, source, target, transport, chunk_bytes)
        wire.run()
    return StreamReport(
        bytes_moved=plan.bytes_received,
        bytes_sent=plan.bytes_sent,
        bytes_local=plan.bytes_local,
        staging_bytes=wire.allocated_bytes,
        num_messages=wire.num_messages,
        num_direct=wire.num_direct,
        local_s=copied - started,
        wire_s=time.perf_counter() - copied,
    )


class _Wire:
    """The slots of one rank, run in order with at most two of them under way."""

    def __init__(
        self, plan: RankPlan, source: Holding, target: Holding, transport: Transport, chunk_bytes: int
    ) -> None:
        self._rank = plan.rank
        self._source = source
        self._target = target
        self._transport = transport
        self._sends = _slots(plan, plan.sends, source, chunk_bytes, sign=1)
        self._recvs = _slots(plan, plan.recvs, target, chunk_bytes, sign=-1)
        self._out = self._buffers(self._sends)
        self._in = self._buffers(self._recvs)
        self.allocated_bytes = sum(buffer.numel() for buffer in (*self._out, *self._in))
        self.num_messages = len(self._sends) + len(self._recvs)
        self.num_direct = 0

    def _buffers(self, messages: dict[_Slot, _Message]) -> list[torch.Tensor]:
        largest = max((message.nbytes for message in messages.values()), default=0)
        count = min(len(messages), NUM_BUFFERS // 2)
        return [torch.empty(largest, dtype=torch.uint8, device=self._transport.device) for _ in range(count)]

    def run(self) -> None:
        """Pass every slot."""
        under_way: deque[tuple[list[Work], _Message | None, torch.Tensor | None]] = deque()
        num_sent = num_received = 0
        for slot in sorted(self._sends.keys() | self._recvs.keys()):
            if len(under_way) == NUM_BUFFERS // 2:
                self._finish(*under_way.popleft())
            sent, received = self._sends.get(slot), self._recvs.get(slot)
            outgoing = incoming = landing = None
            if sent is not None:
                outgoing = self._packed(sent, self._out[num_sent % len(self._out)])
                num_sent += 1
            if received is not None:
                landing = self._direct(self._target, received)
                incoming = landing
                if landing is None:
                    incoming = self._in[num_received % len(self._in)][: received.nbytes]
                num_received += 1
            works: list[Work] = []
            sends_first = received is None or self._rank < received.peer
            for is_send in (sends_first, not sends_first):
                if is_send and sent is not None and outgoing is not None:
                    works.append(self._transport.isend(outgoing, sent.peer))
                elif not is_send and received is not None and incoming is not None:
                    works.append(self._transport.irecv(incoming, received.peer))
            under_way.append((works, received, incoming if landing is None else None))
        while under_way:
            self._finish(*under_way.popleft())

    def _direct(self, holding: Holding, message: _Message) -> torch.Tensor | None:
        """Return the message as bytes of the state's own storage, or ``None`` where they do not lie so."""
        if len(message.parts) != 1:
            return None
        part = message.parts[0]
        tensor = _slice(holding, part.transfer.cut)
        if not tensor.is_contiguous() or tensor.device != self._transport.device:
            return None
        self.num_direct += 1
        at = tensor.storage_offset() + part.first  # view(-1) would keep an odd stride of an axis of size 1
        return tensor.as_strided((part.last - part.first,), (1,), at).view(torch.uint8)

    def _packed(self, message: _Message, buffer: torch.Tensor) -> torch.Tensor:
        """Return the message's bytes, from the storage itself or gathered into ``buffer``."""
        direct = self._direct(self._source, message)
        if direct is not None:
            return direct
        for part in message.parts:
            for staged, live in _mapped(buffer, part, self._source):
                staged.copy_(live)
        return buffer[: message.nbytes]

    def _finish(self, works: list[Work], message: _Message | None, buffer: torch.Tensor | None) -> None:
        """Wait for a slot, then scatter what arrived in ``buffer`` (``None``: it arrived in place)."""
        for work in works:
            work.wait()
        if message is None or buffer is None:
            return
        for part in message.parts:
            for staged, live in _mapped(buffer, part, self._target):
                live.copy_(staged)


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
    buffer: torch.Tensor, part: _Part, holding: Holding
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


def _slots(
    plan: RankPlan, transfers: Sequence[Transfer], holding: Holding, chunk_bytes: int, sign: int
) -> dict[_Slot, _Message]:
    """Cut the transfers with each peer into messages and give each its slot; ``sign`` is -1 to receive."""
    by_peer: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_peer[transfer.peer].append(transfer)
    return {
        (index, sign * (peer - plan.rank) % plan.num_ranks): message
        for peer, pair in by_peer.items()
        for index, message in enumerate(_messages(peer, pair, holding, chunk_bytes))
    }


def _messages(
    peer: int, transfers: Sequence[Transfer], holding: Holding, chunk_bytes: int
) -> Iterator[_Message]:
    """Cut one pair's transfers into messages of at most ``chunk_bytes``, from sizes alone."""
    shared: list[_Part] = []
    filled = 0
    for transfer in transfers:
        itemsize = holding.pieces[transfer.cut.piece].box.itemsize_bytes
        numel = transfer.nbytes // itemsize
        room = chunk_bytes // itemsize
        if transfer.nbytes * 2 > chunk_bytes:  # large: messages of its own, which may skip staging
            for first in range(0, numel, room):
                last = min(first + room, numel)
                yield _message(peer, [_Part(transfer, first, last, 0, (last - first) * itemsize)])
            continue
        if filled + transfer.nbytes > chunk_bytes:
            yield _message(peer, shared)
            shared, filled = [], 0
        shared.append(_Part(transfer, 0, numel, filled, transfer.nbytes))
        filled = -(-(filled + transfer.nbytes) // ALIGN_BYTES) * ALIGN_BYTES
    if shared:
        yield _message(peer, shared)


def _message(peer: int, parts: Sequence[_Part]) -> _Message:
    return _Message(peer, tuple(parts), parts[-1].at + parts[-1].nbytes)
