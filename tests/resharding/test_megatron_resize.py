"""Real Megatron state, every element known by name and place, moved from layout to layout."""

from __future__ import annotations

import functools
import math

import bed
import memory
import oracle
import pytest
import torch
from bed import Model, Rank, Split

from resharding.boxes import Box, Holding, decode_boxes
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
        {"ranks": rank.ranks, "entries": list(oracle._entries(rank.chunks, rank.optimizer))} for rank in ranks
    )


@pytest.mark.parametrize(("name", "before", "after"), PAIRS, ids=lambda value: str(value))
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
