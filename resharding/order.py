"""In which order layers move, if each is given back before the next one comes.

While a layer moves, a rank has its old and its new share of it. Two ranks that exchange their pipeline stages must
not both receive first: so the order is chosen such that no rank goes further than need be beyond the larger of its
two states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resharding.assign import layer_of
from resharding.listing import Listing
from resharding.ranges import Ints

Layer = tuple[tuple[str, int], ...]
"""What ``layer_of`` makes of a key."""


def order_of_layers(old: Sequence[Listing], new: Sequence[Listing]) -> dict[Layer, int]:
    """Return the turn of every layer of both worlds, the same on every rank.

    Arguments are indexed by rank. A rank's bound is the larger of its two states. Each turn goes to a layer during
    which no rank is further beyond its bound than the largest layer, if there is one; among those to one after which
    the rank that is worst off is the least beyond it; among equals to the first by name.
    """
    blocks = {id(block): block for side in (old, new) for listing in side for block, _ in listing.entries}
    names = sorted({layer_of(unit[0].key) for block in blocks.values() for unit in block.units})
    numbers = {name: number for number, name in enumerate(names)}
    pairs: dict[tuple[int, ...], int] = {}
    shares: list[tuple[Ints, Ints]] = []
    cache: dict[tuple[int, int], Ints] = {}
    of_unit = {
        ident: np.array([numbers[layer_of(unit[0].key)] for unit in block.units], dtype=np.int64)
        for ident, block in blocks.items()
    }

    def share(listing: Listing) -> Ints:
        total = np.zeros(len(names), dtype=np.int64)
        for block, index in listing.entries:
            found = cache.get((id(block), index))
            if found is None:
                found = np.zeros(len(names), dtype=np.int64)
                np.add.at(found, of_unit[id(block)], block.bytes_of_units(index))
                cache[id(block), index] = found
            total += found
        return total

    for before, after in zip(old, new, strict=True):
        name = tuple(v for side in (before, after) for block, index in side.entries for v in (id(block), index))
        if pairs.setdefault((len(before.entries), *name), len(shares)) == len(shares):
            shares.append((share(before), share(after)))
    turns: dict[Layer, int] = {}
    if not names:
        return turns
    goes = np.unique(np.array([np.concatenate(pair) for pair in shares]), axis=0)
    out, come = goes[:, : len(names)], goes[:, len(names) :]
    held = out.sum(axis=1)
    bound = np.maximum(held, come.sum(axis=1))
    largest = int(goes.max())
    left = np.arange(len(names))
    while len(left):
        during = come[:, left] + (held - bound)[:, None]
        after = np.maximum((during - out[:, left]).max(axis=0), 0)
        too_much = np.maximum(during.max(axis=0) - largest, 0)
        layer = int(left[np.lexsort((left, after, too_much))[0]])
        turns[names[layer]] = len(turns)
        held = held + come[:, layer] - out[:, layer]
        left = left[left != layer]
    return turns


