"""Boxes of many ranks in few words: what ranks tell each other so that each can plan alone.

A rank's boxes are a list of *blocks*. A block is either an explicit table of boxes, the same on all data parallel
ranks, or the description of flat buffers that are cut into equal shards, of which a rank has one: then the block is
the same on all of them too, and only the shard's index differs. So a world has few different blocks, and
``exchange`` sends each of them once, in slices from all ranks that have it.

This module needs no torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from resharding.boxes import (
    DTYPE_SIZES_BYTES,
    MAX_ENCODED_BYTES,
    MAX_EXTENT,
    Box,
    Shape,
    read_message,
    read_rows,
    read_shape,
    read_tensor,
)
from resharding.ranges import Ints, cut_ranges

if TYPE_CHECKING:
    from resharding.boxes import Holding

_SUMMARY = struct.Struct("<16sII")
MAX_SHARDS = 2**20
MAX_BLOCKS = 4096
"""Blocks of one side of one rank that ``exchange`` accepts."""


@dataclass(frozen=True)
class Tensor:
    """A global tensor, as every box of it says."""

    key: str
    dtype: str
    global_shape: Shape
    padded: bool


@dataclass(frozen=True)
class Rows:
    """Boxes as columns; ``n`` rows of ``D`` axes, axes that a tensor lacks at the end with size 1."""

    which: Ints
    """position in the list of indexes asked for, ``(n,)``"""
    unit: Ints
    """index in the block's ``units``, ``(n,)``"""
    offset: Ints
    """``(n, D)``"""
    size: Ints
    """``(n, D)``"""


