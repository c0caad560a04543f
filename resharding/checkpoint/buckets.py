"""Optimizer state that names no parameter: Megatron's ``dp_reshardable`` files, read with a model's parameters.

Megatron lays the parameters of a rank's model end to end in flat buffers, last one first, each beginning at a
multiple of 64 elements, and cuts a buffer into buckets at ends of parameters. The files have one flat tensor for each
bucket and kind (``param``, ``exp_avg``, …), shared out over data parallel ranks, without the padding behind it. Where
buckets end follows from the sizes of those tensors; which parameters a buffer has, and which elements of what whole
tensor each is, from the model (``Buffer``). No code of Megatron's is used here; ``model.buffers_in`` asks it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from resharding.boxes import Shape, read_shape

_KEY = re.compile(
    r"((?:.*\.)?optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)\.(\w+)"
)
_ALIGN = 64
"""elements at whose multiples Megatron lets a parameter begin"""
_NORM = re.compile(r"(.*)\.layer_norm_(?:weight|bias)")
_EXPERTS = re.compile(r"(.*\.experts)\..*linear_fc([12])\.(?:weight|bias)")


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A box of a whole tensor, as a strided view of a parameter of one rank laid flat."""

    name: str
    """of the whole tensor, without kind"""
    global_shape: Shape
    offset: Shape
    shape: Shape
    base: int
    """the box's first element in the parameter"""
    strides: Shape


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What lies in a buffer in one piece."""

    numel: int
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """The parameters of one flat buffer, which all ranks of a data parallel group share."""

    place: str
    """as its keys begin: ``optimizer.distributed.dp_group_idx_0.gbuf_idx_0``"""
    dtype: str
    """of its parameters as weights"""
    parameters: tuple[Parameter, ...]
    """in the model's order; the buffer has them in reverse"""

    def as_json(self) -> dict[str, Any]:
        """Return what ``read_buffer`` reads."""
        return asdict(self)


