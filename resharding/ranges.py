"""Flat ranges and hyper-rectangles by the million: the arithmetic of ``boxes`` on numpy arrays.

Everywhere here ``n`` rows of ``D`` axes are int64 arrays of shape ``(n, D)``; axes that a tensor does not have
stand at the end, with offset 0 and size 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

class BoxRows(NamedTuple):
    """Boxes as columns."""

    unit: Ints
    """what each is a box of, ``(n,)``; only boxes of one unit overlap"""
    offset: Ints
    """``(n, D)``"""
    size: Ints
    """``(n, D)``"""


_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def cut_ranges(shape: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut elements ``[start, stop)`` of C-contiguous tensors into boxes, as ``flat_range_boxes`` does.

    ``shape`` is ``(n, D)``, ``start`` and ``stop`` are ``(n,)``. Returns ``(row, offset, size)``: the row each
    box belongs to, ``(m,)``, and the boxes, ``(m, D)``, row by row and in flat order within a row.
    """
    num_axes = shape.shape[1]
    rows: list[Ints] = []
    offsets: list[Ints] = []
    sizes: list[Ints] = []
    firsts: list[Ints] = []
    live = np.flatnonzero(start < stop)
    row, low, high, base = live, start[live], stop[live], start[live]
    prefix = np.zeros((len(live), num_axes), dtype=np.int64)
    for axis in range(num_axes):
        slab = shape[row, axis + 1 :].prod(axis=1)
        first, head = np.divmod(low, slab)
        last, tail = np.divmod(high, slab)
        inside = first == last
        ragged_head = ~inside & (head > 0)
        ragged_tail = ~inside & (tail > 0)
        begin = first + ragged_head
        whole = ~inside & (begin < last)
        if whole.any():
            offset = prefix[whole]
            offset[:, axis] = begin[whole]
            size = np.ones_like(offset)
            size[:, axis] = (last - begin)[whole]
            size[:, axis + 1 :] = shape[row[whole], axis + 1 :]
            rows.append(row[whole])
            offsets.append(offset)
            sizes.append(size)
            firsts.append(base[whole] + (begin * slab - low)[whole])
        descents = (
            (inside, first, head, tail, base),
            (ragged_head, first, head, slab, base),
            (ragged_tail, last, np.zeros_like(tail), tail, base + last * slab - low),
        )
        into = [np.flatnonzero(mask) for mask, *_ in descents]
        new_prefix = []
        for picked, (_, at, *_rest) in zip(into, descents, strict=True):
            part = prefix[picked]
            part[:, axis] = at[picked]
            new_prefix.append(part)
        prefix = np.concatenate(new_prefix)
        low = np.concatenate([d[2][p] for p, d in zip(into, descents, strict=True)])
        high = np.concatenate([d[3][p] for p, d in zip(into, descents, strict=True)])
        base = np.concatenate([d[4][p] for p, d in zip(into, descents, strict=True)])
        row = np.concatenate([row[p] for p in into])
        if not len(row):
            break
    if len(row):  # down to single elements
        rows.append(row)
        offsets.append(prefix)
        sizes.append(np.ones_like(prefix))
        firsts.append(base)
    if not rows:
        empty = np.zeros((0, num_axes), dtype=np.int64)
        return np.zeros(0, dtype=np.int64), empty, empty
    all_rows = np.concatenate(rows)
    order = np.lexsort((np.concatenate(firsts), all_rows))
    return all_rows[order], np.concatenate(offsets)[order], np.concatenate(sizes)[order]


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """Return ``(row, number)`` for ``counts[row]`` entries of each row, numbered from 0 within it."""
    row = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    return row, np.arange(len(row)) - np.repeat(ends - counts, counts)


def measure(unit: Ints, offset: Ints, size: Ints) -> Words:
    """Return a number per box that adds up, modulo 2**64, as volume does, but over signed random weights.

    Boxes of one ``unit`` cover another box exactly once each if, and but for a chance of about ``2**-58``
    only if, their measures add up to that box's. The weights are fixed, so every rank sees the same.
    """
    total = _mixed(unit.astype(np.uint64) + np.uint64(1))
    for axis in range(offset.shape[1]):
        salt = np.uint64((axis + 1) * 0xD6E8FEB86659FD93 % 2**64)
        ends = (offset[:, axis] + size[:, axis]).astype(np.uint64)
        total = total * (_mixed(ends ^ salt) - _mixed(offset[:, axis].astype(np.uint64) ^ salt))
    return total


