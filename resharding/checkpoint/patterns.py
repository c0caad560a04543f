"""How the slices that ranks of a tensor parallel group keep make up a parameter: the patterns of the paper, as data.

*Universal Checkpointing* names a few patterns that cover how training frameworks spread a parameter. A specification
is a list of rules, each a regular expression and a pattern; the first that matches a parameter's whole name counts::

    {"rules": [
        {"match": ".*layernorm.*", "pattern": "replicated"},
        {"match": ".*router.bias", "pattern": "average"},
        {"match": ".*(o_proj|down_proj).weight", "pattern": "fragments", "axis": 1},
        {"match": ".*gate_up.weight", "pattern": "fragments", "axis": 0, "parts": [1, 1]},
        {"match": ".*qkv.weight", "pattern": "fragments", "axis": 0, "parts": [64, 8, 8]},
        {"match": ".*embed.*", "pattern": "fragments", "axis": 0, "rows": 50257}
    ]}

``unique``      one rank has it
``replicated``  all have the same; checked
``average``     each has its own, the parameter is their mean
``fragments``   cut along ``axis``; with ``parts``, each of several tensors along it is cut by itself, their sizes
                being in that proportion; ``widths`` in place of ``parts``, where it is no proportion: for each of
                these tensors how many rows each rank has, ``[[7, 5], [3, 1]]``; ``rows``: what is beyond on the
                first axis is padding

Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from resharding.boxes import Shape
from resharding.checkpoint.format import BadCheckpoint

KINDS = ("unique", "replicated", "average", "fragments")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of one rank's slice, and where it lies in the whole parameter."""

    start: Shape
    """in the slice"""
    size: Shape
    at: Shape
    """in the whole"""
    twin: tuple[int, Shape] | None = None
    """an earlier rank that has the same block, and where in its slice: both have to have the same numbers"""


class Layout(Protocol):
    """How a parameter's slices go together."""

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""

    def whole_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape that slices of these shapes make up. Raises ``ValueError`` if they make up none."""

    def blocks(self, shapes: Sequence[Shape], rank: int) -> Iterator[Block]:
        """Yield what a rank's slice consists of, for fragments."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What a rule says of a parameter."""

    kind: str = "fragments"
    axis: int = 0
    parts: tuple[int, ...] = (1,)
    widths: tuple[tuple[int, ...], ...] | None = None
    """in place of ``parts``: for each of the several tensors, how many rows each rank has"""
    ndim: int | None = None
    """dimensions of the slices, if that is said"""
    rows: int | None = None

    def whole_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape that slices of these shapes make up. Raises ``ValueError`` if they make up none."""
        first = shapes[0]
        if self.kind == "unique" and len(shapes) > 1:
            raise ValueError(f"is said to be unique, and {len(shapes)} ranks have a slice")
        if self.kind != "fragments" or len(shapes) == 1:
            if any(shape != first for shape in shapes):
                raise ValueError(f"is said to be {self.kind}, and its slices have shapes {list(shapes)}")
            return self._kept(first)
        axis = self.axis
        others = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        if axis >= len(first) or len(others) != 1 or self.ndim not in (None, len(first)):
            raise ValueError(f"has slices of shapes {list(shapes)}, which do not go together along axis {axis}")
        sizes = [shape[axis] for shape in shapes]
        if self.widths is None:
            if any(size % sum(self.parts) for size in sizes):
                raise ValueError(f"has slices of {sizes} rows, not in proportion {list(self.parts)}")
        elif any(len(width) != len(sizes) for width in self.widths) or sizes != [
            sum(each) for each in zip(*self.widths, strict=True)
        ]:
            raise ValueError(f"has slices of {sizes} rows, and is said to be cut into {list(self.widths)}")
        return self._kept((*first[:axis], sum(sizes), *first[axis + 1 :]))

    def _kept(self, shape: Shape) -> Shape:
        return shape if self.rows is None else (min(self.rows, shape[0]), *shape[1:])

    def blocks(self, shapes: Sequence[Shape], rank: int) -> Iterator[Block]:
        """Yield each part of a rank's slice, all along the axis."""
        shape = shapes[rank]
        units = [other[self.axis] // sum(self.parts) for other in shapes]
        start, base = 0, 0
        for widths in self.widths or [[part * unit for unit in units] for part in self.parts]:
            size = (*shape[: self.axis], widths[rank], *shape[self.axis + 1 :])
            yield Block(
                start=self._along(start, len(shape)), size=size,
                at=self._along(base + sum(widths[:rank]), len(shape)),
            )  # fmt: skip
            start += widths[rank]
            base += sum(widths)

    def _along(self, at: int, ndim: int) -> Shape:
        return tuple(at if axis == self.axis else 0 for axis in range(ndim))


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why slices cannot be put together, in place of a pattern."""

    reason: str


class Patterns:
    """Rules in order."""

    def __init__(self, rules: Sequence[tuple[str, Layout | Refusal]]) -> None:
        self._rules = [(re.compile(match), layout) for match, layout in rules]

    def of(self, name: str, num_slices: int) -> Layout:
        """Return what holds for a parameter of which ``num_slices`` ranks have a slice.

        Raises ``BadCheckpoint`` where several have one and no rule says how they go together.
        """
        for match, layout in self._rules:
            if not match.fullmatch(name):
                continue
            if not isinstance(layout, Refusal):
                return layout
            if num_slices > 1:
                raise BadCheckpoint(f"{name} {layout.reason}; pass rules with --patterns")
        if num_slices == 1:
            return Pattern(kind="unique")
        raise BadCheckpoint(
            f"{name} lies on {num_slices} tensor parallel ranks, and no rule says how its slices go together; "
            "pass rules with --patterns"
        )


def read_patterns(value: Mapping[str, Any]) -> Patterns:
    """Read a specification. Raises ``BadCheckpoint`` for a rule that says nothing."""
    rules: list[tuple[str, Layout | Refusal]] = []
    for row in value.get("rules", []):
        try:
            rules.append(_rule(row))
        except (KeyError, TypeError, ValueError, re.error):
            raise BadCheckpoint(
                f"rule {row!r} is none; it needs 'match' and a 'pattern' out of {', '.join(KINDS)}"
            ) from None
    return Patterns(rules)


def _rule(row: Mapping[str, Any]) -> tuple[str, Pattern]:
    pattern = Pattern(
        kind=row["pattern"], axis=int(row.get("axis", 0)), rows=row.get("rows"),
        parts=tuple(int(part) for part in row.get("parts", [1])), widths=read_widths(row.get("widths")),
    )  # fmt: skip
    if pattern.kind not in KINDS or pattern.axis < 0 or min(pattern.parts) < 1:
        raise ValueError(row["pattern"])
    re.compile(row["match"])
    return row["match"], pattern


def read_widths(rows: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    """Return for each of several tensors how wide every rank's slice is. Raises ``ValueError`` for what is none."""
    if rows is None:
        return None
    widths = tuple(tuple(int(width) for width in row) for row in rows)
    if not widths or min((width for row in widths for width in row), default=-1) < 0:
        raise ValueError(f"{rows} are no widths")
    return widths
