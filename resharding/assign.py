"""Which rank sends what to whom: the part of planning that has to be fast for thousands of ranks.

Every rank computes this alone and arrives at the same. It looks only at *components*: tensors that ranks of the old
world hold together, such as those of one pipeline stage. For a component it does the following.

1. Boxes that many ranks hold are taken once, with the set of their holders; overlapping ones are cut until each
   *cell* has one set of holders. Tensors whose boxes are always equal (a parameter's main values and moments) are
   one *unit* and are matched once.
2. Every target box is matched with the cells it overlaps. What its rank holds is copied locally. For the rest the
   holders on the same host are eligible if there are any, else all.
3. Bytes with one eligible holder are given to it. Then each set of eligible holders, smaller sets first, shares its
   bytes so that the loads of its members come out as even as possible (water-filling). Every layer is cut in the
   same proportions, within large slices where need be, so that all members send at all times.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from resharding.boxes import DTYPE_SIZES_BYTES, Shape, overlap, subtract
from resharding.listing import Block, Listing, Tensor
from resharding.ranges import Bools, BoxRows, Ints, add_up, cut_ranges, expand, group_rows, matches, measure

GRAIN_BYTES = 64 * 1024
"""Slices up to this size are not cut between replicas, larger ones at multiples of whole rows up to this size."""


DROPPABLE = ("rng/",)
"""Prefixes of keys that need no place in the new world: a stream of random numbers goes with a rank."""


class Unplannable(ValueError):  # noqa: N818 - reads as what it is
    """The new boxes cannot be filled from the old ones; the message names the key and says why."""


Unit = tuple[Tensor, ...]


@dataclass(frozen=True)
class Item:
    """One slice of a target piece, and the rank it comes from; -1 for zeros. Alike for all tensors of a unit."""

    unit: Unit
    source_rank: int
    target_rank: int
    target: PieceOf
    offset: Shape
    shape: Shape


@dataclass(frozen=True)
class PieceOf:
    """A row of a listing on one rank: a piece for each tensor of its unit, at ascending indexes."""

    position: int
    """of the block in the rank's listing"""
    first: int
    """index of the first piece, counted from the block's first"""
    offset: Shape
    shape: Shape


@dataclass(frozen=True)
class Assignment:
    """What concerns the ranks asked for."""

    items: list[Item]
    held: dict[int, dict[Unit, list[PieceOf]]]
    """the pieces of the old world by rank, for the ranks asked for"""


def natural(key: str) -> tuple[object, ...]:
    """Split ``kind/name`` so that names come before kinds and numbers sort as numbers."""
    kind, _, name = key.rpartition("/")
    return (*_numbered(name), kind)


def _numbered(name: str) -> tuple[tuple[tuple[str, int], ...]]:
    parts = re.split(r"(\d+)", name)
    return (tuple((part, 0) if i % 2 == 0 else ("", int(part)) for i, part in enumerate(parts)),)


def layer_of(key: str) -> tuple[tuple[str, int], ...]:
    """Return what sorts layers as they follow each other: the name up to its first number, or all of it."""
    return _numbered(key.rpartition("/")[2])[0][:2]


def assign(
    old: Sequence[Listing], new: Sequence[Listing], hosts: Sequence[str], only: Sequence[int]
) -> Assignment:
    """Choose a source for every element that a rank of ``only`` needs, or holds and another rank needs.

    Arguments are indexed by rank. Raises ``Unplannable``.
    """
    before, after = _tensors(old, "old"), _tensors(new, "new")
    _check(before, after)
    keys = _relevant_keys(old, new, only, len(before))
    table = _Units([*old, *new], keys)
    held, needed = _Side(old, table), _Side(new, table)
    items: list[Item] = []
    if table.units:
        items.extend(_Matcher(table, held, needed, hosts=hosts, only=only, before=before).items())
    mine = {rank: held.pieces_of(rank) for rank in only}
    return Assignment(items, mine)


def _tensors(side: Sequence[Listing], name: str) -> dict[str, Tensor]:
    """Return every tensor of a side; raises ``Unplannable`` if two ranks disagree on one."""
    found: dict[str, Tensor] = {}
    for block in {id(block): block for listing in side for block, _ in listing.entries}.values():
        for unit in block.units:
            for tensor in unit:
                first = found.setdefault(tensor.key, tensor)
                if first is not tensor and first != tensor:
                    raise Unplannable(
                        f"{tensor.key}: ranks of the {name} world disagree, {first.dtype} {first.global_shape} "
                        f"and {tensor.dtype} {tensor.global_shape}"
                    )
    return found


