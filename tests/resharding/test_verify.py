"""What goes wrong on the way is caught, and the tensor is named."""

from __future__ import annotations

import random
from dataclasses import replace

import bed
import memory
import pytest
import torch
from bed import Model, Split
from test_stream import _case, _wrong

from resharding.boxes import Box, Holding, Piece
from resharding.coverage import NotCovered, check_coverage
from resharding.digest import WORDS, bound, digest, weighted
from resharding.plan import plan_all
from resharding.verify import SAMPLE, Damaged

SIZES = [1, 7, 8, 9, 63, 64, 1000, 8 * WORDS, 8 * WORDS + 5, 24 * WORDS + 17, 8 * WORDS * 65 + 3]


BOTH = pytest.mark.parametrize("digest", [digest, weighted], ids=["host", "device"])


@BOTH
@pytest.mark.parametrize("size", SIZES)
def test_a_digest_sees_one_changed_byte_anywhere_and_not_where_the_bytes_lie(size, digest):
    dice = random.Random(size)
    data = torch.randint(0, 256, (size + 16,), dtype=torch.uint8)
    value = digest(data[:size])
    for shift in (1, 8, 13):
        moved = torch.cat([torch.zeros(shift, dtype=torch.uint8), data[:size]])
        assert digest(moved[shift:]) == value
    for at in {0, size - 1, size // 2, *(dice.randrange(size) for _ in range(20))}:
        changed = data[:size].clone()
        changed[at] ^= 1 << dice.randrange(8)
        assert digest(changed) != value
    assert digest(data[: size + 1]) != value


@BOTH
def test_a_digest_sees_what_changed_places(digest):
    data = torch.randint(0, 256, (16 * WORDS + 64,), dtype=torch.uint8)
    value = digest(data)
    half = 8 * WORDS
    assert digest(torch.cat([data[half : 2 * half], data[:half], data[2 * half :]])) != value
    words = data.clone().view(torch.int64)
    words[[3, 9]] = words[[9, 3]]
    assert digest(words.view(torch.uint8)) != value
    short = data[:77].clone()
    value = digest(short)
    for one, other in ((0, 8), (8, 32), (72, 76)):
        swapped = short.clone()
        swapped[one : one + 1], swapped[other : other + 1] = short[other : other + 1], short[one : one + 1]
        assert torch.equal(swapped, short) or digest(swapped) != value
    swapped = torch.cat([short[8:16], short[:8], short[16:]])
    assert digest(swapped) != value
    assert digest(torch.zeros(8, dtype=torch.uint8)) != digest(torch.zeros(16, dtype=torch.uint8))
    assert len({bound(value, key, (at,)) for key in "ab" for at in (0, 1)}) == 4


class Faulty(memory.Network):
    """Flips one bit of one message."""

    def __init__(self, number: int, at: int) -> None:
        super().__init__()
        self._number, self._at = number, at

    def deliver(self, sent, received):
        super().deliver(sent, received)
        if len(self.messages) - 1 == self._number:
            received[self._at % received.numel()] ^= 16


@pytest.mark.parametrize("staging_bytes", [130, 1 << 20])
@pytest.mark.parametrize("seed", range(6))
def test_one_flipped_bit_on_the_wire_is_caught_and_named(seed, staging_bytes):
    tensors, old, new, plans = _case(seed)
    clean = memory.Network()
    memory.stream_all(plans, old, new, staging_bytes, clean)
    if not clean.messages:
        pytest.skip("nothing travels")
    caught = 0
    for number in {0, len(clean.messages) // 2, len(clean.messages) - 1}:
        for holding in new:
            for piece in holding.pieces:
                piece.view().zero_()
        said = _said(plans, old, new, staging_bytes, Faulty(number, at=5))
        caught += bool(said)
        wrong = {box.key for box in _wrong(tensors, new)}
        # a flipped digest names its slice as well; a bit may fall into the gap between two slices
        assert not wrong or any(said.startswith(f"{key}: ") for key in wrong)
    assert caught


def _said(*case) -> str:
    try:
        memory.stream_all(*case)
    except Damaged as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("verify", "caught"), [("full", True), ("off", False)])
def test_without_verify_nothing_is_compared(verify, caught):
    live, there = torch.arange(4096.0), torch.zeros(4096)
    box = Box("weight/w", "float32", (4096,), (0,), (4096,))
    old = [Holding.of([Piece(box, lambda: live)]), Holding.of([])]
    new = [Holding.of([]), Holding.of([Piece(box, lambda: there)])]
    plans = plan_all([side.boxes for side in old], [side.boxes for side in new], ["a", "a"])
    if caught:
        with pytest.raises(Damaged, match=r"weight/w: the slice at \(0,\) of shape \(4096,\).* from rank 0"):
            memory.stream_all(plans, old, new, 4096, Faulty(0, 3), verify=verify)
        return
    reports = memory.stream_all(plans, old, new, 4096, Faulty(0, 3), verify=verify)
    assert not torch.equal(live, there)
    assert [report.bytes_verified for report in reports] == [0, 0]
    assert [report.verify_s for report in reports] == [0, 0]


def test_a_sample_looks_at_one_slice_in_so_many_and_its_cost_is_told():
    size = 4 * SAMPLE
    lives = [torch.arange(64.0) + i for i in range(size)]
    there = [torch.zeros(64) for _ in range(2 * size)]
    boxes = [Box(f"weight/layers.{i}", "float32", (64,), (0,), (64,)) for i in range(size)]
    old = [Holding.of([Piece(box, lambda t=t: t) for box, t in zip(boxes, lives, strict=True)]), Holding.of([])]
    new = [
        Holding.of([Piece(box, lambda t=t: t) for box, t in zip(boxes, there[start : start + size], strict=True)])
        for start in (0, size)
    ]
    plans = plan_all([side.boxes for side in old], [side.boxes for side in new], ["a", "a"])
    sample = memory.stream_all(plans, old, new, 1 << 20, verify="sample")
    assert [report.bytes_verified for report in sample] == [4 * 256, 4 * 256]
    full = memory.stream_all(plans, old, new, 1 << 20)
    assert [report.bytes_verified for report in full] == [size * 256, size * 256]
    assert all(0 < report.verify_s < report.seconds for report in (*sample, *full))


def test_a_local_copy_that_went_elsewhere_is_caught():
    live = torch.arange(8.0)
    box = Box("weight/w", "float32", (8,), (0,), (8,))
    plans = plan_all([[box]], [[box]], ["a"])

    class Elsewhere(torch.Tensor):
        def copy_(self, *_args):
            return self

    target = Holding.of([Piece(box, lambda: torch.zeros(8).as_subclass(Elsewhere))])
    with pytest.raises(Damaged, match=r"weight/w: .* was not copied as it is"):
        memory.stream_all(plans, [Holding.of([Piece(box, lambda: live)])], [target], 1 << 10)


def _megatron():
    model = Model(dtype=torch.bfloat16, tied=False, groups=4)
    old, new = bed.world(model, Split(tp=2)), bed.world(model, Split(), empty=True)
    for rank in old:
        bed.fill(rank.holding)
    sources = [rank.holding for rank in old]
    targets = [new[0].holding, Holding.of([])]
    plans = plan_all([side.boxes for side in sources], [side.boxes for side in targets], ["a", "a"])
    return sources, targets, plans


def test_a_box_missing_from_the_plan_is_named():
    sources, targets, plans = _megatron()
    lost = next(recv for recv in plans[0].recvs if "linear_qkv.weight" in targets[0].boxes[recv.cut.piece].key)
    key = targets[0].boxes[lost.cut.piece].key
    at = plans[0].recvs.index(lost)
    del plans[0].recvs[at], plans[1].sends[at]
    with pytest.raises(NotCovered, match=f"{key}: the plan does not write the elements at"):
        check_coverage(plans[0], targets[0].boxes)
    with pytest.raises(NotCovered, match=key):
        memory.stream_all(plans, sources, targets, 8192)  # the other rank waits


def test_a_box_written_twice_is_named():
    sources, targets, plans = _megatron()
    twice = plans[0].copies[5]
    key = targets[0].boxes[twice.target.piece].key
    plans[0].copies.append(twice)
    with pytest.raises(NotCovered, match=rf"{key}: the plan writes .* twice"):
        memory.stream_all(plans, sources, targets, 8192)


@pytest.mark.parametrize("name", ["linear_fc1.weight", "linear_qkv.weight"])
def test_slices_that_changed_places_are_caught_and_named(name):
    """SwiGLU's halves, and a row of q and one of k: equal in size, so nothing but a digest bound to its place sees it."""
    sources, targets, plans = _megatron()
    if name == "linear_qkv.weight":  # one transfer holds q, k and v of several heads: take it in rows
        for plan, attribute, peer in ((plans[1], "sends", 0), (plans[0], "recvs", 1)):
            setattr(plan, attribute, [row for t in getattr(plan, attribute) for row in _rows(t, peer)])
    sends = plans[1].sends
    rows = [i for i, send in enumerate(sends) if sources[1].boxes[send.cut.piece].key == f"weight/decoder.layers.1.{_module(name)}"]
    one, other = rows[0], rows[8 if "qkv" in name else -1]  # of a head's rows 8 each are q, k and v
    assert sends[one].nbytes == sends[other].nbytes
    sends[one], sends[other] = replace(sends[one], cut=sends[other].cut), replace(sends[other], cut=sends[one].cut)
    with pytest.raises(Damaged, match=f"weight/decoder.layers.1.{_module(name)}"):
        memory.stream_all(plans, sources, targets, 8192)
    assert any(_module(name) in line for line in bed.wrong(targets[0]))


def _module(name):
    return f"mlp.{name}" if "fc1" in name else f"self_attention.{name}"


def _rows(transfer, _peer):
    cut = transfer.cut
    if len(cut.shape) != 2 or cut.shape[0] == 1:
        return [transfer]
    nbytes = transfer.nbytes // cut.shape[0]
    return [
        replace(transfer, nbytes=nbytes, cut=replace(cut, start=(cut.start[0] + i, cut.start[1]), shape=(1, cut.shape[1])))
        for i in range(cut.shape[0])
    ]
