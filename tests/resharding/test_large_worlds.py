"""Worlds of a thousand ranks: the benchmark's arithmetic held against Megatron, and what planning costs."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import bed
import pytest
import torch
from bed import Model, Split
from families import least_busiest

from resharding.boxes import Holding
from resharding.listing import Listing, listing_of
from resharding.plan import plan_all, plan_for

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import reshard_plan
from reshard_plan import Llama, World


def _small(model: Model) -> Llama:
    return Llama(model.layers, model.hidden, model.heads, model.groups, model.ffn, model.vocab)


MODEL = Model(layers=4, dtype=torch.bfloat16, tied=False, groups=2)


@pytest.mark.parametrize("split", [Split(tp=2, pp=2, dp=2), Split(tp=1, pp=4, dp=3), Split(tp=2, pp=1, dp=5)], ids=str)
@pytest.mark.parametrize("bucket", [None, 3000, 20_000])
def test_the_benchmarks_arithmetic_is_megatrons(split: Split, bucket: int | None) -> None:
    model = Model(**{**MODEL.__dict__, "bucket": bucket})
    for rank in bed.world(model, split):
        number = rank.ranks["rank"]
        wanted = reshard_plan.listing(_small(model), World(split.tp, split.pp, split.dp), number, bucket)
        assert set(rank.holding.boxes) == set(wanted.boxes)
        assert len(rank.holding.boxes) == len(wanted.boxes)


def _listings(split: Split, model: Model = MODEL) -> list[Listing]:
    return [listing_of(rank.holding) for rank in bed.world(model, split)]


def test_data_parallel_ranks_have_the_same_blocks() -> None:
    listings = _listings(Split(tp=2, pp=2, dp=5))
    assert len({block.digest for listing in listings for block, _ in listing.entries}) == 8
    assert all(len(listing.entries) == 2 for listing in listings)


@pytest.mark.parametrize(
    ("before", "after"),
    [(Split(tp=2, pp=2, dp=3), Split(tp=2, pp=2, dp=2)), (Split(tp=1, pp=2, dp=4), Split(tp=2, pp=4))],
    ids=str,
)
def test_short_descriptions_give_the_plans_of_whole_lists(before: Split, after: Split) -> None:
    old, new = _listings(before), _listings(after)
    size = max(len(old), len(new))
    old += [Listing(())] * (size - len(old))
    new += [Listing(())] * (size - len(new))
    hosts = [f"host{rank // 2}" for rank in range(size)]
    wanted = plan_all([side.boxes for side in old], [side.boxes for side in new], hosts)
    assert plan_all(old, new, hosts) == wanted
    assert [plan_for(rank, old, new, hosts) for rank in range(size)] == wanted


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "moved"])
def test_ranks_of_a_large_world_that_plan_alone_agree_and_share_the_load(kept: bool) -> None:
    """70 B parameters, 128 ranks to 96: every rank's plan made alone is that made for all at once."""
    old, new = World(8, 4, 4), World(8, 4, 3)
    before, after, hosts = reshard_plan.change(Llama(), old, new, kept=kept)
    plans = plan_all(before, after, hosts)
    for rank in (0, 25, 63, 96, 127):
        assert plan_for(rank, before, after, hosts) == plans[rank]
    found = reshard_plan.balance(before, after, hosts, old)
    assert found["ratio"] == 1
    assert found["busiest_ratio"] < 1.2


@pytest.mark.parametrize("blocks", [2, 1], ids=["distributed optimizer", "weights alone"])
@pytest.mark.parametrize("per_host", [1, 3, 16])
def test_the_busiest_sender_has_little_more_than_it_has_to_whatever_is_cut_anew(per_host: int, blocks: int) -> None:
    """With changes of tp, pp and dp at once; ep is among the pairs that ``test_families.py`` draws.

    Of weights every data parallel rank has all, so that there are many to choose from.
    """
    model = Llama(layers=8, hidden=64, heads=8, groups=4, ffn=96, vocab=256)
    dice = random.Random(per_host)
    sizes = itertools.product([1, 2, 4], [1, 2, 4], [1, 2, 3, 4, 5])
    worlds = [world for world in itertools.starmap(World, sizes) if 2 <= world.size <= 16]
    for _ in range(12):
        old, new = dice.sample(worlds, 2)
        size = max(old.size, new.size)
        before, after = (
            [Listing(reshard_plan.listing(model, side, rank, 20_000).entries[:blocks]) for rank in range(side.size)]
            + [Listing(())] * (size - side.size)
            for side in (old, new)
        )
        dice.shuffle(after)  # as where members are replaced: who has what already follows no pattern
        hosts = [f"host{rank // per_host}" for rank in range(size)]
        least = least_busiest([side.boxes for side in before], [side.boxes for side in after], hosts)
        busiest = max(plan.bytes_sent for plan in plan_all(before, after, hosts))
        assert least <= busiest <= 1.2 * least, (old, new)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "moved"])
def test_a_rank_of_1024_plans_within_its_limits(kept: bool) -> None:
    """One second of a core's time; neighbours slow a core down too, so the best of three counts."""
    old, new = World(8, 4, 32), World(8, 4, 31)
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=1.0) >= 1:
        row = next(row for row in reshard_plan.curve([old.size], with_balance=False) if (row["hosts"] == "kept") == kept)
        print(json.dumps(row))
        assert row["to"] == new.size
        assert float(row["peak_mb"]) < 200
        assert int(row["layout_bytes_padded"]) < 1_000_000
        seconds.append(float(row["exchange_s"]) + float(row["plan_s"]))
    assert min(seconds) < 1


def test_replicas_cut_one_large_tensor_between_them() -> None:
    from resharding.boxes import Box

    box = Box("weight/w", "float32", (4096, 1000), (0, 0), (4096, 1000))
    plans = plan_all([[box]] * 4 + [[]], [[box]] * 5, ["a"] * 5)
    sent = [plan.bytes_sent for plan in plans[:4]]
    assert sum(sent) == box.nbytes
    assert max(sent) - min(sent) <= 64 * 1024
    assert all(send.cut.shape[1] == 1000 for plan in plans for send in plan.sends)  # whole rows


def test_a_replica_that_must_send_other_things_sends_less_of_what_others_have_too() -> None:
    from resharding.boxes import Box

    own = Box("main/w", "float32", (1 << 20,), (0,), (1 << 20,))
    shared = Box("weight/w", "float32", (1 << 20,), (0,), (1 << 20,))
    plans = plan_all([[own, shared], [shared], [shared], []], [[], [], [], [own, shared]], ["a"] * 4)
    assert [plan.bytes_sent >> 20 for plan in plans] == [4, 2, 2, 0]


def test_a_holding_without_descriptions_plans_like_one_with() -> None:
    ranks = bed.world(MODEL, Split(tp=2, dp=2))
    bare = [Holding.of([type(p)(p.box, p.view) for p in rank.holding.pieces]) for rank in ranks]
    assert [listing_of(side).boxes for side in bare] == [listing_of(rank.holding).boxes for rank in ranks]
