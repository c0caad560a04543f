"""A 64-bit digest of a tensor that adds up, modulo 2**64, from digests of any boxes that tile it.

Every element, taken as the unsigned integer its bits are, is multiplied by an odd weight that is the product of one
weight for its index along each axis. So ranks that hold different boxes of a tensor each sum up their own, a layout
leaves no trace in the result, and a box need not be contiguous. One changed element always changes the sum; several
do but for a chance of about ``2**-32`` at worst. It tells apart accidents, not attacks.

The weight of index ``i`` along axis ``a`` (from 0) is ``mix((i + 1) * GOLDEN ^ mix(a + 1)) | 1`` with splitmix64's
``mix``; elements of 8 bytes are first folded, ``x ^ (x >> 32)``. Needs no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.unsignedinteger[Any]]
"""elements as unsigned integers of their own width"""

BITS: dict[int, np.dtype[Any]] = {n: np.dtype(f"uint{8 * n}") for n in (1, 2, 4, 8)}
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 17
"""elements that are widened to 64 bits at once: they stay in the cache"""
_TABLE = 1 << 16
"""weights of an axis that are kept"""


def digest_of(data: Bits, offset: Sequence[int]) -> int:
    """Return the digest of the box whose first element has the global index ``offset``; ``data`` is C-contiguous.

    Digests of boxes that tile a tensor add up, modulo 2**64, to that of the whole, at offset 0.
    """
    if not data.size:
        return 0
    if data.ndim == 0:
        return int(_folded(data.reshape(1).astype(np.uint64))[0])
    rows = data.reshape(-1, data.shape[-1])
    sums = _along_last(rows, weights(data.ndim - 1, offset[-1], offset[-1] + data.shape[-1]))
    for axis in range(data.ndim - 2, -1, -1):
        size = data.shape[axis]
        sums = sums.reshape(-1, size) @ weights(axis, offset[axis], offset[axis] + size)
    return int(sums.reshape(-1)[0])


def total(digests: Sequence[int]) -> int:
    """Add up digests of boxes."""
    return sum(digests) % 2**64


def weights(axis: int, start: int, stop: int) -> Words:
    """Return the weights of indexes ``[start, stop)`` along an axis."""
    if stop <= _TABLE:
        return _table(axis)[start:stop]
    return _weights(axis, start, stop)


@functools.lru_cache(maxsize=16)
def _table(axis: int) -> Words:
    return _weights(axis, 0, _TABLE)


def _weights(axis: int, start: int, stop: int) -> Words:
    salt = _mixed(np.array([axis + 1], dtype=np.uint64))
    return _mixed((np.arange(start + 1, stop + 1, dtype=np.uint64) * _GOLDEN) ^ salt) | np.uint64(1)


def _mixed(words: Words) -> Words:
    """Follow splitmix64's finalizer."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _folded(words: Words) -> Words:
    return words ^ (words >> np.uint64(32))


def _along_last(rows: Bits, weight: Words) -> Words:
    """Return the weighted sum of each row."""
    num_rows, size = rows.shape
    sums = np.zeros(num_rows, dtype=np.uint64)
    wide = rows.itemsize == 8
    width = min(size, _CHUNK)
    height = min(num_rows, max(1, _CHUNK // width))
    staged = np.empty((height, width), dtype=np.uint64)  # one for all: fresh pages cost more than the sums
    for row in range(0, num_rows, height):
        for at in range(0, size, width):
            box = rows[row : row + height, at : at + width]
            words = staged[: box.shape[0], : box.shape[1]]
            np.copyto(words, box)
            if wide:
                words ^= words >> np.uint64(32)
            sums[row : row + height] += np.einsum("ij,j->i", words, weight[at : at + width])
    return sums
