from __future__ import annotations

import math
import random
import threading
import zlib

import numpy as np
import pytest

from resharding.boxes import Box, Holding, Piece, flat_range_boxes
from resharding.listing import Block, Listing, Tensor, exchange, listing_of, read_block
from resharding.ranges import BoxRows, add_up, cut_ranges, matches, measure

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_ranges_are_cut_by_the_million_as_one_by_one(data):
    axes = data.draw(st.integers(1, 4))
    rows = []
    for _ in range(data.draw(st.integers(0, 6))):
        shape = tuple(data.draw(st.integers(1, 5)) for _ in range(axes))
        start = data.draw(st.integers(0, math.prod(shape)))
        rows.append((shape, start, data.draw(st.integers(start, math.prod(shape)))))
    shape = np.array([row[0] for row in rows], dtype=np.int64).reshape(-1, axes)
    start, stop = (np.array([row[i] for row in rows], dtype=np.int64) for i in (1, 2))
    which, offset, size = cut_ranges(shape, start, stop)
    found = [
        (row, tuple(o), tuple(n))
        for row, o, n in zip(which.tolist(), offset.tolist(), size.tolist(), strict=True)
    ]
    wanted = [(row, o, n) for row, (shape, a, b) in enumerate(rows) for o, n in flat_range_boxes(shape, a, b)]
    assert found == wanted


@pytest.mark.parametrize("fault", ["none", "dropped", "twice", "shifted"])
def test_the_measure_of_a_tiling_is_that_of_the_whole_and_of_nothing_else(fault):
    boxes = list(flat_range_boxes((7, 5, 6), 0, 23)) + list(flat_range_boxes((7, 5, 6), 23, 210))
    if fault == "dropped":
        boxes.pop(2)
    elif fault == "twice":
        boxes.append(boxes[0])
    elif fault == "shifted":  # the volume stays right
        one = next(i for i, (offset, size) in enumerate(boxes) if offset[-1] > 0 and size[-1] < 6)
        offset, size = boxes[one]
        boxes[one] = ((*offset[:-1], offset[-1] - 1), size)
    offset, size = (np.array([box[i] for box in boxes], dtype=np.int64) for i in (0, 1))
    unit = np.zeros(len(boxes), dtype=np.int64)
    total = add_up(unit, measure(unit, offset, size), 1)
    whole = measure(np.array([0]), np.zeros((1, 3), dtype=np.int64), np.array([[7, 5, 6]]))
    assert (total == whole).item() == (fault == "none")


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_matches_are_all_overlaps_and_no_more(seed):
    dice = random.Random(seed)

    def some():
        rows = [[dice.randint(0, 2), *(dice.randint(0, 9) for _ in range(4))] for _ in range(dice.randint(0, 20))]
        made = np.array(rows, dtype=np.int64).reshape(-1, 5)
        return made[:, 0], made[:, 1:3], made[:, 3:5] % 4 + 1

    one, other = some(), some()
    index, other_index, offset, size = matches(BoxRows(*one), BoxRows(*other), 3)
    found = {
        (i, j, tuple(o), tuple(n))
        for i, j, o, n in zip(index.tolist(), other_index.tolist(), offset.tolist(), size.tolist(), strict=True)
    }
    wanted = set()
    for i in range(len(one[0])):
        for j in range(len(other[0])):
            a = Box(str(one[0][i]), "uint8", (20, 20), tuple(one[1][i].tolist()), tuple(one[2][i].tolist()))
            b = Box(str(other[0][j]), "uint8", (20, 20), tuple(other[1][j].tolist()), tuple(other[2][j].tolist()))
            common = a.intersect(b)
            if common:
                wanted.add((i, j, common.offset, common.shape))
    assert found == wanted
    assert len(index) == len(found)


def _flat(num_shards=4):
    """A buffer of two tensors, each with two kinds, and padding between and after."""
    units = tuple(
        tuple(Tensor(f"{kind}/{name}", "float32", shape, False) for kind in ("main", "exp_avg"))
        for name, shape in (("a", (6, 4)), ("b", (10,)))
    )
    return Block(units, ((0, (2, 0), (4, 4)), (1, (0,), (10,))), (32, 16), ((0, 3), (1, 0)), num_shards)


def test_shards_of_a_buffer_hold_each_element_of_each_kind_once():
    block = _flat()
    seen = [box for index in range(4) for box in block.boxes(index)]
    for kind in ("main", "exp_avg"):
        points = [
            (box.key, r, c)
            for box in seen
            if box.key == f"{kind}/a"
            for r in range(box.offset[0], box.offset[0] + box.shape[0])
            for c in range(box.offset[1], box.offset[1] + box.shape[1])
        ]
        assert sorted(points) == [(f"{kind}/a", r, c) for r in range(2, 6) for c in range(4)]
    assert [box.shape for box in block.boxes(2) if box.key == "main/b"] == [(2,)]
    assert block.boxes(0)[0] == Box("main/a", "float32", (6, 4), (2, 0), (1, 4))
    assert sum(block.num_boxes(index) for index in range(4)) == len(seen)


def test_bytes_of_an_index_are_those_of_its_boxes():
    for block, indexes in ((_flat(), [0, 2, 3]), (_flat(2), [1]), (Block.explicit(_flat().boxes(1)), [0])):
        number = np.array([0 if unit[0].key.endswith("a") else 2 for unit in block.units])
        found = block.bytes_by(number, 3, indexes)
        for row, index in zip(found.tolist(), indexes, strict=True):
            boxes = block.boxes(index)
            assert row == [sum(b.nbytes for b in boxes if b.key.endswith("/a")), 0,
                           sum(b.nbytes for b in boxes if b.key.endswith("/b"))]  # fmt: skip


