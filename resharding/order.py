"""In which order layers move, if each is given back before the next one comes.

While a layer moves, a rank has its old and its new share of it. Two ranks that exchange their pipeline stages must
not both receive first: so the order is chosen such that no rank goes further than need be beyond the larger of its
two states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from resharding.assign import DROPPABLE, layer_of
from resharding.listing import Listing
from resharding.ranges import Ints

Layer = tuple[tuple[str, int], ...]
"""What ``layer_of`` makes of a key."""


def order_of_layers(old: Sequence[Listing], new: Sequence[Listing]) -> dict[Layer, int]:
    """Return the turn of every layer of both worlds, the same on every rank.

    Arguments are indexed by rank. A rank's bound is the larger of its two states. Each turn goes to a layer during
    which no rank is further beyond its bound than the largest layer, if there is one; among those to one after which
    the rank that is worst off is the least beyond it; among equals to the first by name. Random streams come last of
    equals: they may not move at all, and what is given back later rests on what the first layer has shown.
    """
    blocks = {id(block): block for side in (old, new) for listing in side for block, _ in listing.entries}
    keys = {unit[0].key for block in blocks.values() for unit in block.units}
    streams = {layer_of(key) for key in keys if key.startswith(DROPPABLE)}
    names = sorted(set(map(layer_of, keys)), key=lambda name: (name in streams, name))
    numbers = {name: number for number, name in enumerate(names)}
    indexes: dict[int, set[int]] = defaultdict(set)
    for side in (old, new):
        for listing in side:
            for block, index in listing.entries:
                indexes[id(block)].add(index)
    shares: dict[tuple[int, int], Ints] = {}
    for ident, found in indexes.items():
        block, asked = blocks[ident], sorted(found)
        number: Ints = np.array([numbers[layer_of(unit[0].key)] for unit in block.units], dtype=np.int64)
        rows = block.bytes_by(number, len(names), asked)
        shares.update({(ident, index): row for index, row in zip(asked, rows, strict=True)})
    out, come = (np.zeros((len(side), len(names)), dtype=np.int64) for side in (old, new))
    for side, total in ((old, out), (new, come)):
        for rank, listing in enumerate(side):
            for block, index in listing.entries:
                total[rank] += shares[id(block), index]
    turns: dict[Layer, int] = {}
    if not names:
        return turns
    goes = np.unique(np.concatenate([out, come], axis=1), axis=0)
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


