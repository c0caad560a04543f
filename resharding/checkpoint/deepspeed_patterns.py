"""What a DeepSpeed checkpoint says of how its slices go together: ``universal_checkpoint_info``, as patterns.

Read from DeepSpeed 0.19.8 (``checkpoint/ds_to_universal.py``, ``checkpoint/affine.py``), in the order in which its
own converter asks: an affine map, where there is one, and then the lists of names. A key that is not known here may
say how something is cut; then what no other key names is asked for, never guessed.

Needs no torch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resharding.boxes import Shape
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.patterns import Block, Layout, Pattern, Patterns, Refusal, read_widths

_AFFINE_VERSION = 1
_WIDTHS_SINCE = 0.4
"""``universal_checkpoint_version`` that says how wide each rank's piece of each of several tensors is"""
_LISTS: Mapping[str, Pattern] = {
    "tp_replicated_parameter_patterns": Pattern(kind="replicated"),
    "parameter_to_average_patterns": Pattern(kind="average"),
    "parameter_with_2_sub_params_cat_dim_0": Pattern(parts=(1, 1)),
}
_ROW_PARALLEL = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
_SUB_PARAMS, _SUB_WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_AFFINE = "affine_map"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_OF_NO_MATTER = {
    "universal_checkpoint_version", "original_vocab_size", "padded_vocab_size", "param_slice_mappings",
    # of what pipeline stages share, that of the first is taken, whatever is said of it
    "pipeline_replicated_parameter_patterns",
}  # fmt: skip
_KNOWN = {*_LISTS, _ROW_PARALLEL, _VOCABULARY, _SUB_PARAMS, _SUB_WIDTHS, _AFFINE, _UNSUPPORTED, *_OF_NO_MATTER}


def from_deepspeed(info: Mapping[str, Any]) -> Patterns:
    """Read ``universal_checkpoint_info``. Raises ``BadCheckpoint`` for what has another form."""
    try:
        return _read(info)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, re.error) as error:
        raise BadCheckpoint(
            f"universal_checkpoint_info is not as DeepSpeed 0.19.8 writes it ({type(error).__name__}: {error}); "
            "pass rules with --patterns"
        ) from None


def _read(info: Mapping[str, Any]) -> Patterns:
    rules: list[tuple[str, Layout | Refusal]] = [
        (_begins(match), Refusal(reason=f"cannot be put together, as the checkpoint says itself ({reason})"))
        for match, reason in dict(info.get(_UNSUPPORTED, {})).items()
    ]
    affine = info.get(_AFFINE, {})
    if affine.get("version", _AFFINE_VERSION) > _AFFINE_VERSION:
        reason = f"lies by an affine map of version {affine['version']}, newer than the {_AFFINE_VERSION} known here"
        rules.extend((_begins(match), Refusal(reason=reason)) for match in affine["params"])
    else:
        rules.extend((_begins(match), _affine_map(row)) for match, row in affine.get("params", {}).items())
    for key, pattern in _LISTS.items():
        rules.extend((_begins(match), pattern) for match in info.get(key, []))
    rules.extend(itertools.chain.from_iterable(_sub_params(row, info) for row in info.get(_SUB_PARAMS, [])))
    rules.extend((_begins(match), Pattern(axis=1)) for match in info.get(_ROW_PARALLEL, []))
    rows = info.get("original_vocab_size")
    rules.extend((_begins(match), Pattern(rows=rows)) for match in info.get(_VOCABULARY, []))
    if unknown := sorted(info.keys() - _KNOWN):
        reason = f"may be cut in a way that is not known here: the checkpoint says {', '.join(map(repr, unknown))}"
        rules.append((".*", Refusal(reason=reason)))
    elif info:
        rules.append((".*", Pattern()))  # what it does not name is cut along the first axis
    return Patterns(rules)


def _begins(match: str) -> str:
    """DeepSpeed's expressions need only match how a name begins."""
    return f"(?:{match}).*"


