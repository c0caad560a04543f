from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from resharding.boxes import Box, overlap, subtract
from resharding.plan import RankPlan, Unplannable, plan_all, plan_for, totals_of

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


def _split(offset, shape, dice: random.Random, cuts: int):
    """Cut a rectangle into disjoint ones at random places."""
    parts = [(offset, shape)]
    for _ in range(cuts):
        index = dice.randrange(len(parts))
        o, n = parts[index]
        axes = [axis for axis, size in enumerate(n) if size > 1]
        if not axes:
            continue
        axis = dice.choice(axes)
        at = dice.randint(1, n[axis] - 1)
        parts[index : index + 1] = [
            (o, (*n[:axis], at, *n[axis + 1 :])),
            ((*o[:axis], o[axis] + at, *o[axis + 1 :]), (*n[:axis], n[axis] - at, *n[axis + 1 :])),
        ]
    return parts


def _side(keys, members, size, dice: random.Random):
    """Cover every tensor by random pieces, with random replicas, on the ranks of ``members``."""
    side = [[] for _ in range(size)]
    for key, shape in keys.items():
        for _ in range(dice.randint(1, 3)):  # replicas, each cut in its own way
            for offset, part in _split((0,) * len(shape), shape, dice, dice.randint(0, 5)):
                side[dice.choice(members)].append(Box(key, "float32", shape, offset, part))
    for boxes in side:
        dice.shuffle(boxes)
    return side


def _case(seed: int):
    dice = random.Random(seed)
    size = dice.randint(1, 6)
    keys = {
        f"weight/layers.{i}": tuple(dice.randint(1, 6) for _ in range(dice.randint(0, 3)))
        for i in range(dice.randint(1, 4))
    }
    ranks = list(range(size))
    old = _side(keys, dice.sample(ranks, dice.randint(1, size)), size, dice)
    new = _side(keys, dice.sample(ranks, dice.randint(1, size)), size, dice)
    return old, new, [f"host{dice.randint(0, 2)}" for _ in ranks]


def _points(box: Box, cut):
    return itertools.product(
        *(range(o + s, o + s + n) for o, s, n in zip(box.offset, cut.start, cut.shape, strict=True))
    )


def _unheld(box: Box, held: list[Box]) -> int:
    """Elements of a box that none of a rank's own boxes has: what has to travel at least."""
    missing = [(box.offset, box.shape)]
    for other in held:
        if other.key == box.key:
            rest = []
            for offset, shape in missing:
                common = overlap(offset, shape, other.offset, other.shape)
                rest.extend([(offset, shape)] if common is None else subtract(offset, shape, *common))
            missing = rest
    return sum(Box(box.key, box.dtype, box.global_shape, *part).numel for part in missing)


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_every_element_is_written_once_from_its_own_place_and_no_byte_travels_needlessly(seed):
    old, new, hosts = _case(seed)
    plans = plan_all(old, new, hosts)
    written = Counter()
    queues = {}
    for plan in plans:
        for send in plan.sends:
            queues.setdefault((plan.rank, send.peer), []).append(send)
    for plan in plans:
        taken = Counter()
        for source_rank, source, target, nbytes in (
            *((plan.rank, copy.source, copy.target, copy.nbytes) for copy in plan.copies),
            *(
                (recv.peer, queues[recv.peer, plan.rank][(taken.update([recv.peer]), taken[recv.peer])[1] - 1].cut,
                 recv.cut, recv.nbytes)
                for recv in plan.recvs
            ),
        ):  # fmt: skip
            held, needed = old[source_rank][source.piece], new[plan.rank][target.piece]
            assert held.key == needed.key
            assert list(_points(held, source)) == list(_points(needed, target))
            assert nbytes == 4 * len(list(_points(needed, target)))
            written.update((plan.rank, target.piece, point) for point in _points(needed, target))
    assert set(written.values()) <= {1}
    assert len(written) == sum(box.numel for boxes in new for box in boxes)
    for plan in plans:
        assert plan.bytes_received == 4 * sum(_unheld(box, old[plan.rank]) for box in new[plan.rank])
    assert sum(plan.bytes_sent for plan in plans) == sum(plan.bytes_received for plan in plans)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_ranks_that_plan_alone_agree(seed):
    old, new, hosts = _case(seed)
    alone = [plan_for(rank, old, new, hosts) for rank in range(len(old))]
    assert alone == plan_all(old, new, hosts)
    for one, other in itertools.permutations(alone, 2):
        sent = [send.nbytes for send in one.sends if send.peer == other.rank]
        assert sent == [recv.nbytes for recv in other.recvs if recv.peer == one.rank]
        assert one.bytes_sent_to.get(other.rank, 0) == other.bytes_received_from.get(one.rank, 0)


