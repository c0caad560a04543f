from __future__ import annotations

import itertools
import json
import math
import zlib

import pytest

from resharding import boxes
from resharding.boxes import (
    Box,
    Holding,
    Piece,
    decode_boxes,
    encode_boxes,
    flat_range_boxes,
    overlap,
    subtract,
)

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def _ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=5)))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


def _flat_indices(shape, offset, size):
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for inner in itertools.product(*map(range, size)):
        yield sum((o + i) * stride for o, i, stride in zip(offset, inner, strides, strict=True))


@given(_ranges())
@settings(max_examples=400, deadline=None)
def test_flat_range_is_covered_exactly_in_order_by_at_most_2n_minus_1_boxes(case):
    shape, start, stop = case
    found = flat_range_boxes(shape, start, stop)
    covered = [index for offset, size in found for index in _flat_indices(shape, offset, size)]
    assert covered == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_flat_range_outside_the_tensor_is_refused(start, stop):
    with pytest.raises(ValueError, match="not within"):
        flat_range_boxes((2, 3), start, stop)


def test_flat_range_of_an_empty_tensor_has_no_boxes():
    assert flat_range_boxes((3, 0, 2), 0, 0) == []


@st.composite
def _two_rectangles(draw):
    dims = draw(st.integers(0, 4))
    sides = [tuple(draw(st.integers(0, 4)) for _ in range(dims)) for _ in range(2)]
    sizes = [tuple(draw(st.integers(1, 4)) for _ in range(dims)) for _ in range(2)]
    return sides[0], sizes[0], sides[1], sizes[1]


def _points(offset, size):
    return set(itertools.product(*(range(o, o + n) for o, n in zip(offset, size, strict=True))))


@given(_two_rectangles())
@settings(max_examples=300, deadline=None)
def test_overlap_and_what_is_left_are_a_partition(case):
    offset, size, other, other_size = case
    common = overlap(offset, size, other, other_size)
    both = _points(offset, size) & _points(other, other_size)
    assert (set() if common is None else _points(*common)) == both
    if common is not None:
        rest = list(subtract(offset, size, *common))
        counted = [point for piece in rest for point in _points(*piece)]
        assert len(counted) == len(set(counted))
        assert set(counted) == _points(offset, size) - both
        assert len(rest) <= 2 * len(size)


def _some_boxes():
    return [
        Box("weight/a", "float32", (4, 6), (0, 3), (4, 3)),
        Box("weight/a", "float32", (4, 6), (0, 0), (4, 3)),
        Box("main/ünïcode", "bfloat16", (64,), (3,), (61,), padded=True),
        Box("rng/x", "uint8", (), (), ()),
    ]


def test_boxes_survive_the_wire():
    some = _some_boxes()
    assert decode_boxes(encode_boxes(some)) == some
    assert decode_boxes(encode_boxes([])) == []
    holding = Holding.of([Piece(box, lambda: None) for box in some])
    assert decode_boxes(holding.encode_boxes()) == holding.boxes
    assert holding.nbytes == 48 + 48 + 122 + 1


def _message(**changes):
    message = {"version": 1, "tensors": [["k", "float32", [4], False]], "boxes": [[0, [0], [4]]], **changes}
    return zlib.compress(json.dumps(message).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zlib",
        zlib.compress(b"no json"),
        zlib.compress(b"[" * 100_000),
        zlib.compress(b'"\xff"'),
        _message()[:-3],
        _message() + b"",
        _message(version=2),
        _message(tensors={}),
        _message(tensors=[["k", "float32", [4]]]),
        _message(tensors=[["k", "complex1024", [4], False]]),
        _message(tensors=[["", "float32", [4], False]]),
        _message(tensors=[["k" * 2000, "float32", [4], False]]),
        _message(tensors=[["k", "float32", [4], 1]]),
        _message(tensors=[["k", "float32", [2**60], False]]),
        _message(tensors=[["k", "float32", [2**30, 2**30], False]]),
        _message(tensors=[["k", "float32", [1] * 20, False]]),
        _message(boxes=[[1, [0], [4]]]),
        _message(boxes=[[-1, [0], [4]]]),
        _message(boxes=[[0, [1], [4]]]),
        _message(boxes=[[0, [-1], [4]]]),
        _message(boxes=[[0, [0, 0], [1, 1]]]),
        _message(boxes=[[0, [True], [2]]]),
        _message(boxes=[[0, ["0"], [2]]]),
        _message(boxes=[[0, 0, 4]]),
    ],
)
def test_a_message_that_is_no_box_list_is_refused_in_one_sentence(data):
    if data == _message():
        assert decode_boxes(data)
        return
    with pytest.raises(ValueError, match=r"^box") as caught:
        decode_boxes(data)
    assert len(str(caught.value)) < 300


def test_a_bomb_is_not_unpacked(monkeypatch):
    monkeypatch.setattr(boxes, "MAX_DECODED_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000"):
        decode_boxes(zlib.compress(b" " * 100_000))
    monkeypatch.setattr(boxes, "MAX_ENCODED_BYTES", 10)
    with pytest.raises(ValueError, match="larger than 10"):
        decode_boxes(encode_boxes(_some_boxes()))
