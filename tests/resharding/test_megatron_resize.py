"""Real Megatron state, every element known by name and place, moved from layout to layout."""

from __future__ import annotations

import functools
from dataclasses import replace

import bed
import memory
import oracle
import pytest
import torch
from bed import Model, Rank, Split

from resharding.boxes import Holding, Piece, decode_boxes
from resharding.plan import Unplannable, plan_all, plan_for, totals_of

MODELS = {
    "fp32": Model(),
    "bf16": Model(dtype=torch.bfloat16, tied=False, groups=2, bias=True),
    "bf16-tied": Model(dtype=torch.bfloat16),
    "fp16-undistributed": Model(dtype=torch.float16, distributed=False, groups=2),
    "fp32-undistributed": Model(distributed=False, tied=False),
    "frozen": Model(dtype=torch.bfloat16, frozen="linear_qkv"),
}
ONE = Split()
PAIRS = [
    ("fp32", Split(tp=2, pp=2, dp=2), Split(tp=4, dp=2)),
    ("fp32", Split(tp=4), Split(pp=4)),
    ("fp32", Split(dp=4), Split(dp=2, tp=2)),
    ("fp32", ONE, Split(tp=2, pp=2, dp=2)),
    ("fp32", Split(dp=3), Split(dp=5)),
    ("bf16", Split(tp=2, pp=2, dp=2), Split(pp=4, dp=2)),
    ("bf16", Split(tp=1, pp=2, dp=4), Split(tp=4, pp=2)),
    ("bf16", Split(tp=4, dp=2), Split(tp=2, pp=2)),
    ("bf16", Split(tp=2, dp=4), ONE),
    ("bf16-tied", Split(pp=2, dp=2), Split(tp=2, dp=3)),
    ("bf16-tied", Split(pp=4, dp=2), Split(pp=2, dp=4)),
    ("bf16-tied", Split(pp=2, vpp=2), Split(tp=2, pp=1)),
    ("bf16-tied", Split(tp=2), Split(pp=2, vpp=2, dp=2)),
    ("fp16-undistributed", Split(tp=2, dp=2), Split(pp=2)),
    ("fp16-undistributed", Split(pp=4), Split(tp=4, dp=2)),
    ("fp32-undistributed", Split(tp=2, pp=2), Split(tp=1, dp=2)),
    ("frozen", Split(tp=2, dp=2), Split(pp=2, dp=2)),
    ("fp32", Split(tp=2, dp=2), Split(tp=2, dp=2)),
]


@functools.lru_cache(maxsize=4)
def _source(name: str, split: Split) -> list[Rank]:
    ranks = bed.world(MODELS[name], split)
    for rank in ranks:
        bed.fill(rank.holding)
    return ranks


def _bridge(ranks: list[Rank], size: int) -> list[Holding]:
    return [rank.holding for rank in ranks] + [Holding.of([])] * (size - len(ranks))


def _canonical(ranks: list[Rank]) -> dict[str, torch.Tensor]:
    return oracle.merge_dumps(
        {"ranks": rank.ranks, "entries": list(oracle._entries(rank.chunks, rank.optimizer, rank.ranks))}
        for rank in ranks
    )


@pytest.mark.parametrize(("name", "before", "after"), PAIRS, ids=str)
def test_every_element_of_the_new_world_is_that_of_the_old(name: str, before: Split, after: Split) -> None:
    old, new = _source(name, before), bed.world(MODELS[name], after, empty=True)
    size = max(before.size, after.size)
    sources, targets = _bridge(old, size), _bridge(new, size)
    for target in targets:
        bed.poison(target)
    boxes = [decode_boxes(side.encode_boxes()) for side in (*sources, *targets)]
    hosts = [f"host{rank // 2}" for rank in range(size)]
    plans = [plan_for(rank, boxes[:size], boxes[size:], hosts) for rank in range(size)]
    reports = memory.stream_all(plans, sources, targets, staging_bytes=8192)
    assert [line for target in targets for line in bed.wrong(target)] == []
    assert [line for source in sources for line in bed.wrong(source)] == []
    assert max(report.staging_bytes for report in reports) <= 8192
    was, now = _canonical(old), _canonical(new)
    assert was.keys() == now.keys()
    assert [key for key in was if not torch.equal(was[key], now[key])] == []
    if before == after:
        assert totals_of(plans, hosts).bytes_moved == 0


