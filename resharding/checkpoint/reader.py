"""From one folder into the holdings of any layout: each rank reads its own boxes, through bounded memory.

What was read is checked where it lies then: every rank takes digests of the part of the state that it answers for
(``writer.share_of``), and added up over all ranks they have to be those of the index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from resharding.assign import DROPPABLE, Unplannable
from resharding.boxes import Holding
from resharding.checkpoint.bits import bits_of_tensor, cut_of
from resharding.checkpoint.files import STAGING_BYTES, bits_of
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.opened import Checkpoint, damaged, slabs
from resharding.checkpoint.parts import Sums, add_sums, sums_of
from resharding.checkpoint.writer import live_parts, share_of
from resharding.listing import Listing, Tensor, listing_of
from resharding.plan import plan_for


def keys_of(listings: Sequence[Listing]) -> set[str]:
    """Return the key of every tensor that listings name."""
    blocks = {id(block): block for listing in listings for block, _ in listing.entries}
    return {tensor.key for block in blocks.values() for unit in block.units for tensor in unit}


def check_places(checkpoint: Checkpoint, listings: Sequence[Listing]) -> None:
    """Raise ``Unplannable`` for a tensor of the checkpoint that no rank has a place for.

    ``listings`` are those of all ranks. Streams of random numbers need no place.
    """
    wanted = keys_of(listings)
    for tensor in checkpoint.index.whole:
        if tensor.key not in wanted and not tensor.key.startswith(DROPPABLE):
            raise Unplannable(f"{tensor.key}: {checkpoint.folder} has it, and this model has no place for it")


def read_into(checkpoint: Checkpoint, holding: Holding, *, staging_bytes: int = STAGING_BYTES) -> int:
    """Write every piece of ``holding`` from files; returns the bytes read. Runs no collective.

    At most about three times ``staging_bytes`` are allocated beside the state. Raises ``Unplannable`` where the
    checkpoint lacks a tensor or has another type or shape, and ``BadCheckpoint`` for a file that was cut short.
    """
    wanted = listing_of(holding)
    keys = keys_of([wanted])
    boxes = [box for box in checkpoint.index.boxes() if box.key in keys]
    missing = keys - {box.key for box in boxes}
    if missing:
        raise Unplannable(f"{min(missing)}: {checkpoint.folder} does not have it")
    nothing = Listing(())
    plan = plan_for(1, [Listing.explicit(boxes), nothing], [nothing, wanted], ["files", "here"])
    total = 0
    with torch.no_grad():
        for fill in plan.fills:
            cut_of(holding.pieces[fill.target.piece].view(), fill.target).zero_()
        for read in sorted(plan.recvs, key=lambda read: _where(checkpoint, holding.pieces[read.cut.piece].box.key)):
            piece = holding.pieces[read.cut.piece]
            live = cut_of(piece.view(), read.cut)
            offset = tuple(o + s for o, s in zip(piece.box.offset, read.cut.start, strict=True))
            _read_box(checkpoint, piece.box.key, offset, live, staging_bytes)
            total += read.nbytes
    return total


def _where(checkpoint: Checkpoint, key: str) -> tuple[str, int]:
    entry = checkpoint.index.first_entry(key)
    return entry.file, entry.begin


def _read_box(
    checkpoint: Checkpoint, key: str, offset: tuple[int, ...], live: torch.Tensor, staging_bytes: int
) -> None:
    if live.device.type == "cpu" and live.is_contiguous():
        checkpoint.read(key, offset, bits_of_tensor(live))
        return
    dtype = str(live.dtype).removeprefix("torch.")
    most = max(1, staging_bytes // live.element_size())
    for start, size in slabs(tuple(live.shape), most):
        staged = np.empty(size, dtype=bits_of(dtype))
        checkpoint.read(key, tuple(o + s for o, s in zip(offset, start, strict=True)), staged)
        inner = live
        for axis, (first, length) in enumerate(zip(start, size, strict=True)):
            inner = inner.narrow(axis, first, length)
        inner.copy_(torch.from_numpy(staged.view(np.uint8).reshape(-1)).view(live.dtype).view(size))


def sums_here(
    checkpoint: Checkpoint, rank: int, listings: Sequence[Listing], hosts: Sequence[str], holding: Holding
) -> dict[str, tuple[int, int]]:
    """Return digests of what now lies in the part of the state that ``rank`` answers for; see ``check_sums``."""
    share = share_of(rank, listings, hosts, checked_tensors(checkpoint, listings))
    return sums_of(checkpoint.index, live_parts(share, holding))


def checked_tensors(checkpoint: Checkpoint, listings: Sequence[Listing]) -> list[Tensor]:
    """Return the tensors of the checkpoint that the ranks of ``listings`` hold, in whole."""
    wanted = keys_of(listings)
    return [tensor for tensor in checkpoint.index.whole if tensor.key in wanted]


def check_sums(checkpoint: Checkpoint, sides: Sequence[Sums]) -> None:
    """Compare what all ranks have with the index. Raises ``BadCheckpoint``, naming the first tensor that differs."""
    for key, (digest, nbytes) in sorted(add_sums(sides).items()):
        entry = checkpoint.index.by_key[key]
        if nbytes != entry.nbytes or digest != entry.digest:
            raise BadCheckpoint(damaged(checkpoint.folder, entry))
