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
                being in that proportion; ``rows``: what is beyond on the first axis is padding

Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resharding.boxes import Shape
from resharding.checkpoint.format import BadCheckpoint

KINDS = ("unique", "replicated", "average", "fragments")


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What a rule says of a parameter."""

    kind: str = "fragments"
    axis: int = 0
    parts: tuple[int, ...] = (1,)
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
        if axis >= len(first) or len(others) != 1:
            raise ValueError(f"has slices of shapes {list(shapes)}, which do not go together along axis {axis}")
        size = sum(shape[axis] for shape in shapes)
        if size % sum(self.parts) or any(shape[axis] % sum(self.parts) for shape in shapes):
            raise ValueError(f"has slices of {[s[axis] for s in shapes]} rows, not in proportion {list(self.parts)}")
        return self._kept((*first[:axis], size, *first[axis + 1 :]))

    def _kept(self, shape: Shape) -> Shape:
        return shape if self.rows is None else (min(self.rows, shape[0]), *shape[1:])

    def places(self, shapes: Sequence[Shape], rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(start, length, at)`` for each part of a rank's slice, all along the axis.

        ``start`` is where it begins in the slice, ``at`` where in the whole.
        """
        unit = [shape[self.axis] // sum(self.parts) for shape in shapes]
        start, base = 0, 0
        for part in self.parts:
            at = base + sum(part * u for u in unit[:rank])
            yield start, part * unit[rank], at
            start += part * unit[rank]
            base += part * sum(unit)


class Patterns:
    """Rules in order."""

    def __init__(self, rules: Sequence[tuple[str, Pattern]]) -> None:
        self._rules = [(re.compile(match), pattern) for match, pattern in rules]

    def of(self, name: str, num_slices: int) -> Pattern:
        """Return what holds for a parameter of which ``num_slices`` ranks have a slice.

        Raises ``BadCheckpoint`` where several have one and no rule says how they go together.
        """
        for match, pattern in self._rules:
            if match.fullmatch(name):
                return pattern
        if num_slices == 1:
            return Pattern(kind="unique")
        raise BadCheckpoint(
            f"{name} lies on {num_slices} tensor parallel ranks, and no rule says how its slices go together; "
            "pass rules with --patterns"
        )


def read_patterns(value: Mapping[str, Any]) -> Patterns:
    """Read a specification. Raises ``BadCheckpoint`` for a rule that says nothing."""
    rules = []
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
        parts=tuple(int(part) for part in row.get("parts", [1])),
    )  # fmt: skip
    if pattern.kind not in KINDS or pattern.axis < 0 or min(pattern.parts) < 1:
        raise ValueError(row["pattern"])
    re.compile(row["match"])
    return row["match"], pattern


def from_deepspeed(info: Mapping[str, Any]) -> Patterns:
    """Read what a DeepSpeed checkpoint says of itself in ``universal_checkpoint_info``."""
    rules: list[tuple[str, Pattern]] = []
    rows = info.get("original_vocab_size")
    vocabulary = list(info.get("vocabulary_parameter_patterns", []))
    for key, pattern in (
        ("tp_replicated_parameter_patterns", Pattern(kind="replicated")),
        ("parameter_to_average_patterns", Pattern(kind="average")),
        ("parameter_with_row_parallelism_patterns", Pattern(axis=1)),
        ("parameter_with_2_sub_params_cat_dim_0", Pattern(parts=(1, 1))),
    ):
        rules.extend((f"(?:{match}).*", pattern) for match in info.get(key, []))
    rules.extend((f"(?:{match}).*", Pattern(rows=rows)) for match in vocabulary)
    if info:
        rules.append((".*", Pattern()))  # what it does not name is cut along the first axis
    return Patterns(rules)
