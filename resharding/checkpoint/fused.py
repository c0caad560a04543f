"""Parts of fused tensors as data: q, k and v of an attention, gate and up of an MLP, the experts of a layer.

A fused tensor repeats a sequence of parts along one axis: Megatron keeps, for every group of queries, its q rows,
then its k rows, then its v rows. In a checkpoint each part is a tensor of its own, and layouts go on to think of the
fused one: this module says where any box of it lies in its parts. A part may be fused in turn. Needs no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resharding.boxes import Shape, overlap

MAX_PARTS = 65536


@dataclass(frozen=True, kw_only=True)
class Fused:
    """How the parts of a fused tensor follow each other along ``axis``: all ``parts``, ``repeat`` times over."""

    axis: int
    parts: tuple[tuple[str, int], ...]
    """full name of each part, and how many rows of it stand together"""
    repeat: int = 1
    squeeze: bool = False
    """each part is one row, and loses the axis: experts"""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parts]
        if self.axis < 0 or not names or len(set(names)) < len(names) or not all(names):
            raise ValueError(f"parts {names} along axis {self.axis} do not describe a fused tensor")
        if self.repeat < 1 or any(length < 1 for _, length in self.parts):
            raise ValueError(f"parts {list(self.parts)} times {self.repeat} do not describe a fused tensor")
        if self.squeeze and (self.repeat != 1 or any(length != 1 for _, length in self.parts)):
            raise ValueError(f"parts {list(self.parts)} times {self.repeat} have more than one row each")

    @property
    def rows(self) -> int:
        """Size of the fused tensor along ``axis``."""
        return self.repeat * sum(length for _, length in self.parts)

    def shape_of(self, part: int, shape: Shape) -> Shape:
        """Return the global shape of a part of a fused tensor of ``shape``."""
        if self.squeeze:
            return (*shape[: self.axis], *shape[self.axis + 1 :])
        return (*shape[: self.axis], self.repeat * self.parts[part][1], *shape[self.axis + 1 :])

    def slices(self, offset: Shape, shape: Shape) -> Iterator[Slice]:
        """Yield where each element of the box ``[offset, offset + shape)`` of the fused tensor lies in a part."""
        axis = self.axis
        period = self.rows // self.repeat
        first, last = offset[axis], offset[axis] + shape[axis]
        starts = list(itertools.accumulate((length for _, length in self.parts), initial=0))
        for turn in range(first // period, -(-last // period)):
            for part, (_, length) in enumerate(self.parts):
                begin = turn * period + starts[part]
                shared = overlap((first,), (last - first,), (begin,), (length,))
                if shared is None:
                    continue
                (at,), (size,) = shared
                inside = turn * length + at - begin
                yield Slice(
                    part=part,
                    start=tuple(at - first if i == axis else 0 for i in range(len(shape))),
                    shape=(*shape[:axis], size, *shape[axis + 1 :]),
                    offset=(*offset[:axis], *(() if self.squeeze else (inside,)), *offset[axis + 1 :]),
                )

    def as_json(self) -> dict[str, Any]:
        """Return what ``read_fused`` reads."""
        return {
            "axis": self.axis, "parts": [list(part) for part in self.parts], "repeat": self.repeat,
            "squeeze": self.squeeze,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Elements of a box that lie in one part."""

    part: int
    start: Shape
    """where they begin in the box"""
    shape: Shape
    """their extent in the box, the fused axis included"""
    offset: Shape
    """where they begin in the part's tensor"""


def experts(name: str, count: int) -> Fused:
    """Return the experts of a tensor with one row for each: ``a.experts.b`` is ``a.experts.0.b`` and so on.

    Where a name has the word twice, as Megatron's have, parts have it once.
    """
    word = ".experts.experts." if ".experts.experts." in name else ".experts."
    head, _, tail = name.partition(word)
    parts = tuple((f"{head}.experts.{number}.{tail}", 1) for number in range(count))
    return Fused(axis=0, parts=parts, squeeze=True)


def rows(name: str, parts: Sequence[tuple[str, int]], repeat: int = 1, axis: int = 0) -> Fused:
    """Return parts named by a word before the last component: ``a.qkv.weight`` has ``a.qkv.q.weight``."""
    head, dot, tail = name.rpartition(".")
    return Fused(
        axis=axis, parts=tuple((f"{head}{dot}{word}.{tail}", length) for word, length in parts), repeat=repeat
    )


def query_key_value(name: str, *, heads: int, groups: int, head_dim: int, gated: bool = False) -> Fused:
    """Return the parts of Megatron's ``linear_qkv``: for each group its queries (and their gate), key and value."""
    queries = heads // groups * head_dim
    gate = [("gate", queries)] if gated else []
    return rows(name, [("q", queries), *gate, ("k", head_dim), ("v", head_dim)], groups)


def gate_up(name: str, width: int) -> Fused:
    """Return the halves of a gated MLP's first matrix, ``width`` rows each."""
    return rows(name, [("gate", width), ("up", width)])


def read_fused(value: object) -> Fused:
    """Read ``Fused.as_json`` out of a file that is not trusted. Raises ``ValueError``."""
    if not isinstance(value, Mapping):
        raise ValueError("a fused tensor is not described")  # noqa: TRY004  (what is wrong is the file)
    axis, parts, repeat, squeeze = (value.get(name) for name in ("axis", "parts", "repeat", "squeeze"))
    if type(axis) is not int or type(repeat) is not int or not isinstance(squeeze, bool):
        raise ValueError("a fused tensor is not described")
    if not isinstance(parts, Sequence) or not 0 < len(parts) <= MAX_PARTS:
        raise ValueError("a fused tensor has no parts, or too many")
    found = []
    for part in parts:
        row = part if isinstance(part, Sequence) and len(part) == 2 else ("", 0)
        if not isinstance(row[0], str) or type(row[1]) is not int:
            raise ValueError("a fused tensor has a part without a name and a length")
        found.append((row[0], row[1]))
    return Fused(axis=axis, parts=tuple(found), repeat=repeat, squeeze=squeeze)


def fused_of(key: str, table: Mapping[str, Fused]) -> Fused | None:
    """Look a tensor up by its name without its kind: weight, main values and moments are fused alike."""
    return table.get(key.partition("/")[2])


def part_key(key: str, name: str) -> str:
    """Return the key of a part: the kind of the fused tensor's key, and the part's own name."""
    return f"{key.partition('/')[0]}/{name}"
