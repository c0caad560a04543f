from __future__ import annotations

import random
from pathlib import Path

import greenlet
import memory
import pytest
import torch
from processes import run_ranks

from resharding import stream
from resharding.boxes import DTYPE_SIZES_BYTES, Box, Holding, Piece
from resharding.plan import RankPlan, plan_all
from resharding.slots import DIRECT_BYTES


def _tensors(dice: random.Random):
    """Global tensors with a value of its own in every element."""
    shapes = {f"weight/layers.{i}": tuple(dice.randint(1, 12) for _ in range(dice.randint(0, 3))) for i in range(6)}
    made = {}
    for index, (key, shape) in enumerate(shapes.items()):
        dtype = getattr(torch, dice.choice(["float32", "bfloat16", "int64", "uint8", "bool", "float64"]))
        numel = max(1, torch.Size(shape).numel())
        made[key] = ((torch.arange(numel) * 7 + index) % 251).to(dtype).view(shape)
    return made


def _parts(shape, dice: random.Random):
    parts = [((0,) * len(shape), shape)]
    for _ in range(dice.randint(0, 4)):
        index = dice.randrange(len(parts))
        offset, size = parts[index]
        axes = [axis for axis, n in enumerate(size) if n > 1]
        if axes:
            axis = dice.choice(axes)
            at = dice.randint(1, size[axis] - 1)
            parts[index : index + 1] = [
                (offset, (*size[:axis], at, *size[axis + 1 :])),
                (
                    (*offset[:axis], offset[axis] + at, *offset[axis + 1 :]),
                    (*size[:axis], size[axis] - at, *size[axis + 1 :]),
                ),
            ]
    return parts


def _storage(shape, dtype, dice: random.Random):
    """A tensor of ``shape``: contiguous, a column block of a wider one, or transposed."""
    kind = dice.randint(0, 2)
    if kind == 0 or not shape:
        return torch.zeros(shape, dtype=dtype)
    if kind == 1:
        return torch.zeros((*shape[:-1], shape[-1] + 3), dtype=dtype).narrow(-1, 1, shape[-1])
    return torch.zeros(shape[::-1], dtype=dtype).permute(*range(len(shape) - 1, -1, -1))


def _side(tensors, members, size, dice: random.Random, *, filled: bool):
    side = [[] for _ in range(size)]
    for key, whole in tensors.items():
        for _ in range(dice.randint(1, 2)):
            for offset, shape in _parts(tuple(whole.shape), dice):
                live = _storage(shape, whole.dtype, dice)
                if filled:
                    live.copy_(_of(whole, offset, shape))
                box = Box(key, str(whole.dtype).removeprefix("torch."), tuple(whole.shape), offset, shape)
                side[dice.choice(members)].append(Piece(box, lambda live=live: live))
    return [Holding.of(pieces) for pieces in side]


def _of(whole, offset, shape):
    for axis, (start, size) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(axis, start, size)
    return whole


def _case(seed: int):
    dice = random.Random(seed)
    size = dice.randint(2, 5)
    tensors = _tensors(dice)
    old = _side(tensors, dice.sample(range(size), dice.randint(1, size)), size, dice, filled=True)
    new = _side(tensors, dice.sample(range(size), dice.randint(1, size)), size, dice, filled=False)
    plans = plan_all([side.boxes for side in old], [side.boxes for side in new], ["a"] * size)
    return tensors, old, new, plans


def _wrong(tensors, holdings):
    return [
        piece.box
        for holding in holdings
        for piece in holding.pieces
        if not torch.equal(piece.view(), _of(tensors[piece.box.key], piece.box.offset, piece.box.shape))
    ]


class CountedStaging:
    """Counts the bytes that ``stream`` allocates."""

    def __init__(self, monkeypatch) -> None:
        self.bytes_by_rank: dict[int, int] = {}
        self._empty = torch.empty
        monkeypatch.setattr(stream.torch, "empty", self.empty)

    def empty(self, *args, **kwargs):
        made = self._empty(*args, **kwargs)
        rank = id(greenlet.getcurrent())
        self.bytes_by_rank[rank] = self.bytes_by_rank.get(rank, 0) + made.nbytes
        return made