def _check(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Raise ``Unplannable`` unless both sides agree on each tensor, and every old key has a place."""
    for key, tensor in after.items():
        source = before.get(key)
        if source is None:
            raise Unplannable(f"{key}: the old world holds nothing of it")
        if source.dtype != tensor.dtype:
            raise Unplannable(f"{key}: is {source.dtype} in the old world, {tensor.dtype} in the new one")
        flexible = source.padded and tensor.padded and len(source.global_shape) == len(tensor.global_shape)
        if source.global_shape != tensor.global_shape and not flexible:
            raise Unplannable(
                f"{key}: has shape {source.global_shape} in the old world, "
                f"{tensor.global_shape} in the new one"
            )
    for key in before:
        if key not in after and not key.startswith(DROPPABLE):
            raise Unplannable(f"{key}: the new world has no place for it")


def _relevant_keys(
    old: Sequence[Listing], new: Sequence[Listing], only: Sequence[int], num_keys: int
) -> set[str]:
    """Return the keys of all components that a rank of ``only`` holds or needs something of."""
    parent: dict[object, object] = {}

    def root(node: object) -> object:
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = parent[above]
            node = above
        return node

    blocks = {id(block): block for listing in old for block, _ in listing.entries}
    keys_of = {ident: [t.key for unit in block.units for t in unit] for ident, block in blocks.items()}
    for ident, keys in keys_of.items():
        top = root(ident)
        for key in keys:
            parent[root(key)] = top
    for idents in {tuple(id(block) for block, _ in listing.entries) for listing in old}:
        for ident in idents[1:]:
            parent[root(ident)] = root(idents[0])
    wanted = {root(id(block)) for rank in only for block, _ in old[rank].entries}
    needed = {id(block): block for rank in only for block, _ in new[rank].entries}
    wanted |= {root(t.key) for block in needed.values() for unit in block.units for t in unit}
    found = {key for ident, keys in keys_of.items() if root(ident) in wanted for key in keys}
    assert len(found) <= num_keys
    return found


class _Units:
    """The units of the relevant keys, in the order in which their state moves."""

    def __init__(self, listings: Iterable[Listing], keys: set[str]) -> None:
        blocks = {id(block): block for listing in listings for block, _ in listing.entries}
        units: dict[tuple[str, ...], Unit] = {}
        for block in blocks.values():
            for unit in block.units:
                if unit[0].key in keys:
                    units.setdefault(tuple(tensor.key for tensor in unit), unit)
        single = _keys_apart(units)
        final: dict[tuple[str, ...], Unit] = {}
        for names, unit in units.items():
            if names[0] in single:
                final.update({(tensor.key,): (tensor,) for tensor in unit})
            else:
                final[names] = unit
        places = {names: natural(names[0]) for names in final}
        self.units: list[Unit] = [final[names] for names in sorted(final, key=lambda names: places[names])]
        self.index = {tuple(tensor.key for tensor in unit): i for i, unit in enumerate(self.units)}
        self.keys = keys
        self.single = single
        self.bytes_per_element: Ints = np.array(
            [sum(DTYPE_SIZES_BYTES[tensor.dtype] for tensor in unit) for unit in self.units], dtype=np.int64
        )
        layers: dict[object, int] = {}
        self.layer: Ints = np.array(
            [layers.setdefault(layer_of(unit[0].key), len(layers)) for unit in self.units], dtype=np.int64
        )
        self.num_axes = max((block.num_axes for block in blocks.values()), default=1)

    def numbers(self, block: Block) -> Iterator[tuple[int, Ints]]:
        """Yield ``(kind, index)``: for each unit of the block its index here, -1 if irrelevant or not so.

        Kinds are told apart only for units that do not stay together.
        """
        together = [self.index.get(tuple(t.key for t in unit), -1) for unit in block.units]
        yield 0, np.array(together, dtype=np.int64)
        apart = block.num_kinds > 1 and any(unit[0].key in self.single for unit in block.units)
        for kind in range(block.num_kinds if apart else 0):
            found = [
                self.index.get((unit[kind].key,), -1) if unit[0].key in self.single else -1 for unit in block.units
            ]
            yield kind, np.array(found, dtype=np.int64)


def _keys_apart(units: Iterable[tuple[str, ...]]) -> set[str]:
    """Return keys whose tensors are together with others in one unit, but not so in another."""
    unit_of: dict[str, tuple[str, ...]] = {}
    apart: set[str] = set()
    listed = list(units)
    for names in listed:
        for name in names:
            if unit_of.setdefault(name, names) != names:
                apart.update(names)
                apart.update(unit_of[name])
    while True:
        more = {name for names in listed if not apart.isdisjoint(names) for name in names} - apart
        if not more:
            return apart
        apart |= more


class _Side:
    """The boxes of one world within the relevant units; boxes with a block and index in common stand once."""

    def __init__(self, listings: Sequence[Listing], table: _Units) -> None:
        self._table = table
        placed: dict[tuple[int, int], int] = {}
        self.ranks: list[list[int]] = []
        """of each place (a block at an index): the ranks that have it"""
        self.positions: list[list[int]] = []
        """and where in their listings"""
        indexes: dict[int, tuple[Block, list[int], list[int]]] = {}
        self.num_ranks = len(listings)
        self._places_of: dict[int, list[int]] = defaultdict(list)
        for rank, listing in enumerate(listings):
            for position, (block, index) in enumerate(listing.entries):
                place = placed.get((id(block), index))
                if place is None:
                    place = placed[id(block), index] = len(placed)
                    self.ranks.append([])
                    self.positions.append([])
                    _, its_indexes, places = indexes.setdefault(id(block), (block, [], []))
                    its_indexes.append(index)
                    places.append(place)
                self.ranks[place].append(rank)
                self.positions[place].append(position)
                self._places_of[rank].append(place)
        columns: list[tuple[Ints, ...]] = [self._empty()]
        for block, its_indexes, places in indexes.values():
            numbers = [(kind, number) for kind, number in table.numbers(block) if (number >= 0).any()]
            if numbers:
                columns.extend(self._columns(block, its_indexes, np.array(places), numbers))
        joined = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
        self.place, self.unit, self.first, self.offset, self.size = joined

    def _empty(self) -> tuple[Ints, ...]:
        none = np.zeros(0, dtype=np.int64)
        wide = np.zeros((0, self._table.num_axes), dtype=np.int64)
        return none, none, none, wide, wide

    def _columns(
        self, block: Block, indexes: list[int], places: Ints, numbers: list[tuple[int, Ints]]
    ) -> Iterator[tuple[Ints, ...]]:
        rows = block.rows(indexes)
        starts = np.searchsorted(rows.which, np.arange(len(indexes)))
        first = (np.arange(len(rows.which)) - starts[rows.which]) * block.num_kinds
        missing = self._table.num_axes - rows.offset.shape[1]
        offset = np.pad(rows.offset, ((0, 0), (0, missing)))
        size = np.pad(rows.size, ((0, 0), (0, missing)), constant_values=1)
        filled = size.min(axis=1) > 0
        for kind, number in numbers:
            unit = number[rows.unit]
            keep = filled & (unit >= 0)
            yield places[rows.which][keep], unit[keep], first[keep] + kind, offset[keep], size[keep]

    def pieces_of(self, rank: int) -> dict[Unit, list[PieceOf]]:
        """Return the rows of one rank by unit."""
        found: dict[Unit, list[PieceOf]] = defaultdict(list)
        for place in self._places_of.get(rank, ()):
            at = self.ranks[place].index(rank)
            for row in self._rows_at(place):
                found[self._table.units[int(self.unit[row])]].append(self.piece(int(row), self.positions[place][at]))
        return found

    def _rows_at(self, place: int) -> Ints:
        if not hasattr(self, "_order"):
            self._order: Ints = np.argsort(self.place, kind="stable")
            self._sorted: Ints = self.place[self._order]
        low, high = np.searchsorted(self._sorted, [place, place + 1])
        return self._order[low:high]

    def piece(self, row: int, position: int) -> PieceOf:
        """Return a row as a piece of the rank that has its block at ``position``."""
        ndim = len(self._table.units[int(self.unit[row])][0].global_shape)
        offset, size = self.offset[row].tolist(), self.size[row].tolist()
        return PieceOf(position, int(self.first[row]), tuple(offset[:ndim]), tuple(size[:ndim]))


class _Sets:
    """Sets of ranks, each with a number."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._index: dict[tuple[int, ...], int] = {}
        self.members: list[tuple[int, ...]] = []

    def number(self, ranks: Iterable[int]) -> int:
        """Return the number of a set."""
        members = tuple(sorted(set(ranks)))
        number = self._index.setdefault(members, len(self.members))
        if number == len(self.members):
            self.members.append(members)
        return number

    def matrix(self) -> Bools:
        """Return who is in which set, ``(sets, ranks)``."""
        matrix = np.zeros((len(self.members), self._num_ranks), dtype=bool)
        for number, members in enumerate(self.members):
            matrix[number, list(members)] = True
        return matrix


@dataclass(frozen=True)
class _Cells:
    """Disjoint boxes of the old world, each with the set of ranks that hold it."""

    unit: Ints
    offset: Ints
    size: Ints
    holders: Ints
    """number of the set"""


@dataclass(frozen=True)
class _Needs:
    """Slices that ranks need: one entry for each slice of each target piece."""

    unit: Ints
    offset: Ints
    size: Ints
    holders: Ints
    """number of the set of ranks that have it"""
    rank: Ints
    row: Ints
    """of the target side"""
    position: Ints

    def take(self, picked: Ints | Bools) -> _Needs:
        """Return some of the entries."""
        return _Needs(*(getattr(self, name)[picked] for name in self.__dataclass_fields__))


class _Matcher:
    """The cells and needs of the relevant units, and who serves whom."""

    def __init__(
        self,
        table: _Units,
        held: _Side,
        needed: _Side,
        *,
        hosts: Sequence[str],
        only: Sequence[int],
        before: dict[str, Tensor],
    ) -> None:
        self._table = table
        self._needed = needed
        self._only: Bools = np.zeros(len(hosts), dtype=bool)
        self._only[list(only)] = True
        names = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
        self._host: Ints = np.array([names[host] for host in hosts], dtype=np.int64)
        self._sets = _Sets(len(hosts))
        self._extent: Ints = np.ones((len(table.units), table.num_axes), dtype=np.int64)
        for number, unit in enumerate(table.units):
            shape = before[unit[0].key].global_shape
            self._extent[number, : len(shape)] = shape
        self._cells = self._disjoint(self._distinct(held))

    # --- cells ---

    def _distinct(self, held: _Side) -> _Cells:
        """Return every box of the old world once, with all its holders."""
        first, group = group_rows(held.unit, held.offset, held.size)
        set_of_place: Ints = np.array([self._sets.number(ranks) for ranks in held.ranks], dtype=np.int64)
        holders = set_of_place[held.place[first]]
        count = np.bincount(group, minlength=len(first))
        shared = np.flatnonzero(count[group] > 1)
        places: dict[int, set[int]] = defaultdict(set)
        for which, place in zip(group[shared].tolist(), held.place[shared].tolist(), strict=True):
            places[which].add(place)
        known: dict[frozenset[int], int] = {}
        for which, found in places.items():
            name = frozenset(found)
            if name not in known:
                known[name] = self._sets.number(rank for place in found for rank in held.ranks[place])
            holders[which] = known[name]
        return _Cells(held.unit[first], held.offset[first], held.size[first], holders)

    def _disjoint(self, cells: _Cells) -> _Cells:
        """Cut overlapping boxes until each has one set of holders."""
        num_units = len(self._table.units)
        everything = measure(np.arange(num_units), np.zeros_like(self._extent), self._extent)
        sums = add_up(cells.unit, measure(cells.unit, cells.offset, cells.size), num_units)
        open_ = np.flatnonzero((sums != everything)[cells.unit])  # boxes of the others tile their tensor
        if not len(open_):
            return cells
        boxes_open = BoxRows(cells.unit[open_], cells.offset[open_], cells.size[open_])
        one, other, _, _ = matches(boxes_open, boxes_open, num_units)
        keep = np.ones(len(cells.unit), dtype=bool)
        new: list[tuple[int, Shape, Shape, int]] = []
        for cluster in _clusters(open_[one[one < other]], open_[other[one < other]]):
            keep[cluster] = False
            unit = int(cells.unit[cluster[0]])
            boxes = [
                (tuple(cells.offset[i].tolist()), tuple(cells.size[i].tolist()), int(cells.holders[i]))
                for i in cluster
            ]
            new.extend((unit, *cell) for cell in self._cut_up(boxes))
        if not new:
            return cells
        columns = [np.array(column, dtype=np.int64) for column in zip(*new, strict=True)]
        olds = (cells.unit, cells.offset, cells.size, cells.holders)
        return _Cells(*(np.concatenate([was[keep], add]) for was, add in zip(olds, columns, strict=True)))

    def _cut_up(self, boxes: Sequence[tuple[Shape, Shape, int]]) -> list[tuple[Shape, Shape, int]]:
        cells: list[tuple[Shape, Shape, int]] = []
        for offset, size, holders in boxes:
            rest = [(offset, size)]
            found: list[tuple[Shape, Shape, int]] = []
            for cell in cells:
                common = overlap(offset, size, cell[0], cell[1])
                if common is None:
                    found.append(cell)
                    continue
                members = (*self._sets.members[cell[2]], *self._sets.members[holders])
                found.append((*common, self._sets.number(members)))
                found.extend((*part, cell[2]) for part in subtract(cell[0], cell[1], *common))
                rest = _without(rest, common)
            cells = found + [(*part, holders) for part in rest]
        return cells

    # --- needs ---

    def items(self) -> Iterator[Item]:
        """Yield every slice that concerns the ranks asked for."""
        needed, cells = self._needed, self._cells
        first, group = group_rows(needed.unit, needed.offset, needed.size)
        unit, offset, size = needed.unit[first], needed.offset[first], needed.size[first]
        real = np.maximum(np.minimum(offset + size, self._extent[unit]) - offset, 0)
        yield from self._fills((real != size).any(axis=1)[group], real[group])
        exists = np.flatnonzero(real.min(axis=1) > 0)
        wanted = BoxRows(unit[exists], offset[exists], real[exists])
        held = BoxRows(cells.unit, cells.offset, cells.size)
        target, cell, start, length = matches(wanted, held, len(self._table.units))
        slices = BoxRows(wanted.unit[target], start, length)
        self._check_covered(wanted, target, slices)
        needs = self._needs(group, exists[target], cells.holders[cell], slices)
        local = self._sets.matrix()[needs.holders, needs.rank]
        mine = needs.take(local & self._only[needs.rank])
        yield from self._emit(mine, mine.rank, mine.offset, mine.size)
        yield from self._served(needs.take(~local))

    def _fills(self, short: Bools, real: Ints) -> Iterator[Item]:
        """Yield what the target rows marked have beyond the old world's tensor."""
        for row in np.flatnonzero(short).tolist():
            place = int(self._needed.place[row])
            ranks = zip(self._needed.ranks[place], self._needed.positions[place], strict=True)
            for rank, position in ranks:
                if not self._only[rank]:
                    continue
                piece = self._needed.piece(row, position)
                filled = tuple(real[row].tolist()[: len(piece.shape)])
                padding: Iterable[tuple[Shape, Shape]] = [(piece.offset, piece.shape)]
                if 0 not in filled:
                    padding = subtract(piece.offset, piece.shape, piece.offset, filled)
                unit = self._table.units[int(self._needed.unit[row])]
                for offset, shape in padding:
                    yield Item(unit, -1, rank, piece, offset, shape)

    def _check_covered(self, wanted: BoxRows, target: Ints, slices: BoxRows) -> None:
        """Raise ``Unplannable`` unless the slices, each of its ``target``, cover each target exactly once."""
        found = add_up(target, measure(*slices), len(wanted.unit))
        bad = np.flatnonzero(measure(*wanted) != found)
        if not len(bad):
            return
        which = int(bad[0])
        tensor = self._table.units[int(wanted.unit[which])][0]
        ndim = len(tensor.global_shape)
        missing = [(tuple(wanted.offset[which].tolist()), tuple(wanted.size[which].tolist()))]
        for row in np.flatnonzero(target == which).tolist():
            hole = (tuple(slices.offset[row].tolist()), tuple(slices.size[row].tolist()))
            missing = _without(missing, hole)
        assert missing, f"{tensor.key}: cells overlap"
        at, shape = missing[0][0][:ndim], missing[0][1][:ndim]
        raise Unplannable(
            f"{tensor.key}: no rank of the old world holds the elements at {at} of shape {shape}"
        )

    def _needs(self, group: Ints, target: Ints, holders: Ints, slices: BoxRows) -> _Needs:
        """Give every slice of a distinct target box to every piece that is that box, on every rank."""
        num_groups = int(group.max(initial=-1)) + 1
        order = np.argsort(group, kind="stable")
        begin = np.searchsorted(group[order], np.arange(num_groups + 1))
        pair, number = expand((begin[1:] - begin[:-1])[target])
        row = order[begin[target[pair]] + number]
        place = self._needed.place[row]
        counts = np.array([len(ranks) for ranks in self._needed.ranks], dtype=np.int64)
        ranks = np.array([rank for its in self._needed.ranks for rank in its], dtype=np.int64)
        positions = np.array([position for its in self._needed.positions for position in its], dtype=np.int64)
        starts = np.cumsum(counts) - counts
        inner, number = expand(counts[place])
        at = starts[place[inner]] + number
        row, pair = row[inner], pair[inner]
        return _Needs(
            slices.unit[pair], slices.offset[pair], slices.size[pair], holders[pair], ranks[at], row, positions[at]
        )

    # --- loads ---

    def _served(self, needs: _Needs) -> Iterator[Item]:
        """Choose who sends, and yield what concerns the ranks asked for."""
        eligible = self._eligible(needs)
        num_holders = np.array([len(members) for members in self._sets.members], dtype=np.int64)[eligible]
        only_holder = np.array([members[0] for members in self._sets.members], dtype=np.int64)[eligible]
        nbytes = needs.size.prod(axis=1) * self._table.bytes_per_element[needs.unit]
        loads = np.zeros(len(self._host), dtype=np.int64)
        single = num_holders == 1
        np.add.at(loads, only_holder[single], nbytes[single])
        mine = single & (self._only[needs.rank] | self._only[only_holder])
        chosen = needs.take(mine)
        yield from self._emit(chosen, only_holder[mine], chosen.offset, chosen.size)
        rows = np.flatnonzero(~single)
        if not len(rows):
            return
        rows = rows[np.argsort(eligible[rows], kind="stable")]
        numbers, begins = np.unique(eligible[rows], return_index=True)
        parts = dict(zip(numbers.tolist(), np.split(rows, begins[1:]), strict=True))
        for number in sorted(parts, key=lambda number: _by_size(self._sets, number)):
            share = needs.take(parts[number])
            order = np.lexsort(
                (share.position, self._needed.first[share.row], *share.offset.T[::-1], share.unit, share.rank)
            )
            yield from self._shared(share.take(order), np.array(self._sets.members[number]), loads)

    def _eligible(self, needs: _Needs) -> Ints:
        """Return the set of ranks that may serve each need: those on its host if there are any, else all."""
        eligible = needs.holders.copy()
        several = np.array([len(members) > 1 for members in self._sets.members], dtype=bool)
        rows = np.flatnonzero(several[needs.holders])
        host = self._host[needs.rank[rows]]
        first, group = group_rows(needs.holders[rows], host)
        near = np.zeros(len(first), dtype=np.int64)
        for i, row in enumerate(first.tolist()):
            holders = int(needs.holders[rows[row]])
            members: Ints = np.array(self._sets.members[holders], dtype=np.int64)
            close = members[self._host[members] == host[row]]
            near[i] = self._sets.number(close.tolist()) if len(close) else holders
        eligible[rows] = near[group]
        return eligible

    def _shared(self, needs: _Needs, members: Ints, loads: Ints) -> Iterator[Item]:
        """Cut the needs of one set of eligible holders between them, layer by layer; adds to ``loads``."""
        per_element = self._table.bytes_per_element[needs.unit]
        nbytes = needs.size.prod(axis=1) * per_element
        quota = _water_fill(loads[members], int(nbytes.sum()))
        total, done = int(nbytes.sum()), 0
        given = np.zeros(len(members), dtype=np.int64)
        layer = self._table.layer[needs.unit]
        by_layer = np.argsort(layer, kind="stable")
        begins = np.flatnonzero(np.diff(layer[by_layer], prepend=-1))
        for rows in np.split(by_layer, begins[1:]):
            done += int(nbytes[rows].sum())
            want = np.maximum(quota * (done / total) - given, 0)  # what was rounded before is made good
            bounds = _cut_points(want, nbytes[rows], per_element[rows], needs.size[rows])
            given += np.diff(bounds)
            yield from self._emit_cut(needs.take(rows), nbytes[rows], per_element[rows], bounds, members)
        loads[members] += given

    def _emit_cut(
        self, needs: _Needs, nbytes: Ints, per_element: Ints, bounds: Ints, members: Ints
    ) -> Iterator[Item]:
        """Yield a layer's needs, taken as one string of bytes; member ``i`` serves ``bounds[i:i+2]`` of it."""
        ends = np.cumsum(nbytes)
        points = np.unique(np.concatenate([[0], ends, bounds]))
        begin, stop = points[:-1], points[1:]
        row = np.searchsorted(ends, begin, side="right")
        sender = members[np.searchsorted(bounds[1:], begin, side="right")]
        mine = self._only[needs.rank[row]] | self._only[sender]
        row, sender = row[mine], sender[mine]
        base = ends[row] - nbytes[row]
        first, last = (begin[mine] - base) // per_element[row], (stop[mine] - base) // per_element[row]
        which, inner, shape = cut_ranges(needs.size[row], first, last)
        yield from self._emit(needs.take(row[which]), sender[which], needs.offset[row[which]] + inner, shape)

    def _emit(self, needs: _Needs, sender: Ints, offset: Ints, size: Ints) -> Iterator[Item]:
        columns = zip(
            needs.unit.tolist(), sender.tolist(), needs.rank.tolist(), needs.row.tolist(),
            needs.position.tolist(), offset.tolist(), size.tolist(), strict=True,
        )  # fmt: skip
        for number, source, target, row, position, at, shape in columns:
            unit = self._table.units[number]
            ndim = len(unit[0].global_shape)
            piece = self._needed.piece(row, position)
            yield Item(unit, source, target, piece, tuple(at[:ndim]), tuple(shape[:ndim]))


def _by_size(sets: _Sets, number: int) -> tuple[int, tuple[int, ...]]:
    """Return what sorts sets: smaller ones first, then by their members."""
    return len(sets.members[number]), sets.members[number]


def _without(
    parts: Sequence[tuple[Shape, Shape]], hole: tuple[Shape, Shape]
) -> list[tuple[Shape, Shape]]:
    """Return disjoint boxes that cover ``parts`` but for what lies in ``hole``."""
    rest: list[tuple[Shape, Shape]] = []
    for part in parts:
        common = overlap(*part, *hole)
        rest.extend([part] if common is None else subtract(*part, *common))
    return rest


def _clusters(one: Ints, other: Ints) -> Iterator[list[int]]:
    """Yield what hangs together by the given pairs, in ascending order."""
    parent: dict[int, int] = {}

    def root(node: int) -> int:
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = parent[above]
            node = above
        return node

    for a, b in zip(one.tolist(), other.tolist(), strict=True):
        parent[root(b)] = root(a)
    found: dict[int, list[int]] = defaultdict(list)
    for node in sorted(parent):
        found[root(node)].append(node)
    yield from found.values()


def _water_fill(loads: Ints, amount: int) -> npt.NDArray[np.float64]:
    """Share ``amount`` so that the largest of ``loads`` plus shares is as small as it can be."""
    ordered = np.sort(loads)
    below = np.cumsum(ordered)
    counts = np.arange(1, len(ordered) + 1)
    levels = (below + amount) / counts  # if only the lowest ``counts`` take part
    reached = int(np.argmax(np.append(levels[:-1] <= ordered[1:], True)))
    share: npt.NDArray[np.float64] = np.maximum(levels[reached] - loads, 0)
    return share


def _cut_points(want: npt.NDArray[np.float64], nbytes: Ints, per_element: Ints, size: Ints) -> Ints:
    """Cut a string of rows of ``nbytes`` in the proportions of ``want``, at places good to cut at.

    Returns ``len(want) + 1`` ascending positions in bytes, from 0 to the sum of ``nbytes``.
    """
    ends = np.cumsum(nbytes)
    total = int(ends[-1])
    scale = total / want.sum() if want.sum() else 0.0
    points = np.minimum(np.cumsum(want)[:-1] * scale, total - 1).astype(np.int64)
    row = np.searchsorted(ends, points, side="right")
    inner = points - (ends - nbytes)[row]
    slabs = np.cumprod(np.concatenate([np.ones_like(size[:, :1]), size[:, :0:-1]], axis=1), axis=1)
    fits = slabs * per_element[:, None] <= GRAIN_BYTES
    grain = np.where(fits, slabs, 1).max(axis=1) * per_element
    exact = inner // grain[row] * grain[row]
    nearest = np.where(inner * 2 <= nbytes[row], 0, nbytes[row])
    snapped = np.where(nbytes[row] <= GRAIN_BYTES, nearest, exact) + (ends - nbytes)[row]
    return np.concatenate([[0], np.maximum.accumulate(snapped), [total]])