def _replicated(num_old: int, num_new: int, num_tensors: int = 24):
    boxes = [Box(f"weight/layers.{i}", "float32", (10,), (0,), (10,)) for i in range(num_tensors)]
    size = num_old + num_new
    return [boxes if rank < num_old else [] for rank in range(size)], [boxes] * size


def test_replicas_share_the_load_evenly():
    old, new = _replicated(4, 2)
    plans = plan_all(old, new, ["a"] * 6)
    assert [plan.bytes_sent for plan in plans] == [480] * 4 + [0, 0]
    assert [plan.bytes_local for plan in plans] == [960] * 4 + [0, 0]


def test_a_replica_on_the_same_host_is_read_before_others():
    old, new = _replicated(4, 2)
    hosts = ["a", "a", "b", "b", "b", "c"]
    plans = plan_all(old, new, hosts)
    assert set(plans[4].bytes_received_from) == {2, 3}
    assert set(plans[5].bytes_received_from) <= {0, 1, 2, 3}
    totals = totals_of(plans, hosts)
    assert totals.bytes_moved == 1920
    assert totals.bytes_between_hosts == 960
    assert totals.bytes_local == 4 * 960
    assert totals.most_bytes_received == 960
    assert totals.most_bytes_sent == max(plan.bytes_sent for plan in plans)


def _one(box: Box):
    return [[box], []], [[], [box]]


BOX = Box("weight/w", "float32", (8, 2), (0, 0), (8, 2))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (Box("weight/w", "float32", (8, 2), (0, 0), (7, 2)), BOX, r"weight/w: no rank .* \(7, 0\) of shape \(1, 2\)"),
        (Box("weight/v", "float32", (8, 2), (0, 0), (8, 2)), BOX, "weight/w: the old world holds nothing"),
        (Box("weight/w", "bfloat16", (8, 2), (0, 0), (8, 2)), BOX, "weight/w: is bfloat16 .* float32"),
        (Box("weight/w", "float32", (9, 2), (0, 0), (9, 2)), BOX, r"weight/w: has shape \(9, 2\)"),
        (Box("weight/w", "float32", (9, 2), (0, 0), (9, 2), padded=True), BOX, "weight/w: has shape"),
    ],
)
def test_what_cannot_be_filled_is_refused_by_name(old, new, words):
    with pytest.raises(Unplannable, match=words):
        plan_all([[old], []], [[], [new]], ["a", "a"])


def test_state_that_would_be_lost_is_refused_but_random_streams_may_go():
    extra = Box("exp_avg/w", "float32", (8, 2), (0, 0), (8, 2))
    with pytest.raises(Unplannable, match="exp_avg/w: the new world has no place"):
        plan_all([[BOX, extra], []], [[], [BOX]], ["a", "a"])
    stream = Box("rng/1/torch", "uint8", (5,), (0,), (5,))
    assert plan_all([[BOX, stream], []], [[], [BOX]], ["a", "a"])[1].bytes_received == 64


def test_ranks_of_one_world_that_disagree_are_refused():
    other = Box("weight/w", "float32", (9, 2), (0, 0), (8, 2))
    with pytest.raises(Unplannable, match="ranks of the old world disagree"):
        plan_all([[BOX], [other]], [[BOX], []], ["a", "a"])


def test_unequal_lists_are_refused():
    with pytest.raises(ValueError, match="not as many"):
        plan_for(0, [[BOX]], [[BOX], []], ["a"])


@pytest.mark.parametrize("rows", [6, 8, 12])
def test_padding_moves_where_it_exists_and_is_zero_where_it_does_not(rows):
    old = [[Box("weight/e", "float32", (8, 2), (i * 4, 0), (4, 2), padded=True)] for i in range(2)]
    new = [[Box("weight/e", "float32", (rows, 2), (i * rows // 2, 0), (rows // 2, 2), padded=True)] for i in range(2)]
    plans: list[RankPlan] = plan_all(old, new, ["a", "a"])
    written = sum(plan.bytes_local + plan.bytes_received for plan in plans) // 8
    zeroed = sum(fill.nbytes for plan in plans for fill in plan.fills) // 8
    assert (written, zeroed) == (min(rows, 8), max(0, rows - 8))
    assert totals_of(plans, ["a", "a"]).bytes_zeroed == 8 * zeroed


def test_layers_move_in_order_and_each_as_a_whole():
    keys = [f"{kind}/layers.{i}.w" for kind in ("weight", "exp_avg") for i in range(12)]
    boxes = [Box(key, "float32", (4,), (0,), (4,)) for key in keys]
    plan = plan_for(1, [boxes, []], [[], boxes], ["a", "a"])
    order = [boxes[recv.cut.piece].key for recv in plan.recvs]
    assert order == [f"{kind}/layers.{i}.w" for i in range(12) for kind in ("exp_avg", "weight")]
