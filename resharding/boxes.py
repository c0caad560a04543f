"""Boxes: what a rank holds of the global tensors, under names that do not depend on the layout.

A box is a hyper-rectangle of one global tensor. Two ranks hold the same numbers exactly where their boxes of
the same key overlap. This module needs no torch, so that a command line can plan without importing it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from resharding.listing import Block

DTYPE_SIZES_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Element types that can be moved, under torch's names."""

MAX_ENCODED_BYTES = 64 * 1024 * 1024
"""Largest compressed message ``decode_boxes`` looks at."""
MAX_DECODED_BYTES = 512 * 1024 * 1024
"""Largest text ``decode_boxes`` unpacks."""
MAX_DIMS = 16
MAX_KEY_CHARS = 1024
MAX_EXTENT = 2**53
"""Largest size of one axis, and of a whole tensor in elements: exact in every JSON reader."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle ``[offset, offset + shape)`` of the global tensor ``key``."""

    key: str
    """canonical name, the same under every layout: ``exp_avg/decoder.layers.3.mlp.linear_fc2.weight``"""
    dtype: str
    """torch's name of the element type, such as ``float32``"""
    global_shape: Shape
    """elements along each axis of the whole tensor"""
    offset: Shape
    """first element along each axis"""
    shape: Shape
    """elements along each axis of this box"""
    padded: bool = False
    """the global shape depends on the layout (vocabularies padded for tp); see ``plan_for``"""

    @property
    def numel(self) -> int:
        """Elements in the box; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element. Raises ``KeyError`` for an unknown ``dtype``."""
        return DTYPE_SIZES_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the box's elements."""
        return self.numel * self.itemsize_bytes

    def intersect(self, other: Box) -> Box | None:
        """Return the part both boxes cover, or ``None``. Boxes of different keys never overlap."""
        if self.key != other.key or len(self.shape) != len(other.shape):
            return None
        found = overlap(self.offset, self.shape, other.offset, other.shape)
        return None if found is None else self.part(*found)

    def part(self, offset: Shape, shape: Shape) -> Box:
        """Return the box at the global ``offset`` with ``shape`` in the same tensor."""
        return Box(self.key, self.dtype, self.global_shape, offset, shape, self.padded)

    def start_of(self, inner: Box) -> Shape:
        """Return where ``inner`` begins, counted from this box's first element along each axis."""
        return tuple(i - o for i, o in zip(inner.offset, self.offset, strict=True))


def overlap(
    offset: Shape, shape: Shape, other_offset: Shape, other_shape: Shape
) -> tuple[Shape, Shape] | None:
    """Return ``(offset, shape)`` of what two hyper-rectangles of equally many axes share, or ``None``."""
    starts: list[int] = []
    sizes: list[int] = []
    for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True):
        start = max(a, b)
        size = min(a + n, b + m) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return tuple(starts), tuple(sizes)


def subtract(
    offset: Shape, shape: Shape, hole_offset: Shape, hole_shape: Shape
) -> Iterator[tuple[Shape, Shape]]:
    """Yield disjoint ``(offset, shape)`` that cover a hyper-rectangle without a hole that lies inside it.

    At most ``2n`` of them for ``n`` axes.
    """
    lows, sizes = list(offset), list(shape)
    for axis, (hole, size) in enumerate(zip(hole_offset, hole_shape, strict=True)):
        before, after = hole - lows[axis], lows[axis] + sizes[axis] - hole - size
        if before:
            yield tuple(lows), (*sizes[:axis], before, *sizes[axis + 1 :])
        if after:
            yield (*lows[:axis], hole + size, *lows[axis + 1 :]), (*sizes[:axis], after, *sizes[axis + 1 :])
        lows[axis], sizes[axis] = hole, size


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[Shape, Shape]]:
    """Cut elements ``[start, stop)`` of a C-contiguous tensor of ``shape`` into hyper-rectangles.

    Returns ``(offset, shape)`` pairs in flat order; disjoint, together exactly the range, and at most
    ``max(1, 2n-1)`` for ``n`` axes. Raises ``ValueError`` for a range outside the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(
            f"range [{start}, {stop}) is not within the {numel} elements of shape {tuple(shape)}"
        )
    if start == stop:
        return []
    return list(_cut(tuple(shape), start, stop))


def _cut(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the boxes of a non-empty range: a ragged head, whole slabs, a ragged tail."""
    if not shape:
        yield (), ()
        return
    slab = math.prod(shape[1:])
    first, head = divmod(start, slab)
    last, tail = divmod(stop, slab)
    if first == last:  # inside one slab
        for offset, inner in _cut(shape[1:], head, tail):
            yield (first, *offset), (1, *inner)
        return
    if head:
        for offset, inner in _cut(shape[1:], head, slab):
            yield (first, *offset), (1, *inner)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if tail:
        for offset, inner in _cut(shape[1:], 0, tail):
            yield (last, *offset), (1, *inner)