@dataclass(frozen=True)
class Block:
    """Boxes in a fixed order, equal on many ranks or following from an index.

    Each row of ``rows`` stands for one box of every tensor of its unit, in the unit's order: a parameter's main
    values and its optimizer's moments lie alike, and are described once.
    """

    units: tuple[tuple[Tensor, ...], ...]
    """tensors whose boxes are equal here; all units of a block have equally many"""
    table: tuple[tuple[int, Shape, Shape], ...]
    """``(unit, offset, shape)``; of boxes, or of parts of flat buffers"""
    buckets: tuple[int, ...] = ()
    """elements of each flat buffer, a multiple of ``num_shards``; none for explicit boxes"""
    places: tuple[tuple[int, int], ...] = ()
    """bucket of each row of ``table``, and where in it its elements begin, in C order"""
    num_shards: int = 1

    @classmethod
    def explicit(cls, boxes: Iterable[Box]) -> Block:
        """Return a block that names every box."""
        units: dict[tuple[Tensor, ...], int] = {}
        table = []
        for box in boxes:
            unit = (Tensor(box.key, box.dtype, box.global_shape, box.padded),)
            table.append((units.setdefault(unit, len(units)), box.offset, box.shape))
        return cls(tuple(units), tuple(table))

    @property
    def num_kinds(self) -> int:
        """Boxes for each row."""
        return len(self.units[0]) if self.units else 1

    @functools.cached_property
    def num_axes(self) -> int:
        """``D`` of ``rows``, at least 1."""
        return max((len(shape) for _, _, shape in self.table), default=1) or 1

    @functools.cached_property
    def text(self) -> bytes:
        """The block as compressed JSON, for ``read_block``."""
        names = [[[t.key, t.dtype, t.global_shape, t.padded] for t in unit] for unit in self.units]
        parts = {
            "version": 1, "units": names, "table": self.table, "buckets": self.buckets, "places": self.places,
            "shards": self.num_shards,
        }  # fmt: skip
        return zlib.compress(json.dumps(parts, separators=(",", ":")).encode(), level=6)

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes that no other block has."""
        return hashlib.blake2b(self.text, digest_size=16).digest()

    @functools.cached_property
    def _columns(self) -> tuple[Ints, Ints, Ints]:
        width = self.num_axes
        unit = np.array([row[0] for row in self.table], dtype=np.int64)
        offset = np.array([(*row[1], *(0,) * (width - len(row[1]))) for row in self.table], dtype=np.int64)
        size = np.array([(*row[2], *(1,) * (width - len(row[2]))) for row in self.table], dtype=np.int64)
        return unit, offset.reshape(-1, width), size.reshape(-1, width)

    def rows(self, indexes: Sequence[int]) -> Rows:
        """Return the rows of every index asked for, in the order of their boxes; ``[0]`` where all are equal."""
        unit, offset, size = self._columns
        if not self.buckets:
            which = np.repeat(np.arange(len(indexes)), len(unit))
            times = len(indexes)
            return Rows(which, np.tile(unit, times), np.tile(offset, (times, 1)), np.tile(size, (times, 1)))
        bucket, at = np.array(self.places, dtype=np.int64).reshape(-1, 2).T
        shard = np.array(self.buckets, dtype=np.int64)[bucket] // self.num_shards
        numel = size.prod(axis=1)
        index = np.array(indexes, dtype=np.int64)[:, None]
        start = np.clip(index * shard - at, 0, numel)
        stop = np.clip((index + 1) * shard - at, 0, numel)
        which, part = np.nonzero(start < stop)
        row, inner, shape = cut_ranges(size[part], start[which, part], stop[which, part])
        return Rows(which[row], unit[part[row]], offset[part[row]] + inner, shape)

    def bytes_by(self, number_of_unit: Ints, length: int, indexes: Sequence[int]) -> Ints:
        """Return the bytes that each index has, added up by a number below ``length`` that each unit is given.

        ``number_of_unit`` is ``(units,)``, the result ``(indexes, length)``.
        """
        unit, _, size = self._columns
        widths = [sum(DTYPE_SIZES_BYTES[tensor.dtype] for tensor in its) for its in self.units]
        width = np.array(widths, dtype=np.int64)
        numel = np.broadcast_to(size.prod(axis=1), (len(indexes), len(unit)))
        if self.buckets:
            bucket, at = np.array(self.places, dtype=np.int64).reshape(-1, 2).T
            shard = np.array(self.buckets, dtype=np.int64)[bucket] // self.num_shards
            index = np.array(indexes, dtype=np.int64)[:, None]
            numel = np.clip((index + 1) * shard - at, 0, numel) - np.clip(index * shard - at, 0, numel)
        nbytes = np.zeros((len(indexes), length), dtype=np.int64)
        if len(unit):
            number = number_of_unit[unit]
            order = np.argsort(number, kind="stable")
            begins = np.flatnonzero(np.diff(number[order], prepend=-1))
            sums = np.add.reduceat((numel * width[unit])[:, order], begins, axis=1)
            nbytes[:, number[order][begins]] = sums
        return nbytes

    def num_boxes(self, index: int) -> int:
        """Boxes of one index."""
        return len(self.table if not self.buckets else self.rows([index]).unit) * self.num_kinds

    def boxes(self, index: int) -> list[Box]:
        """Return the boxes of one index in order."""
        rows = self.rows([index])
        boxes: list[Box] = []
        for unit, offset, size in zip(rows.unit.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True):
            for tensor in self.units[unit]:
                ndim = len(tensor.global_shape)
                place = (tuple(offset[:ndim]), tuple(size[:ndim]))
                boxes.append(Box(tensor.key, tensor.dtype, tensor.global_shape, *place, tensor.padded))
        return boxes


@dataclass(frozen=True)
class Listing:
    """The boxes of one rank: those of each block at its index, one after the other."""

    entries: tuple[tuple[Block, int], ...]

    @classmethod
    def explicit(cls, boxes: Sequence[Box]) -> Listing:
        """Return a listing that names every box."""
        return cls(((Block.explicit(boxes), 0),) if boxes else ())

    @property
    def boxes(self) -> list[Box]:
        """Every box, in order."""
        return [box for block, index in self.entries for box in block.boxes(index)]


def listing_of(holding: Holding) -> Listing:
    """Return the boxes of ``holding`` in short; ``Listing.boxes`` of the result are the holding's, in order."""
    entries: list[tuple[Block, int]] = []
    loose: list[Box] = []

    def close() -> None:
        if loose:
            entries.append((Block.explicit(loose), 0))
            loose.clear()

    at = 0
    while at < len(holding.pieces):
        block, index = holding.pieces[at].block or (None, 0)
        if block is not None:
            known = block.boxes(index)
            if known and [piece.box for piece in holding.pieces[at : at + len(known)]] == known:
                close()
                entries.append((block, index))
                at += len(known)
                continue
        loose.append(holding.pieces[at].box)
        at += 1
    close()
    return Listing(tuple(entries))