def _mixed(words: Words) -> Words:
    """Follow splitmix64."""
    mixed: Words = words * np.uint64(_GOLDEN)
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def add_up(index: Ints, values: Words, length: int) -> Words:
    """Sum ``values`` modulo 2**64 per index below ``length``."""
    sums = np.zeros(length, dtype=np.uint64)
    np.add.at(sums, index, values)
    return sums


def group_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Group equal rows of equally long columns, each ``(n,)`` or ``(n, k)``.

    Returns ``(first, group)``: a row of each group, groups in ascending order of their values, first column
    first; and the group of every row.
    """
    keys: list[Any] = []
    for column in columns:
        keys.extend(column.T if column.ndim == 2 else [column])
    order = np.lexsort(keys[::-1])
    if not len(order):
        return order, order
    differs = np.zeros(len(order), dtype=bool)
    differs[0] = True
    for key in keys:
        ordered = key[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.cumsum(differs) - 1
    return order[differs], group


def matches(one: BoxRows, other: BoxRows, num_units: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return every overlap of a box of ``one`` with one of ``other``, within one unit of ``num_units``.

    Gives ``(index, other_index, offset, size)``, ordered by index and then by where the other box starts. Boxes
    of ``other`` are looked up by their position on the axis along which their unit is cut most often.
    """
    unit, offset, size = one
    other_unit, other_offset, other_size = other
    num_axes = offset.shape[1]
    if not len(unit) or not len(other_unit):
        none = np.zeros(0, dtype=np.int64)
        return none, none, np.zeros((0, num_axes), dtype=np.int64), np.zeros((0, num_axes), dtype=np.int64)
    sweep = _most_cut_axis(other_unit, other_offset, num_units)
    rows, other_rows = np.arange(len(unit)), np.arange(len(other_unit))
    low, other_low = offset[rows, sweep[unit]], other_offset[other_rows, sweep[other_unit]]
    high = low + size[rows, sweep[unit]]
    longest = np.zeros(num_units, dtype=np.int64)
    other_length = other_size[other_rows, sweep[other_unit]]
    np.maximum.at(longest, other_unit, other_length)
    ordered = np.lexsort((*(other_offset[:, axis] for axis in reversed(range(num_axes))), other_low, other_unit))
    units, lows = other_unit[ordered], other_low[ordered]
    width = int(max(lows.max(initial=0), high.max(initial=0))) + 1
    assert num_units * width < 2**63
    keys = units * width + lows
    first = np.searchsorted(keys, unit * width + np.maximum(low - longest[unit] + 1, 0))
    last = np.searchsorted(keys, unit * width + high)
    index, number = expand(last - first)
    found = ordered[first[index] + number]
    keep = np.ones(len(index), dtype=bool)
    for axis in range(num_axes):
        a, b = offset[index, axis], other_offset[found, axis]
        keep &= (a < b + other_size[found, axis]) & (b < a + size[index, axis])
    index, found = index[keep], found[keep]
    start = np.maximum(offset[index], other_offset[found])
    stop = np.minimum(offset[index] + size[index], other_offset[found] + other_size[found])
    return index, found, start, stop - start


def _most_cut_axis(unit: Ints, offset: Ints, num_units: int) -> Ints:
    """Return for each unit the axis on which its boxes start at the most different places."""
    counts = np.zeros((num_units, offset.shape[1]), dtype=np.int64)
    for axis in range(offset.shape[1]):
        order = np.lexsort((offset[:, axis], unit))
        units, starts = unit[order], offset[order, axis]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (units[1:] != units[:-1]) | (starts[1:] != starts[:-1])
        counts[:, axis] = np.bincount(units[new], minlength=num_units)
    axes: Ints = counts.argmax(axis=1)
    return axes