@pytest.mark.parametrize("serial", [False, True], ids=["together", "one-after-the-other"])
@pytest.mark.parametrize("staging_bytes", [64, 130, 1024, 1 << 20])
@pytest.mark.parametrize("seed", range(8))
def test_everything_arrives_within_the_staging_allowed(seed, staging_bytes, serial, monkeypatch):
    tensors, old, new, plans = _case(seed)
    counted = CountedStaging(monkeypatch)
    network = memory.Network(serial=serial)
    reports = memory.stream_all(plans, old, new, staging_bytes, network)
    assert _wrong(tensors, new) == []
    assert _wrong(tensors, old) == []
    assert max(counted.bytes_by_rank.values(), default=0) <= staging_bytes
    assert max((size for *_, size in network.messages), default=0) <= staging_bytes // 4
    for plan, report in zip(plans, reports, strict=True):
        assert report.bytes_moved == plan.bytes_received
        assert report.bytes_sent == plan.bytes_sent
        assert report.bytes_local == plan.bytes_local
        assert report.staging_bytes <= staging_bytes
        assert report.seconds >= 0


def test_packing_allocates_nothing_and_large_contiguous_slices_skip_staging():
    live, there = torch.arange(4096.0), torch.zeros(4096)
    box = Box("weight/w", "float32", (4096,), (0,), (4096,))
    old = [Holding.of([Piece(box, lambda: live)]), Holding.of([])]
    new = [Holding.of([]), Holding.of([Piece(box, lambda: there)])]
    plans = plan_all([side.boxes for side in old], [side.boxes for side in new], ["a", "a"])
    reports = memory.stream_all(plans, old, new, staging_bytes=4096)
    assert torch.equal(live, there)
    assert [report.num_direct for report in reports] == [16, 16]
    assert [report.num_messages for report in reports] == [16, 16]


def test_slices_of_a_quarter_of_a_mebibyte_skip_staging_however_large_it_is():
    """Two copies less of every byte: on two cores the stream is 1.6 times as fast for it."""
    numel = DIRECT_BYTES // 4
    lives = [torch.arange(float(numel)) + i for i in range(3)] + [torch.arange(float(numel - 1))]
    theirs = [torch.zeros_like(live) for live in lives]
    boxes = [Box(f"weight/{i}", "float32", tuple(t.shape), (0,), tuple(t.shape)) for i, t in enumerate(lives)]
    sides = [
        Holding.of([Piece(box, lambda t=t: t) for box, t in zip(boxes, tensors, strict=True)]) for tensors in (lives, theirs)
    ]
    old, new = [sides[0], Holding.of([])], [Holding.of([]), sides[1]]
    plans = plan_all([side.boxes for side in old], [side.boxes for side in new], ["a", "a"])
    reports = memory.stream_all(plans, old, new, staging_bytes=1 << 28)
    assert all(torch.equal(*pair) for pair in zip(lives, theirs, strict=True))
    assert [report.num_direct for report in reports] == [4, 4]
    assert [report.num_messages for report in reports] == [4, 4]


class Watched(memory.MemoryTransport):
    """Follows what a rank has posted and not yet waited for, which has to be filled and left alone all that while."""

    def __init__(self, network, rank, sent=()):
        super().__init__(network, rank)
        self.events: list[tuple[str, int]] = []
        self.under_way: dict[int, torch.Tensor] = {}
        self.most_messages = self.most_bytes = 0
        self._sent = sent

    def isend(self, tensor, peer):
        assert torch.equal(tensor.view(torch.float32), self._sent[self._next].flatten()), "posted before it is packed"
        return self._watched(tensor, super().isend(tensor, peer))

    def irecv(self, tensor, peer):
        return self._watched(tensor, super().irecv(tensor, peer))

    @property
    def _next(self) -> int:
        return sum(kind == "post" for kind, _ in self.events)

    def _watched(self, tensor, post):
        number, first = self._next, tensor.data_ptr()
        others = [(other.data_ptr(), other.data_ptr() + other.nbytes) for other in self.under_way.values()]
        assert all(last <= first or first + tensor.nbytes <= begin for begin, last in others), "room is used twice"
        self.events.append(("post", number))
        self.under_way[number] = tensor
        self.most_messages = max(self.most_messages, len(self.under_way))
        self.most_bytes = max(self.most_bytes, sum(tensor.nbytes for tensor in self.under_way.values()))
        return _Waited(post, lambda: (self.events.append(("wait", number)), self.under_way.pop(number)))


