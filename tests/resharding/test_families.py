"""Every kind of model, from any layout to any other: pairs drawn at random, every element checked.

    pytest tests/resharding/test_families.py                                # 500 pairs
    pytest tests/resharding/test_families.py --pairs 20000 -m long          # hours
    pytest tests/resharding/test_families.py --pairs-seed 17                # the draw that printed 17
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import bed
import pytest
import torch
from bed import Split
from families import (
    LARGE,
    MODELS,
    Members,
    boxes,
    canonical,
    differing,
    forget,
    least_of_the_busiest,
    listings,
    members_of,
    move,
    splits,
    world,
)

from resharding import megatron
from resharding.listing import listing_of
from resharding.plan import RankPlan, Unplannable, plan_all

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

DEFAULT_SEED = 17
ROUND = 1000
"""pairs between which the long run builds other worlds"""


@pytest.mark.parametrize("name", MODELS)
def test_holdings_are_the_canonical_state_and_nothing_is_missing_from_it(name: str) -> None:
    """Against the independent gather: each number it finds anywhere is one that a box moves."""
    dice = random.Random(name)
    one, other = dice.sample([split for split in splits(name)[0] if split.size <= 8], 2)
    was, now = canonical(world(name, one)), canonical(world(name, other))
    assert differing(was, now) == []
    for rank in world(name, one):
        bed.poison(rank.holding)
    left = {key for key, value in canonical(world(name, one)).items() if not (value == -1).all()}
    for rank in world(name, one):
        bed.fill(rank.holding)
    assert {key for key in left if not key.startswith("step/")} == set()


@dataclass(frozen=True)
class Pair:
    """One move, everything about it decided."""

    name: str
    before: Split
    after: Split
    members: Members
    staging_bytes: int
    keep: bool
    gather: bool
    """compare what the oracle gathers as well, and who sends how much"""

    @property
    def is_large(self) -> bool:
        """Whether 64 ranks are in it."""
        return LARGE in (self.before.size, self.after.size)


Pools = dict[str, tuple[list[Split], list[Split]]]


def pools_of(dice: random.Random, num_splits: int) -> Pools:
    """Draw the layouts of each family, and some of 64 ranks: a world that is built serves many pairs."""
    found = {}
    for name in MODELS:
        small, large = splits(name)
        found[name] = (
            dice.sample(small, min(num_splits, len(small))), dice.sample(large, min(1 + num_splits // 20, len(large))),
        )  # fmt: skip
    return found


def pair_of(name: str, number: int, pools: Pools) -> Pair:
    """Return the pair that a number stands for. Hypothesis would come back to the same few layouts again and again."""
    dice = random.Random(number)
    small, large = pools[name]
    before, after = dice.sample(small, 2)
    if dice.randrange(25) == 0:
        before = dice.choice(large)
        before, after = (before, after) if dice.random() < 0.5 else (after, before)
    return Pair(
        name, before, after, members_of(before, after, dice), dice.choice([2048, 16384, 1 << 20]),
        keep=dice.random() < 0.5, gather=dice.randrange(8) == 0,
    )  # fmt: skip


def _check_balance(pair: Pair, plans: list[RankPlan]) -> None:
    """The busiest sender has at most 1.2 times what it has to, and half a slice: none as small as here is cut."""
    if pair.members.size < 64:
        least = least_of_the_busiest(pair.name, pair.before, pair.after, pair.members)
        slice_bytes = max((send.nbytes for plan in plans for send in plan.sends), default=0)
        assert max(plan.bytes_sent for plan in plans) <= 1.2 * least + slice_bytes / 2


def _has_idle_ranks(name: str, split: Split) -> bool:
    """Whether a distributed optimizer leaves some rank nothing to train."""
    return MODELS[name].distributed and any(
        not any(box.key.startswith("exp_avg/") for box in held) for held in boxes(name, split)
    )


@functools.lru_cache(maxsize=64)
def _canonical(name: str, split: Split) -> dict[str, torch.Tensor]:
    return canonical(world(name, split))


def _draws(pairs: int, start: int, num_splits: int, note: Callable[[str, object], None]) -> list[Pair]:
    """Draw pairs and move them; returns them. ``note`` keeps what the summary of the run says."""
    pools = pools_of(random.Random(start), num_splits)
    note("pairs", f"--pairs {pairs} --pairs-seed {start}")
    print(f"\n{pairs} pairs, --pairs-seed {start}", flush=True)
    moved: list[Pair] = []

    @seed(start)
    @settings(
        max_examples=pairs, deadline=None, database=None, print_blob=True, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(st.sampled_from(list(MODELS)), st.integers(0, 2**32 - 1))
    def one(name: str, number: int) -> None:
        pair = pair_of(name, number, pools)
        plans, new = move(
            pair.name, pair.before, pair.after, pair.staging_bytes, keep=pair.keep, members=pair.members
        )  # fmt: skip
        if pair.gather:
            _check_balance(pair, plans)
            was, now = _canonical(name, pair.before), canonical(new)
            assert differing(was, now) == []
        moved.append(pair)

    one()
    said = f"{len(moved)} pairs moved, {_num_layouts(moved)} distinct, {sum(pair.is_large for pair in moved)} of 64 ranks"
    note("pairs", said)
    print(said, flush=True)
    return moved


def _num_layouts(moved: list[Pair]) -> int:
    return len({(pair.name, pair.before, pair.after) for pair in moved})


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("half", [0, 1])
def test_any_layout_moves_to_any_other(
    request: pytest.FixtureRequest, half: int, record_property: Callable[[str, object], None]
) -> None:
    start = request.config.getoption("--pairs-seed")
    pairs = ((request.config.getoption("--pairs") or 500) + 1) // 2
    # the same draw every time: a change is judged by what it changes; the long run draws anew
    moved = _draws(pairs, (DEFAULT_SEED if start is None else start) + half, 8, record_property)
    assert len(moved) == pairs
    assert all(pair.before != pair.after for pair in moved)
    if pairs >= 250:
        assert {pair.name for pair in moved} == set(MODELS)
        assert sum(pair.is_large for pair in moved) >= pairs // 50
    if pairs == 250:  # of many more, some have to come up again: few layouts of each family are built here
        assert _num_layouts(moved) >= 200
        assert any(_has_idle_ranks(pair.name, split) for pair in moved for split in (pair.before, pair.after))


@pytest.mark.long
@pytest.mark.timeout(8 * 3600)
def test_any_layout_moves_to_any_other_at_length(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """In rounds with layouts and a seed of their own, so that no more worlds are in memory than one of them needs."""
    start = request.config.getoption("--pairs-seed")
    start = random.randrange(2**32) if start is None else start
    pairs = request.config.getoption("--pairs") or 20_000
    num_moved = 0
    for number in range(-(-pairs // ROUND)):
        num_moved += len(_draws(min(ROUND, pairs - num_moved), start + number, 10, record_property))
        _canonical.cache_clear()
        forget()
    assert num_moved == pairs


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("fp16", Split(pp=4, vpp=2), Split(tp=2, pp=2, vpp=2, first=2)),
        ("fp16", Split(pp=3, vpp=2, last=4, dp=2), Split(pp=2, vpp=4)),
        ("Mamba", Split(tp=2, cp=2), Split(tp=4, pp=2, cp=2)),
        ("Mamba, attention, MLP", Split(pp=2, cp=2, dp=2), Split(tp=4, cp=2)),
        ("bf16, grouped queries, biases", Split(pp=2, dp=2), Split(tp=4)),
    ],
    ids=str,
)
def test_layouts_that_a_draw_may_miss_move(name: str, before: Split, after: Split) -> None:
    """Virtual stages where there are more than two or not all alike, Mamba with cp, untied and padded for another tp."""
    move(name, before, after)
    move(name, after, before, keep=False)


def test_ranks_that_hold_no_range_of_the_optimizer_come_and_go() -> None:
    name, before, after = "buckets padded for bandwidth", Split(tp=2, pp=2), Split(tp=2, dp=4)
    assert [_has_idle_ranks(name, split) for split in (before, after)] == [False, True]
    move(name, before, after)
    move(name, after, before, keep=False)


@pytest.mark.parametrize("name", ["experts", "experts in one tensor", "Mamba, attention, MLP", "many buckets"])
def test_worlds_of_64_ranks_move(name: str) -> None:
    dice = random.Random(name)
    small, large = splits(name)
    before, after = dice.choice(large), dice.choice(small)
    move(name, before, after, 1 << 16, keep=False, members=members_of(before, after, dice))


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
    found = [listing_of(rank.holding) for rank in ranks]
    whole = listings("experts", Split(dp=4))
    with pytest.raises(Unplannable, match=r"experts.*no rank of the old world holds"):
        plan_all(found, whole, ["a"] * 4)