def exchange(
    gather: Callable[[bytes], Sequence[bytes]], rank: int, *sides: Listing
) -> tuple[list[Listing], ...]:
    """Tell all ranks what this one has, and learn what they have; collective.

    ``gather`` gives the bytes of every rank to every rank, in rank order; it is called twice. ``sides`` are
    listings of this rank, such as of the old and of the new world; every rank passes equally many. Returns for
    each side the listings of all ranks.

    Raises ``ValueError`` for what is not such a message. Nothing in a message is executed, and nothing is
    unpacked beyond ``MAX_DECODED_BYTES``.
    """
    head = struct.pack(f"<{len(sides)}I", *(len(side.entries) for side in sides))
    own = {block.digest: block.text for side in sides for block, _ in side.entries}
    tail = b"".join(
        _SUMMARY.pack(block.digest, len(block.text), index) for side in sides for block, index in side.entries
    )
    summaries = [_read_summary(data, len(sides)) for data in gather(head + tail)]
    holders: dict[tuple[bytes, int], list[int]] = {}
    for peer, summary in enumerate(summaries):
        for name in dict.fromkeys((digest, length) for side in summary for digest, length, _ in side):
            holders.setdefault(name, []).append(peer)
    if sum(length for _, length in holders) > MAX_ENCODED_BYTES:
        raise ValueError(f"box lists together are larger than {MAX_ENCODED_BYTES} bytes")
    said = gather(
        b"".join(
            own[digest][_slice_of(length, peers.index(rank), len(peers))]
            for (digest, length), peers in holders.items()
            if digest in own
        )
    )
    taken = [0] * len(summaries)
    blocks: dict[bytes, Block] = {}
    for (digest, length), peers in holders.items():
        text = b""
        for number, peer in enumerate(peers):
            part = _slice_of(length, number, len(peers))
            begin = taken[peer]
            taken[peer] += part.stop - part.start
            text += said[peer][begin : taken[peer]]
        if hashlib.blake2b(text, digest_size=16).digest() != digest:
            raise ValueError(f"box list of rank {peers[0]} did not arrive as it was announced")
        blocks[digest] = read_block(text)
    listings: list[list[Listing]] = [[] for _ in sides]
    for peer, summary in enumerate(summaries):
        for side, entries in zip(listings, summary, strict=True):
            found = [(blocks[digest], index) for digest, _, index in entries]
            for block, index in found:
                if index >= block.num_shards:
                    raise ValueError(f"rank {peer} names shard {index} of {block.num_shards}")
            side.append(Listing(tuple(found)))
    return tuple(listings)


def _slice_of(length: int, number: int, num_peers: int) -> slice:
    """Return the part of a text of ``length`` bytes that the ``number``-th of its holders sends."""
    return slice(number * length // num_peers, (number + 1) * length // num_peers)


def _read_summary(data: bytes, num_sides: int) -> list[list[tuple[bytes, int, int]]]:
    head = 4 * num_sides
    counts = struct.unpack_from(f"<{num_sides}I", data) if len(data) >= head else ()
    if not counts or max(counts) > MAX_BLOCKS or len(data) != head + sum(counts) * _SUMMARY.size:
        raise ValueError("summary of a box list has not the size it should")
    entries = list(_SUMMARY.iter_unpack(data[head:]))
    sides = []
    for count in counts:
        sides.append(entries[:count])
        entries = entries[count:]
    return sides


def read_block(data: bytes) -> Block:
    """Read ``Block.text``; the sender is not trusted. Raises ``ValueError`` as ``decode_boxes`` does."""
    message = read_message(data)
    if not isinstance(message.get("units"), list):
        raise ValueError("box list is not of version 1")  # noqa: TRY004  (a bad message, whatever is bad about it)
    units = tuple(tuple(Tensor(*read_tensor(row)) for row in read_rows(unit, 4)) for unit in message["units"])
    if len({len(unit) for unit in units}) > 1 or not all(units):
        raise ValueError("box list has units of different kinds")
    if any(tensor.global_shape != unit[0].global_shape for unit in units for tensor in unit):
        raise ValueError("box list has a unit of different shapes")
    table = []
    for unit, offset, shape in read_rows(message.get("table"), 3):
        if not _is_size(unit, len(units) - 1):
            raise ValueError(f"box list names unit {str(unit)[:20]} of {len(units)}")
        box = (unit, read_shape(offset), read_shape(shape))
        whole = units[unit][0].global_shape
        if not len(box[1]) == len(box[2]) == len(whole) or any(
            o + n > g for o, n, g in zip(box[1], box[2], whole, strict=True)
        ):
            raise ValueError(f"box at {box[1]} of {box[2]} is not within {units[unit][0].key} of {whole}")
        table.append(box)
    return Block(units, tuple(table), *_read_buckets(message, table))


def _read_buckets(
    message: dict[str, Any], table: Sequence[tuple[int, Shape, Shape]]
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], int]:
    shards, buckets = message.get("shards"), message.get("buckets")
    if not _is_size(shards, MAX_SHARDS) or not shards or not isinstance(buckets, list):
        raise ValueError("box list does not say how its buffers are cut")
    if not all(_is_size(numel, MAX_EXTENT) and numel % shards == 0 for numel in buckets):
        raise ValueError(f"box list has a buffer that cannot be cut into {shards} equal shards")
    places = []
    for bucket, at in read_rows(message.get("places"), 2):
        if not _is_size(bucket, len(buckets) - 1) or not _is_size(at, buckets[bucket]):
            raise ValueError("box list has a part outside of its buffer")
        places.append((bucket, at))
    if buckets:
        if len(places) != len(table):
            raise ValueError("box list has parts without a place")
        for (bucket, at), (_, _, shape) in zip(places, table, strict=True):
            if at + math.prod(shape) > buckets[bucket]:
                raise ValueError("box list has a part that ends outside of its buffer")
    elif places or shards != 1:
        raise ValueError("box list has places without a buffer")
    return tuple(buckets), tuple(places), int(shards)


def _is_size(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