def _sub_params(row: Mapping[str, Any], info: Mapping[str, Any]) -> Iterator[tuple[str, Layout | Refusal]]:
    """Yield rules for parameters that are several tensors along one axis, each cut by itself."""
    axis, ndim = int(row["partition_dim"]), len(row["shape"])
    sizes = row["shape"][axis]
    for match in row["patterns"]:
        layout: Layout | Refusal
        if float(info.get("universal_checkpoint_version", 0)) >= _WIDTHS_SINCE:
            widths = info.get(_SUB_WIDTHS, {}).get(match)
            if widths is None:
                layout = Refusal(reason="is several tensors, and nothing says how wide its slices are")
            else:
                layout = Pattern(axis=axis, ndim=ndim, widths=read_widths(widths))
        elif isinstance(sizes, int):  # how many of equal size
            layout = Pattern(axis=axis, ndim=ndim, parts=(1,) * sizes)
        else:
            unit = math.gcd(*sizes)
            layout = Pattern(axis=axis, ndim=ndim, parts=tuple(size // unit for size in sizes))
        yield _begins(match), layout


@dataclass(frozen=True, kw_only=True)
class AffineMap:
    """For each rank, which blocks of the whole its slice consists of."""

    whole: Shape
    shapes: Sequence[Shape]
    """of the slices, by rank"""
    by_rank: Sequence[Sequence[Block]]
    kind: str = "fragments"

    def whole_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the whole's shape. Raises ``ValueError`` for slices of other shapes than the map says."""
        if list(shapes) != list(self.shapes):
            raise ValueError(f"has slices of shapes {list(shapes)}, and its affine map says {list(self.shapes)}")
        return self.whole

    def blocks(self, shapes: Sequence[Shape], rank: int) -> Iterator[Block]:
        """Yield the blocks of a rank's slice."""
        del shapes
        yield from self.by_rank[rank]


def _affine_map(row: Mapping[str, Any]) -> AffineMap | Refusal:
    whole = tuple(map(int, row["logical_shape"]))
    ranks = {int(rank): said for rank, said in row["ranks"].items()}
    shapes = [tuple(map(int, ranks[rank]["shard_shape"])) for rank in sorted(ranks)]
    seen: dict[tuple[Shape, Shape], tuple[int, Shape]] = {}
    by_rank: list[list[Block]] = []
    for rank, shape in enumerate(shapes):
        by_rank.append([])
        for piece in ranks[sorted(ranks)[rank]]["pieces"]:
            size = tuple(map(int, piece["shape"]))
            at, start = _corner(piece["source"], size, whole), _corner(piece["dest"], size, shape)
            if at is None or start is None:
                return Refusal(reason="lies by an affine map of which a piece is no block of the parameter")
            scale = float(piece.get("scale", 1.0))
            if scale != 1.0:  # its moments, learning rate and eps would have to be scaled too
                return Refusal(reason=f"is kept multiplied by {scale}, which cannot be undone in its optimizer")
            if 0 in size:
                continue
            twin = seen.setdefault((at, size), (rank, start))
            by_rank[-1].append(Block(start=start, size=size, at=at, twin=None if twin[0] == rank else twin))
    apart = [(at, size) for at, size in seen]
    touch = any(_overlap(one, other) for one, other in itertools.combinations(apart, 2))
    if touch or sum(math.prod(size) for _, size in apart) != math.prod(whole):
        return Refusal(reason="lies by an affine map whose pieces do not make up the parameter")
    return AffineMap(whole=whole, shapes=shapes, by_rank=by_rank)


def _corner(view: tuple[int, Sequence[int]], size: Shape, container: Shape) -> Shape | None:
    """Return where the block of a view (offset and strides) begins; ``None`` if it is no block of the container."""
    offset, strides = view
    if len(size) != len(container):
        return None
    steps = [math.prod(container[axis + 1 :]) for axis in range(len(container))]
    if any(length > 1 and got != step for length, got, step in zip(size, strides, steps, strict=True)):
        return None
    corner = []
    for step in steps:
        index, offset = divmod(offset, step) if step else (0, offset)
        corner.append(index)
    fits = all(at + length <= room for at, length, room in zip(corner, size, container, strict=True))
    return tuple(corner) if fits or 0 in size else None


def _overlap(one: tuple[Shape, Shape], other: tuple[Shape, Shape]) -> bool:
    return all(a < b + q and b < a + p for a, p, b, q in zip(*one, *other, strict=True))
