"""Numbers of boxes on their way to or from files, and digests of them. Needs no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from resharding.boxes import Shape
from resharding.checkpoint.format import Entry, Index
from resharding.checkpoint.sums import Bits, digest_of

Sums = Mapping[str, tuple[int, int]]
"""of every entry: digest, and bytes it is of"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The numbers of one box."""

    key: str
    """of the whole tensor"""
    offset: Shape
    data: Bits


def sums_of(
    index: Index, parts: Iterable[Part], *, sink: Callable[[Entry, Shape, Bits], None] | None = None
) -> dict[str, tuple[int, int]]:
    """Return digest and bytes of every entry that ``parts`` hold something of; ``sink`` is shown each slice."""
    digests: dict[str, int] = defaultdict(int)
    nbytes: dict[str, int] = defaultdict(int)
    for part in parts:
        for entry, offset, data in slices_of(index, part):
            if sink is not None:
                sink(entry, offset, data)
            digests[entry.key] = (digests[entry.key] + digest_of(data, offset)) % 2**64
            nbytes[entry.key] += data.nbytes
    return {key: (digests[key], nbytes[key]) for key in digests}


def slices_of(index: Index, part: Part) -> Iterator[tuple[Entry, Shape, Bits]]:
    """Yield where a part's numbers lie in files: the entry, the offset in it, and the numbers, C-contiguous."""
    for place in index.places(part.key, part.offset, part.data.shape):
        inside = tuple(slice(s, s + n) for s, n in zip(place.start, place.shape, strict=True))
        yield place.entry, place.offset, np.ascontiguousarray(part.data[inside]).reshape(place.entry_shape)


def add_sums(sides: Sequence[Sums]) -> dict[str, tuple[int, int]]:
    """Add up what ranks have."""
    found: dict[str, tuple[int, int]] = {}
    for side in sides:
        for key, (digest, nbytes) in side.items():
            before = found.get(key, (0, 0))
            found[key] = ((before[0] + digest) % 2**64, before[1] + nbytes)
    return found