@dataclass(frozen=True)
class Piece:
    """A box and the live storage that holds it on this rank."""

    box: Box
    view: Callable[[], torch.Tensor]
    """gives a tensor of ``box.shape`` that aliases the storage; called when the bytes move, may be strided"""
    block: tuple[Block, int] | None = None
    """the description that all boxes next to this one follow from, and this rank's index in it; see ``listing``"""


@dataclass(frozen=True)
class Holding:
    """Everything one rank holds, in an order of its own choice; plans name pieces by their index in it."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Holding:
        """Collect ``pieces`` in the order given."""
        return cls(tuple(pieces))

    @property
    def boxes(self) -> list[Box]:
        """The box of every piece, in order: what other ranks need to know."""
        return [piece.box for piece in self.pieces]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces together."""
        return sum(piece.box.nbytes for piece in self.pieces)

    def encode_boxes(self) -> bytes:
        """Return ``boxes`` as a message for ``decode_boxes``."""
        return encode_boxes(self.boxes)


def encode_boxes(boxes: Sequence[Box]) -> bytes:
    """Return a compact message (JSON, zlib) with every box in order. Nothing in it is executable."""
    tensors: dict[tuple[str, str, Shape, bool], int] = {}
    rows: list[list[Any]] = []
    for box in boxes:
        index = tensors.setdefault((box.key, box.dtype, box.global_shape, box.padded), len(tensors))
        rows.append([index, box.offset, box.shape])
    text = json.dumps({"version": 1, "tensors": list(tensors), "boxes": rows}, separators=(",", ":"))
    return zlib.compress(text.encode(), level=3)


def read_message(data: bytes) -> dict[str, Any]:
    """Unpack a message of version 1 (JSON, zlib); the sender is not trusted.

    Raises ``ValueError`` with one sentence for a message that is too large or is no such message. Never unpacks more
    than ``MAX_DECODED_BYTES``.
    """
    if len(data) > MAX_ENCODED_BYTES:
        raise ValueError(f"box list of {len(data)} bytes is larger than {MAX_ENCODED_BYTES}")
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, MAX_DECODED_BYTES)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError(f"box list is cut short, or unpacks to more than {MAX_DECODED_BYTES} bytes")
        message = json.loads(text)
    except (zlib.error, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"box list cannot be read: {error}") from None
    if not isinstance(message, dict) or message.get("version") != 1:
        raise ValueError("box list is not of version 1")
    return message


def decode_boxes(data: bytes) -> list[Box]:
    """Read a message of ``encode_boxes``; the sender is not trusted.

    Raises ``ValueError`` with one sentence for a message that is too large, is not such a message, or names a
    box that does not lie within its tensor. Never unpacks more than ``MAX_DECODED_BYTES``.
    """
    message = read_message(data)
    tensors = [read_tensor(row) for row in read_rows(message.get("tensors"), 4)]
    boxes: list[Box] = []
    for index, offset, shape in read_rows(message.get("boxes"), 3):
        if not _is_size(index) or index >= len(tensors):
            raise ValueError(f"box list names tensor {index!r} of {len(tensors)}")
        key, dtype, global_shape, padded = tensors[index]
        box = Box(key, dtype, global_shape, read_shape(offset), read_shape(shape), padded)
        if not len(box.offset) == len(box.shape) == len(global_shape) or any(
            o + n > g for o, n, g in zip(box.offset, box.shape, global_shape, strict=True)
        ):
            raise ValueError(f"box at {box.offset} of {box.shape} is not within {key} of {global_shape}")
        boxes.append(box)
    return boxes


def read_rows(value: object, width: int) -> Iterator[list[Any]]:
    """Yield the rows of a table out of an untrusted message; raises ``ValueError`` if it is none."""
    if not isinstance(value, list):
        raise ValueError("box list lacks a table")  # noqa: TRY004 - a message error, whatever its type
    for row in value:
        if not isinstance(row, list) or len(row) != width:
            raise ValueError(f"box list has a row that is not {width} values wide")
        yield row


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_EXTENT


def read_shape(value: object) -> Shape:
    """Read a shape or offset out of an untrusted message; raises ``ValueError`` if it is none."""
    if not isinstance(value, list) or len(value) > MAX_DIMS or not all(map(_is_size, value)):
        raise ValueError(f"box list has {str(value)[:80]} in place of a shape")
    if math.prod(value) > MAX_EXTENT:
        raise ValueError(f"box list has a tensor of more than {MAX_EXTENT} elements")
    return tuple(value)


def read_tensor(row: list[Any]) -> tuple[str, str, Shape, bool]:
    """Read key, dtype, global shape and padded out of an untrusted row; raises ``ValueError`` if they are none."""
    key, dtype, shape, padded = row
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS:
        raise ValueError("box list has a key that is no text, is empty or too long")
    if not isinstance(dtype, str) or dtype not in DTYPE_SIZES_BYTES:
        raise ValueError(f"box list gives {key[:80]} the unknown element type {str(dtype)[:80]}")
    if not isinstance(padded, bool):
        raise ValueError(f"box list does not say whether {key[:80]} is padded")  # noqa: TRY004
    return key, dtype, read_shape(shape), padded