def read_buffer(value: Mapping[str, Any]) -> Buffer:
    """Read ``Buffer.as_json``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
    return Buffer(
        place=value["place"], dtype=value["dtype"],
        parameters=tuple(
            Parameter(
                numel=int(row["numel"]),
                stretches=tuple(
                    Stretch(
                        name=each["name"], base=int(each["base"]), global_shape=read_shape(each["global_shape"]),
                        offset=read_shape(each["offset"]), shape=read_shape(each["shape"]),
                        strides=read_shape(each["strides"]),
                    )
                    for each in row["stretches"]
                ),
            )
            for row in value["parameters"]
        ),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket in the files: what its keys begin with, and how many elements it has, end padding left out."""

    place: str
    dtype: str
    number: int
    numel: int
    key: str
    """of its tensors, but for the kind at its end"""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where the numbers of a stretch lie: in the tensors of a bucket, from element ``start`` on."""

    bucket: Bucket
    start: int
    numel: int
    """of the parameter"""
    stretch: Stretch


class Misfit(ValueError):  # noqa: N818 - reads as what it is
    """Files and model do not belong together; the message says where, without naming the folder."""


def buckets_in(sizes: Mapping[str, int]) -> tuple[list[Bucket], list[str]]:
    """Return the buckets among the tensors of a folder, and their kinds; ``sizes`` has elements by key.

    Raises ``Misfit`` for kinds of one bucket that have different sizes.
    """
    found: dict[str, Bucket] = {}
    kinds: list[str] = []
    for key, numel in sizes.items():
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        place, dtype, number, kind = match[1], match[2], int(match[3]), match[4]
        bucket = Bucket(place=place, dtype=dtype, number=number, numel=numel, key=key.removesuffix(kind))
        if found.setdefault(bucket.key, bucket).numel != numel:
            raise Misfit(f"{key} has {numel} elements, and other tensors of its bucket {found[bucket.key].numel}")
        if kind not in kinds:
            kinds.append(kind)
    return list(found.values()), kinds


def locate(buffers: Sequence[Buffer], buckets: Sequence[Bucket]) -> dict[str, list[Found]]:
    """Return by name of whole tensor where every stretch of it lies, each box once.

    Raises ``Misfit`` where buffers and buckets cannot be the same model's.
    """
    theirs: dict[str, list[Bucket]] = defaultdict(list)
    for bucket in sorted(buckets, key=lambda bucket: bucket.number):
        theirs[bucket.place].append(bucket)
    ours = {buffer.place: buffer for buffer in buffers}
    if ours.keys() != theirs.keys():
        one = min(ours.keys() ^ theirs.keys())
        raise Misfit(
            f"it has {len(theirs)} buffers of parameters and a model of this layout {len(ours)}; {one} is only in "
            f"{'it' if one in theirs else 'that model'}"
        )
    found: dict[str, dict[tuple[Shape, Shape], Found]] = defaultdict(dict)
    for place, buffer in ours.items():
        for parameter, bucket, start in _laid(buffer, theirs[place]):
            for stretch in parameter.stretches:
                box = (stretch.offset, stretch.shape)  # ranks that have the same box have the same numbers
                found[stretch.name].setdefault(
                    box, Found(bucket=bucket, start=start, numel=parameter.numel, stretch=stretch)
                )
    return {name: list(boxes.values()) for name, boxes in found.items()}


def _laid(buffer: Buffer, buckets: Sequence[Bucket]) -> Iterator[tuple[Parameter, Bucket, int]]:
    """Yield bucket and first element of every parameter of a buffer."""
    if [bucket.number for bucket in buckets] != list(range(len(buckets))):
        raise Misfit(f"{buffer.place} has buckets {[bucket.number for bucket in buckets]}, so some are missing")
    left = iter(buckets)
    bucket, end = next(left), 0
    for parameter in reversed(buffer.parameters):
        start = _aligned(end)
        if start + parameter.numel > bucket.numel and end:
            _check_full(buffer, bucket, end)
            following = next(left, None)
            if following is None:
                raise Misfit(f"{buffer.place} has no bucket for the last of the model's parameters")
            bucket, start = following, 0
        end = start + parameter.numel
        if bucket.dtype != buffer.dtype or end > bucket.numel:
            raise Misfit(
                f"bucket {bucket.number} of {buffer.place} has {bucket.numel} elements for {bucket.dtype} "
                f"parameters, and the model has {end} for {buffer.dtype} there"
            )
        yield parameter, bucket, start
    _check_full(buffer, bucket, end)
    if (unused := next(left, None)) is not None:
        raise Misfit(f"{buffer.place} has more than the model's parameters: bucket {unused.number} is left over")


def _check_full(buffer: Buffer, bucket: Bucket, end: int) -> None:
    # a bucket that is closed before a shared embedding counts the padding of that parameter's start as its own
    if bucket.numel not in (end, _aligned(end)):
        raise Misfit(
            f"bucket {bucket.number} of {buffer.place} has {bucket.numel} elements, and the model's parameters end "
            f"after {end}"
        )


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGN) * _ALIGN


def in_transformer_engines_order(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Return the parameters of a model without Transformer Engine in the order of the same model with it.

    A norm that it fuses into the matrix behind it comes right before that matrix, and of the experts of a layer all
    first matrices come before all second ones.
    """
    rows = list(parameters)
    names = [row.stretches[0].name for row in rows]
    place = {name: number for number, name in reversed(list(enumerate(names)))}

    def order(number: int) -> tuple[float, int, int]:
        if (match := _NORM.fullmatch(names[number])) and f"{match[1]}.weight" in place:
            return place[f"{match[1]}.weight"] - 0.5, 0, number
        if match := _EXPERTS.fullmatch(names[number]):
            first = next(at for at, name in enumerate(names) if name.startswith(f"{match[1]}."))
            return first, int(match[2]), number
        return number, 0, number

    return tuple(rows[number] for number in sorted(range(len(rows)), key=order))