def test_a_block_read_back_is_equal():
    for block in (_flat(), Block.explicit([Box("w/s", "int64", (), (), ()), Box("w/t", "bool", (3,), (1,), (2,))])):
        again = read_block(block.text)
        assert again == block
        assert again.digest == block.digest
        assert again.boxes(0) == block.boxes(0)


def _gathers(size):
    """A gather for threads, one for each rank."""
    barrier, table = threading.Barrier(size, timeout=20), [b""] * size

    def of(rank):
        def gather(payload):
            table[rank] = payload
            barrier.wait()
            found = list(table)
            barrier.wait()
            return found

        return gather

    return [of(rank) for rank in range(size)]


def _exchanged(sides):
    gathers, found = _gathers(len(sides)), [None] * len(sides)

    def run(rank):
        try:
            found[rank] = exchange(gathers[rank], rank, *sides[rank])
        except ValueError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(sides))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return found


def test_every_rank_learns_what_every_rank_has():
    loose = Listing.explicit([Box("rng/3", "uint8", (5,), (0,), (5,))])
    old = [Listing(((_flat(), rank),)) for rank in range(4)]
    new = [Listing(((_flat(2), 0), *loose.entries)), Listing(((_flat(2), 1),)), Listing(()), loose]
    for before, after in _exchanged(list(zip(old, new, strict=True))):
        assert [listing.boxes for listing in before] == [listing.boxes for listing in old]
        assert [listing.boxes for listing in after] == [listing.boxes for listing in new]
        assert before[0].entries[0][0] is before[3].entries[0][0]  # one object: planning relies on it to be fast


def test_a_block_changed_on_the_way_is_refused():
    block = _flat()
    block.digest  # noqa: B018 - remembered
    block.__dict__["text"] = block.text[:-1] + b"?"
    assert all(isinstance(error, ValueError) for error in _exchanged([(Listing(((block, 0),)),)] * 2))


def test_another_block_in_place_of_the_one_announced_is_refused():
    blocks = [Block.explicit([Box(f"w/{letter}", "uint8", (5,), (0,), (5,))]) for letter in "abcdefgh"]
    block = blocks[0]
    other = next(one for one in blocks[1:] if len(one.text) == len(block.text))
    block.digest  # noqa: B018 - remembered
    block.__dict__["text"] = other.text
    errors = _exchanged([(Listing(((block, 0),)),), (Listing(()),)])
    assert ["rank 0 did not arrive as it was announced" in str(error) for error in errors] == [True, True]


def test_a_shard_that_does_not_exist_is_refused():
    errors = _exchanged([(Listing(((_flat(), 4),)),), (Listing(()),)])
    assert ["shard 4 of 4" in str(error) for error in errors] == [True, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 1"),
        ({"units": 3}, "version 1"),
        ({"units": [[["a", "float32", [4], False]], []]}, "different kinds"),
        ({"units": [[["a", "float32", [4], False], ["b", "float32", [5], False]]]}, "different shapes"),
        ({"table": [[1, [0], [4]]]}, "names unit 1 of 1"),
        ({"table": [[0, [1], [4]]]}, "not within a"),
        ({"table": [[True, [0], [4]]]}, "names unit True"),
        ({"shards": 0}, "how its buffers are cut"),
        ({"buckets": [5], "shards": 2}, "2 equal shards"),
        ({"buckets": [4], "shards": 2}, "without a place"),
        ({"buckets": [4], "shards": 2, "places": [[0, 1]]}, "ends outside"),
        ({"buckets": [4], "shards": 2, "places": [[1, 0]]}, "outside of its buffer"),
        ({"places": [[0, 0]]}, "outside of its buffer"),
        ({"shards": 2}, "places without a buffer"),
    ],
)
def test_a_block_that_makes_no_sense_is_refused(change, words):
    import json

    message = {"version": 1, "units": [[["a", "float32", [4], False]]], "table": [[0, [0], [4]]], "buckets": [],
               "places": [], "shards": 1}  # fmt: skip
    assert read_block(zlib.compress(json.dumps(message).encode())).boxes(0)
    with pytest.raises(ValueError, match=words):
        read_block(zlib.compress(json.dumps(message | change).encode()))


@pytest.mark.parametrize("data", [b"", b"x", zlib.compress(b"{"), zlib.compress(b"[]"), zlib.compress(b"{}" * 9)[:-3]])
def test_what_is_no_block_is_refused(data):
    with pytest.raises(ValueError, match="box list"):
        read_block(data)


def test_the_listing_of_a_holding_uses_blocks_where_they_hold_and_names_boxes_where_not():
    block = _flat()
    pieces = [Piece(box, lambda: None, (block, 1)) for box in block.boxes(1)]
    rng = Piece(Box("rng/1", "uint8", (5,), (0,), (5,)), lambda: None)
    listing = listing_of(Holding.of([*pieces, rng]))
    assert [(entry.num_shards, index) for entry, index in listing.entries] == [(4, 1), (1, 0)]
    assert listing.boxes == [piece.box for piece in (*pieces, rng)]
    broken = Holding.of([rng, *pieces[1:]])
    assert listing_of(broken).boxes == broken.boxes
    assert all(entry.num_shards == 1 for entry, _ in listing_of(broken).entries)
