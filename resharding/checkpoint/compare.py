"""How far apart two checkpoints are, tensor by tensor. Reads slab by slab; needs no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from resharding.checkpoint.files import STAGING_BYTES, bits_of
from resharding.checkpoint.format import Entry
from resharding.checkpoint.opened import Checkpoint, slabs
from resharding.checkpoint.sums import Bits
from resharding.listing import Tensor

_FLOATS: dict[str, Any] = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What is different about one tensor."""

    key: str
    what: str
    """``only in A``, ``only in B``, ``shape``, ``dtype`` or ``values``"""
    detail: str
    num_different: int = 0
    """elements whose bits differ"""
    max_abs: float | None = None
    """largest difference of two elements; none for what are no numbers"""

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` shows."""
        return dataclasses.asdict(self)


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    """Yield what is different, tensor by tensor in the order of A. Tensors whose digests agree are not read."""
    theirs = {tensor.key: tensor for tensor in b.index.whole}
    for tensor in a.index.whole:
        other = theirs.pop(tensor.key, None)
        if other is None:
            yield Difference(key=tensor.key, what="only in A", detail=_described(tensor))
        elif tensor.global_shape != other.global_shape or tensor.dtype != other.dtype:
            what = "dtype" if tensor.global_shape == other.global_shape else "shape"
            yield Difference(key=tensor.key, what=what, detail=f"{_described(tensor)} in A, {_described(other)} in B")
        else:
            yield from _values(a, b, tensor)
    for tensor in theirs.values():
        yield Difference(key=tensor.key, what="only in B", detail=_described(tensor))


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.global_shape)}"


def _values(a: Checkpoint, b: Checkpoint, tensor: Tensor) -> Iterator[Difference]:
    """Compare part by part where both have the same parts, else the whole."""
    mine, others = a.index.entries_of(tensor.key), b.index.entries_of(tensor.key)
    if [(entry.key, entry.shape) for entry in mine] == [(entry.key, entry.shape) for entry in others]:
        for entry, other in zip(mine, others, strict=True):
            if entry.digest != other.digest:
                pairs = zip(a.slabs(entry), b.slabs(other), strict=True)
                yield from _counted(entry.key, entry.dtype, ((one, two) for (_, one), (_, two) in pairs), entry)
        return
    yield from _counted(tensor.key, tensor.dtype, _whole_slabs(a, b, tensor), None)


def _whole_slabs(a: Checkpoint, b: Checkpoint, tensor: Tensor) -> Iterator[tuple[Bits, Bits]]:
    dtype = bits_of(tensor.dtype)
    for start, size in slabs(tensor.global_shape, STAGING_BYTES // dtype.itemsize):
        one, two = np.empty(size, dtype=dtype), np.empty(size, dtype=dtype)
        a.read(tensor.key, start, one)
        b.read(tensor.key, start, two)
        yield one, two


def _counted(
    key: str, dtype: str, pairs: Iterator[tuple[Bits, Bits]], entry: Entry | None
) -> Iterator[Difference]:
    count, largest, total = 0, 0.0, 0
    for one, two in pairs:
        total += one.size
        differs = one != two
        count += int(differs.sum())
        if differs.any():
            gap = np.abs(numbers_of(one[differs], dtype) - numbers_of(two[differs], dtype))
            largest = max(largest, float(np.nan_to_num(gap, nan=math.inf).max()))
    if count or entry is not None:
        detail = f"{count} of {total} elements differ, by up to {largest:.6g}"
        yield Difference(key=key, what="values", detail=detail, num_different=count, max_abs=largest)


def numbers_of(bits: Bits, dtype: str) -> npt.NDArray[np.float64]:
    """Return elements as numbers."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype in _FLOATS:
        floats: npt.NDArray[np.float64] = bits.view(_FLOATS[dtype]).astype(np.float64)
        return floats
    signed = bits.view(f"int{8 * bits.itemsize}") if dtype.startswith("int") else bits
    return signed.astype(np.float64)