@pytest.mark.parametrize("rows", [64, 80, 96])
def test_a_vocabulary_padded_for_another_tp_keeps_its_rows_and_new_padding_is_zero(rows: int) -> None:
    model = MODELS["bf16"]
    old = _source("bf16", Split(tp=2, dp=2))
    new = bed.world(replace(model, vocab=rows), Split(tp=4, pp=2), empty=True)
    sources, targets = _bridge(old, 8), _bridge(new, 8)
    for target in targets:
        bed.poison(target)
    plans = plan_all([side.boxes for side in sources], [side.boxes for side in targets], ["a"] * 8)
    memory.stream_all(plans, sources, targets, staging_bytes=1 << 16)
    was, now = _canonical(old), _canonical(new)
    assert {key for key in now if now[key].shape != was[key].shape} == (
        set() if rows == 64 else {key for key in now if ("embedding" in key or "output_layer.weight" in key)}
        - {key for key in now if key.startswith("step/")}
    )
    for key, value in now.items():
        kept = min(len(value), len(was[key]))
        assert torch.equal(value[:kept], was[key][:kept]), key
        assert not value[kept:].any(), key


def test_a_wrong_swiglu_split_would_be_seen() -> None:
    """Known complaint 39, and the check itself: reading fc1 as one tensor, as its shape suggests, interleaves gate and up at another tp."""
    old, new = _source("fp32", Split(tp=2)), bed.world(MODELS["fp32"], ONE, empty=True)
    sources, targets = _bridge(old, 2), _bridge(new, 2)
    naive = [Holding.of([_as_one_tensor(piece, rank, 2) for piece in side.pieces]) for rank, side in enumerate(sources)]
    plans = plan_all([side.boxes for side in naive], [side.boxes for side in targets], ["a"] * 2)
    memory.stream_all(plans, naive, targets, staging_bytes=8192)
    assert any("linear_fc1.weight" in line for target in targets for line in bed.wrong(target))
    was, now = _canonical(old), _canonical(new)
    assert all("linear_fc1.weight" in key for key in was if not torch.equal(was[key], now[key]))
    assert not all(torch.equal(was[key], now[key]) for key in was)


def _as_one_tensor(piece: Piece, rank: int, tp: int) -> Piece:
    box = piece.box
    if not box.key.startswith("weight/") or "linear_fc1.weight" not in box.key:
        return piece
    half, is_up = box.shape[0], box.offset[0] * 2 >= box.global_shape[0]
    return Piece(box.part((rank * 2 * half + is_up * half, 0), box.shape), piece.view)


def test_a_missing_rank_is_noticed() -> None:
    old, new = _source("bf16", Split(tp=2, dp=2)), _source("bf16", Split(pp=2))
    with pytest.raises(Unplannable, match="no rank of the old world holds"):
        plan_all(
            [rank.holding.boxes for rank in old[:3]] + [[]],
            [rank.holding.boxes for rank in new] + [[], []],
            ["a"] * 4,
        )


@pytest.mark.parametrize("name", MODELS)
def test_holdings_of_all_ranks_cover_each_tensor_and_ranges_are_disjoint_within_a_replica(name: str) -> None:
    """Bytes per kind: what a distributed optimizer holds, over one data parallel group, is each element once."""
    split = Split(tp=2, dp=3)
    by_kind: dict[str, int] = {}
    for rank in bed.world(MODELS[name], split):
        if rank.ranks["tp"] == 0:
            for box in rank.holding.boxes:
                kind = box.key.split("/")[0]
                by_kind[kind] = by_kind.get(kind, 0) + box.numel
    copies = 1 if MODELS[name].distributed else 3
    with bed.rank_of(split, 0):
        chunks, _ = bed.build(MODELS[name], split)
        numel = sum(p.numel() for p in chunks[0].parameters() if p.requires_grad)
        numel_all = sum(p.numel() for p in chunks[0].parameters())
    wanted = {"weight": 3 * numel_all, "exp_avg": copies * numel, "exp_avg_sq": copies * numel}
    if MODELS[name].dtype != torch.float32:
        wanted["main"] = copies * numel
    assert by_kind == wanted
