"""Every kind of model, from any layout to any other: pairs drawn at random, every element checked.

    pytest tests/resharding/test_families.py                                # 500 pairs
    pytest tests/resharding/test_families.py --pairs 20000 -m long          # hours
    pytest tests/resharding/test_families.py --pairs-seed 17                # the draw that printed 17

A world is built once and then serves as source and as target: after a move every element of the target has to be what it
was, since values follow from key and place alone.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter

import bed
import memory
import numpy as np
import oracle
import pytest
import torch
from bed import Model, Rank, Split

from resharding import megatron
from resharding.boxes import Box, Holding
from resharding.listing import Listing, listing_of
from resharding.plan import RankPlan, Unplannable, plan_all

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

BF16, FP16 = torch.bfloat16, torch.float16
DEFAULT_SEED = 17

MODELS = {
    "fp32": Model(),
    "bf16, grouped queries, biases": Model(dtype=BF16, tied=False, groups=2, bias=True),
    "fp16, optimizer not distributed": Model(dtype=FP16, distributed=False),
    "plain MLP, learned positions": Model(dtype=BF16, gated=False, learned=True, bias=True),
    "frozen": Model(dtype=BF16, frozen="linear_qkv"),
    "many buckets": Model(dtype=BF16, bucket=200),
    "one bucket": Model(dtype=BF16, bucket=None, tied=False),
    "buckets padded for bandwidth": Model(dtype=BF16, bucket=6000, high_padding=True, layers=2),
    "latent attention": Model(dtype=BF16, mla=True),
    "experts": Model(dtype=BF16, experts=4, tied=False),
    "experts, fp32, small buckets": Model(experts=4, bucket=500),
    "experts, shared and dense, biased router": Model(dtype=BF16, experts=4, shared=16, router_bias=True, dense_first=True),
    "experts, optimizer not distributed": Model(dtype=BF16, experts=4, distributed=False),
    "experts in one tensor": Model(dtype=BF16, experts=4, grouped=True),
    "Mamba": Model(dtype=BF16, hybrid="MMMM", tied=False),
    "Mamba, attention, MLP": Model(dtype=BF16, hybrid="M*-M"),
}
SMALL, LARGE = 16, 64


@functools.cache
def splits(name: str) -> tuple[list[Split], list[Split]]:
    """Return the layouts of up to 16 ranks that fit a model, and some of 64."""
    model = MODELS[name]
    found: tuple[list[Split], list[Split]] = ([], [])
    vpps = [1] if model.hybrid or model.layers < 4 else [1, 2]
    eps, etps = ([1, 2, 4], [0, 1, 2]) if model.experts else ([1], [0])
    for tp, pp, dp, cp, vpp, ep, etp, first, sp in itertools.product(
        [1, 2, 4], [1, 2, 4], [1, 2, 3, 4, 5, 8], [1, 2], vpps, eps, etps, [0, 1], [False, True]
    ):
        split = Split(tp=tp, pp=pp, dp=dp, cp=cp, vpp=vpp, ep=ep, etp=etp, first=first, sequence_parallel=sp)
        if (
            pp > model.layers
            or (vpp > 1 and pp != 2)
            or (first and (pp != 2 or vpp > 1 or model.layers < 4 or model.hybrid))
            or (sp and (tp == 1 or model.hybrid))
            or (cp > 1 and model.hybrid)
            or (tp * cp * dp) % (split.expert_tp * ep)
            or (model.experts and ep == 1 and tp % split.expert_tp)  # see test_experts_whose_parts_share_…
        ):
            continue
        if split.size <= SMALL:
            found[0].append(split)
        elif split.size == LARGE:
            found[1].append(split)
    return found


@functools.lru_cache(maxsize=1200)
def _world(name: str, split: Split, _copy: int) -> list[Rank]:
    """Build a world with every element in its place."""
    ranks = bed.world(MODELS[name], split)
    for rank in ranks:
        bed.fill(rank.holding)
    return ranks


@functools.lru_cache(maxsize=1200)
def _listings(name: str, split: Split) -> list[Listing]:
    return [listing_of(rank.holding) for rank in _world(name, split, 0)]


def canonical(ranks: list[Rank]) -> dict[str, torch.Tensor]:
    return oracle.merge_dumps(
        {"ranks": rank.ranks, "entries": list(oracle._entries(rank.chunks, rank.optimizer, rank.ranks))}
        for rank in ranks
    )


@functools.lru_cache(maxsize=64)
def _canonical(name: str, split: Split) -> dict[str, torch.Tensor]:
    return canonical(_world(name, split, 0))


def move(name: str, before: Split, after: Split, staging_bytes: int = 8192) -> tuple[list[RankPlan], list[Rank]]:
    """Move the state from one layout to another and check every element; returns plans and the new world."""
    old, new = _world(name, before, 0), _world(name, after, int(before == after))
    size = max(before.size, after.size)
    sources = [rank.holding for rank in old] + [Holding.of([])] * (size - len(old))
    targets = [rank.holding for rank in new] + [Holding.of([])] * (size - len(new))
    for target in targets:
        bed.poison(target)
    none = [Listing(())]
    plans = plan_all(
        _listings(name, before) + none * (size - len(old)),
        _listings(name, after) + none * (size - len(new)),
        [f"host{rank // 4}" for rank in range(size)],
    )
    memory.stream_all(plans, sources, targets, staging_bytes)
    assert [line for target in targets for line in bed.wrong(target)] == []
    assert [line for source in sources for line in bed.wrong(source)] == []
    return plans, new


def least_bytes(old: list[list[Box]], new: list[list[Box]]) -> int:
    """Return what has to travel at least, element by element."""
    total = 0
    for held, needed in zip(old, new, strict=True):
        marks: dict[str, np.ndarray] = {}
        for box in held:
            here = marks.setdefault(box.key, np.zeros(box.global_shape, dtype=bool))
            here[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] = True
        for box in needed:
            if box.key in marks:
                part = marks[box.key][tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
                total += (box.numel - int(part.sum())) * box.itemsize_bytes
            else:
                total += box.nbytes
    return total


@pytest.mark.parametrize("name", MODELS)
def test_holdings_are_the_canonical_state_and_nothing_is_missing_from_it(name: str) -> None:
    """Against the independent gather: each number it finds anywhere is one that a box moves."""
    dice = random.Random(name)
    one, other = dice.sample([split for split in splits(name)[0] if split.size <= 8], 2)
    was, now = canonical(_world(name, one, 0)), canonical(_world(name, other, 0))
    assert was.keys() == now.keys()
    assert [key for key in was if not torch.equal(was[key], now[key])] == []
    for rank in _world(name, one, 0):
        bed.poison(rank.holding)
    left = {key for key, value in canonical(_world(name, one, 0)).items() if not (value == -1).all()}
    for rank in _world(name, one, 0):
        bed.fill(rank.holding)
    assert {key for key in left if not key.startswith("step/")} == set()


def _draws(pairs: int, start: int, num_splits: int) -> Counter[str]:
    """Draw pairs and move them; returns how often each family came up.

    Each family's layouts are ``num_splits`` of all that fit, and one of 64 ranks: most of the time goes into building.
    """
    drawn: Counter[str] = Counter()
    dice = random.Random(start)
    pools = {}
    for name in MODELS:
        small, large = splits(name)
        pools[name] = (dice.sample(small, min(num_splits, len(small))), dice.sample(large, min(1 + num_splits // 20, len(large))))
    print(f"\n{pairs} pairs, --pairs-seed {start}")

    @seed(start)
    @settings(
        max_examples=pairs, deadline=None, database=None, print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(st.data())
    def one(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(MODELS)), label="family")
        small, large = pools[name]
        before = data.draw(st.sampled_from(small), label="before")
        after = data.draw(st.sampled_from(small), label="after")
        if data.draw(st.integers(0, 99), label="large") == 99:
            before = data.draw(st.sampled_from(large), label="before, large")
        staging = data.draw(st.sampled_from([2048, 16384, 1 << 20]), label="staging_bytes")
        plans, new = move(name, before, after, staging)
        old_boxes = [listing.boxes for listing in _listings(name, before)]
        new_boxes = [listing.boxes for listing in _listings(name, after)]
        nothing: list[list[Box]] = [[]]
        if len(plans) <= SMALL:
            least = least_bytes(
                old_boxes + nothing * (len(plans) - len(old_boxes)), new_boxes + nothing * (len(plans) - len(new_boxes))
            )
            assert sum(plan.bytes_moved for plan in plans) == least
        drawn[name] += 1
        if drawn.total() % 1000 == 0:
            print(f"{drawn.total()} pairs moved", flush=True)
        if data.draw(st.integers(0, 7), label="gather") == 0:
            was, now = _canonical(name, before), canonical(new)
            assert [key for key in was if not torch.equal(was[key], now[key])] == []

    one()
    return drawn


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("half", [0, 1])
def test_any_layout_moves_to_any_other(request: pytest.FixtureRequest, half: int) -> None:
    start = request.config.getoption("--pairs-seed", None)
    pairs = request.config.getoption("--pairs", None) or 500
    # the same draw every time: a change is judged by what it changes; the long run draws anew
    drawn = _draws((pairs + 1) // 2, (DEFAULT_SEED if start is None else start) + half, 10)
    print(dict(drawn))
    assert len(drawn) == len(MODELS) or sum(drawn.values()) < 200


@pytest.mark.long
@pytest.mark.timeout(8 * 3600)
def test_any_layout_moves_to_any_other_at_length(request: pytest.FixtureRequest) -> None:
    start = request.config.getoption("--pairs-seed", None)
    pairs = request.config.getoption("--pairs", None)
    _draws(pairs or 20_000, random.randrange(2**32) if start is None else start, 60)


@pytest.mark.parametrize("name", ["experts", "experts in one tensor", "Mamba, attention, MLP", "many buckets"])
def test_worlds_of_64_ranks_move(name: str) -> None:
    dice = random.Random(name)
    small, large = splits(name)
    move(name, dice.choice(large), dice.choice(small), 1 << 16)


def test_experts_whose_parts_share_an_optimizer_are_refused() -> None:
    """At ep 1, megatron-core 0.16 puts experts among the dense parameters even if etp cuts them where tp does not.

    Ranks with different parts then share one optimizer buffer: some elements are trained nowhere.
    """
    split = Split(tp=1, dp=4, etp=2)
    ranks = bed.world(MODELS["experts"], split)
    sizes = {"tp": 1, "pp": 1, "ep": 1, "etp": 2}
    assert "etp=2 with ep=1 needs tp to be a multiple of 2" in str(megatron.misfit_of(ranks[0].chunks, sizes))
    assert megatron.misfit_of(ranks[0].chunks, {**sizes, "tp": 2}) is None
    assert megatron.misfit_of(ranks[0].chunks, {**sizes, "ep": 2}) is None
    listings = [listing_of(rank.holding) for rank in ranks]
    whole = _listings("experts", Split(dp=4))
    with pytest.raises(Unplannable, match=r"experts.*no rank of the old world holds"):
        plan_all(listings, whole, ["a"] * 4)