class _Waited:
    def __init__(self, post, note) -> None:
        self._post, self._note = post, note

    def wait(self) -> None:
        self._note()
        self._post.wait()


@pytest.mark.parametrize("is_staged", [True, False], ids=["packed", "where they lie"])
def test_later_slots_are_posted_while_earlier_ones_are_under_way_within_the_staging(is_staged):
    """So packing overlaps the wire. What is packed has half the staging; what is not, only the window for a limit."""
    staging_bytes, number = 4096, 40

    def storage(filled):
        whole = torch.zeros(256, 2 if is_staged else 1)
        return whole[:, :1].fill_(filled) if is_staged else whole.fill_(filled)

    lives, theirs = [storage(1.0 + i) for i in range(number)], [storage(0.0) for _ in range(number)]
    boxes = [Box(f"weight/layers.{i}", "float32", (256, 1), (0, 0), (256, 1)) for i in range(number)]
    old, new = (
        Holding.of([Piece(box, lambda t=t: t) for box, t in zip(boxes, side, strict=True)]) for side in (lives, theirs)
    )
    nothing, network = Holding.of([]), memory.Network()
    plans = plan_all([boxes, []], [[], boxes], ["a", "a"])
    order = [lives[send.cut.piece] for send in plans[0].sends]
    wires = [Watched(network, 0, order), Watched(network, 1)]
    sides = [(old, nothing), (nothing, new)]
    reports = memory.run_together(
        [
            lambda plan=plan, side=side, wire=wire: stream.execute(plan, *side, wire, staging_bytes, verify="off")
            for plan, side, wire in zip(plans, sides, wires, strict=True)
        ]
    )
    assert all(torch.equal(*pair) for pair in zip(lives, theirs, strict=True))
    assert [report.num_direct for report in reports] == ([0, 0] if is_staged else [number, number])
    most = 2 if is_staged else stream.WINDOW
    for wire in wires:
        assert sorted(wire.events) == sorted((kind, i) for kind in ("post", "wait") for i in range(number))
        for later in range(1, number):
            assert wire.events.index(("post", later)) < wire.events.index(("wait", max(0, later - most + 1)))
        assert wire.most_messages == most
        assert not is_staged or wire.most_bytes <= staging_bytes // 2


def test_a_failure_of_the_wire_is_raised_and_leaves_the_source_alone():
    tensors, old, new, plans = _case(3)

    class Broken(memory.Network):
        def post(self, *args, **kwargs):
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        memory.stream_all(plans, old, new, 1024, Broken())
    assert _wrong(tensors, old) == []


def test_too_little_staging_is_refused():
    with pytest.raises(ValueError, match="staging of 63 bytes is less than 64"):
        stream.execute(RankPlan(0, 1), Holding.of([]), Holding.of([]), memory.MemoryTransport(memory.Network(), 0), 63)


def test_storage_that_changed_since_the_plan_is_refused():
    box = Box("weight/w", "float32", (4,), (0,), (4,))
    good, bad = Holding.of([Piece(box, lambda: torch.ones(4))]), Holding.of([Piece(box, lambda: torch.ones(5))])
    plan = plan_all([good.boxes], [bad.boxes], ["a"])[0]
    with pytest.raises(RuntimeError, match=r"weight/w: storage is torch.float32 \(5,\) now"):
        stream.execute(plan, good, bad, memory.MemoryTransport(memory.Network(), 0), 1024)


def test_names_and_sizes_of_element_types_are_those_of_torch():
    assert {name: getattr(torch, name).itemsize for name in DTYPE_SIZES_BYTES} == DTYPE_SIZES_BYTES


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gloo_carries_every_plan(num_ranks, tmp_path):
    """Real processes, one group of their own and no default group, several plans in a row."""
    script = Path(__file__).with_name("gloo_rank.py")
    run_ranks(((script, rank, num_ranks, tmp_path / "store") for rank in range(num_ranks)), limit_s=90.0)
