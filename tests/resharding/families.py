"""Kinds of model, the layouts that fit them, and a whole move from one layout to another with everything checked.

A world is built once and then serves as source and as target: after a move every element of the target has to be what it
was, since values follow from key and place alone.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bed
import common_state
import memory
import networkx as nx  # torch depends on it
import numpy as np
import oracle
import torch
from bed import Model, Rank, Split

from resharding import megatron
from resharding.boxes import Box, Holding
from resharding.listing import Listing, listing_of
from resharding.pages import is_disjoint
from resharding.plan import RankPlan, plan_all
from resharding.staging import ALIGN_BYTES
from resharding.stream import NUM_CHUNKS

BF16, FP16 = torch.bfloat16, torch.float16

MODELS = {
    "fp32": Model(),
    "bf16, grouped queries, biases": Model(dtype=BF16, tied=False, groups=2, bias=True, vocab=66, vocab_multiple=16),
    "fp16, optimizer not distributed": Model(dtype=FP16, distributed=False),
    "fp16": Model(dtype=FP16, layers=8),
    "plain MLP, learned positions": Model(dtype=BF16, gated=False, learned=True, bias=True),
    "padded vocabulary": Model(dtype=BF16, vocab=66, vocab_multiple=16),
    "BERT": Model(dtype=BF16, gated=False, bias=True, bert=True),
    "multi-token prediction": Model(dtype=BF16, tied=False, ahead=1),
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
UNEVEN = {4: [(1, 0), (0, 1)], 8: [(2, 0), (0, 4), (1, 1), (5, 0)]}
"""layers of the first and of the last stage, by how many there are; of 8 some can be cut into virtual stages"""


@functools.cache
def splits(name: str) -> tuple[list[Split], list[Split]]:
    """Return the layouts of up to 16 ranks that fit a model, and some of 64."""
    model = MODELS[name]
    found: tuple[list[Split], list[Split]] = ([], [])
    vpps = [1] if model.hybrid or model.bert or model.ahead or model.layers < 4 else [1, 2]
    eps, etps = ([1, 2, 4], [0, 1, 2]) if model.experts else ([1], [0])
    uneven = [(0, 0), *([] if model.hybrid else UNEVEN.get(model.layers, []))]
    pps = [1, 2, 3, 4] if model.layers == 8 else [1, 2, 4]
    for tp, pp, dp, cp, vpp, ep, etp, (first, last), sp in itertools.product(
        [1, 2, 4], pps, [1, 2, 3, 4, 5, 8], [1, 2], vpps, eps, etps, uneven, [False, True]
    ):
        split = Split(tp=tp, pp=pp, dp=dp, cp=cp, vpp=vpp, ep=ep, etp=etp, first=first, last=last, sequence_parallel=sp)
        stages, layers = pp - bool(first) - bool(last), model.layers - first - last
        if (
            pp > model.layers
            or (vpp > 1 and pp == 1)
            or stages < 1
            or layers % (stages * vpp)
            or first % vpp
            or last % vpp
            or layers // stages in (first, last)  # as many as the others: not uneven
            or (sp and (tp == 1 or model.hybrid))
            or (cp > 1 and model.bert)
            or (tp * cp * dp) % (split.expert_tp * ep)
            or (model.experts and ep == 1 and tp % split.expert_tp)  # see test_experts_whose_parts_share_…
        ):
            continue
        if split.size <= SMALL:
            found[0].append(split)
        elif split.size == LARGE:
            found[1].append(split)
    return found


@functools.cache
def world(name: str, split: Split) -> list[Rank]:
    """Build a world with everything in its place."""
    gc.disable()  # it stays: looking for garbage in it again and again takes a quarter of the time
    try:
        ranks = bed.world(MODELS[name], split)
    finally:
        gc.freeze()
        gc.enable()
    for rank in ranks:
        bed.fill(rank.holding)
        common_state.fill(rank.optimizer)
        assert is_disjoint(rank.holding), f"{name}: {split} holds an element twice"
    return ranks


@functools.cache
def listings(name: str, split: Split) -> list[Listing]:
    """Return what the ranks of a world tell each other of it."""
    found = [listing_of(rank.holding) for rank in world(name, split)]
    assert [listing.boxes for listing in found] == boxes(name, split)
    return found


@functools.cache
def boxes(name: str, split: Split) -> list[list[Box]]:
    return [rank.holding.boxes for rank in world(name, split)]


@functools.cache
def common(name: str, split: Split) -> dict[str, Any]:
    return megatron.merge_common_state([megatron.common_state(rank.optimizer) for rank in world(name, split)])


def forget() -> None:
    """Let every world go: there is room for other ones."""
    for cached in (world, listings, boxes, common, bed.expected):
        cached.cache_clear()
    gc.unfreeze()
    gc.collect()


def canonical(ranks: list[Rank]) -> dict[str, torch.Tensor]:
    return oracle.merge_dumps(
        {"ranks": rank.ranks, "entries": list(oracle._entries(rank.chunks, rank.optimizer, rank.ranks))}
        for rank in ranks
    )


def differing(was: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> list[str]:
    """Return what differs between two canonical states; of padded tensors both have the rows of the smaller one."""
    assert was.keys() == now.keys()
    found = []
    for key, one in was.items():
        rows = min(len(one), len(now[key])) if "word_embeddings" in key or "output_layer" in key else None
        if not torch.equal(one[:rows], now[key][:rows]):
            found.append(key)
    return found


@dataclass(frozen=True)
class Members:
    """Which members of the bridge the ranks of both worlds are."""

    old: tuple[int, ...]
    """of each old rank"""
    new: tuple[int, ...]
    size: int

    @property
    def hosts(self) -> list[str]:
        """Four members to a host."""
        return [f"host{place // 4}" for place in range(self.size)]


def in_order(before: Split, after: Split) -> Members:
    """Return members that keep their ranks, where the last ones leave or join."""
    return Members(tuple(range(before.size)), tuple(range(after.size)), max(before.size, after.size))


def members_of(before: Split, after: Split, dice: random.Random) -> Members:
    """Draw members: leavers are anywhere, up to two are replaced, and ranks may be dealt anew."""
    stay = max(0, min(before.size, after.size) - dice.randrange(3))
    size = before.size + after.size - stay
    places = dice.sample(range(size), size) if dice.random() < 0.5 else list(range(size))
    leavers = set(dice.sample(range(before.size), before.size - stay))
    old = places[: before.size]
    new = [place for rank, place in enumerate(old) if rank not in leavers] + places[before.size :]
    if dice.random() < 0.5:
        dice.shuffle(new)
    return Members(tuple(old), tuple(new), size)


def move(
    name: str, before: Split, after: Split, staging_bytes: int = 8192, *, keep: bool = True, members: Members | None = None
) -> tuple[list[RankPlan], list[Rank]]:
    """Move the state from one layout to another and check every element; returns plans and the new world.

    Without ``keep`` what is given back is overwritten at once, and what is claimed is overwritten only then.
    """
    assert before != after
    old, new = world(name, before), world(name, after)
    members = members or in_order(before, after)
    sources, targets = [Holding.of([])] * members.size, [Holding.of([])] * members.size
    held, needed = [Listing(())] * members.size, [Listing(())] * members.size
    for place, rank, listing in zip(members.old, old, listings(name, before), strict=True):
        sources[place], held[place] = rank.holding, listing
    for place, rank, listing in zip(members.new, new, listings(name, after), strict=True):
        targets[place], needed[place] = rank.holding, listing
    for target in targets:
        bed.poison(target)
    plans = plan_all(held, needed, members.hosts)
    network = memory.Network()
    if keep:
        memory.stream_all(plans, sources, targets, staging_bytes, network)
        left = sources
    else:
        _give_back(plans, sources, targets, staging_bytes, network)
        left = []
    rows = {box.key: box.global_shape[0] for held in boxes(name, before) for box in held if box.padded}
    assert [line for target in targets for line in bed.wrong(target, rows)] == []
    assert [line for source in left for line in bed.wrong(source)] == []
    if not keep:
        for source in sources:
            bed.fill(source)
    if MODELS[name].vocab_multiple:
        for target in targets:  # new padding is zero, and everything else only comes back where it was
            bed.fill(target)
    least = _least(name, before, after, members)
    assert sum(plan.bytes_moved for plan in plans) == least, "more moves than has to"
    carried = sum(nbytes for *_, nbytes in network.messages)
    assert carried <= least + _overhead(plans, staging_bytes), f"{carried} bytes on the wire, where {least} had to move"
    for rank in new:
        common_state.poison(rank.optimizer)
        megatron.load_common_state(rank.optimizer, common(name, before))
        assert common_state.wrong(rank.optimizer) == []
    return plans, new


def _give_back(
    plans: list[RankPlan], sources: list[Holding], targets: list[Holding], staging_bytes: int, network: memory.Network
) -> None:
    """Move layer by layer; each piece has to be claimed once, and given back once."""
    claimed: list[list[int]] = [[] for _ in plans]
    released: list[list[int]] = [[] for _ in plans]

    def done(seen: list[int], holding: Holding, piece: int) -> None:
        seen.append(piece)
        holding.pieces[piece].view().fill_(-1)

    memory.stream_all(
        plans, sources, targets, staging_bytes, network, keep=False,
        each=lambda rank: {
            "claim": functools.partial(done, claimed[rank], targets[rank]),
            "release": functools.partial(done, released[rank], sources[rank]),
        },
    )  # fmt: skip
    for seen, holdings in ((claimed, targets), (released, sources)):
        assert [sorted(pieces) for pieces in seen] == [list(range(len(holding.pieces))) for holding in holdings]


def _overhead(plans: list[RankPlan], staging_bytes: int) -> int:
    """Return what may be carried beyond the slices: their alignment within a message, and a digest for each part."""
    chunk_bytes = staging_bytes // NUM_CHUNKS // ALIGN_BYTES * ALIGN_BYTES
    return sum(ALIGN_BYTES + 8 * -(-recv.nbytes // chunk_bytes) for plan in plans for recv in plan.recvs)


def _least(name: str, before: Split, after: Split, members: Members) -> int:
    return least_bytes(*_sides(name, before, after, members))


def least_of_the_busiest(name: str, before: Split, after: Split, members: Members) -> float:
    return least_busiest(*_sides(name, before, after, members), members.hosts)


def _sides(name: str, before: Split, after: Split, members: Members) -> tuple[list[list[Box]], list[list[Box]]]:
    nothing: list[Box] = []
    held, needed = [nothing] * members.size, [nothing] * members.size
    for place, has in zip(members.old, boxes(name, before), strict=True):
        held[place] = has
    for place, needs in zip(members.new, boxes(name, after), strict=True):
        needed[place] = needs
    return held, needed


def least_bytes(old: list[list[Box]], new: list[list[Box]]) -> int:
    """Return what has to travel at least, element by element."""
    total = 0
    rows = {box.key: box.global_shape[0] for held in old for box in held if box.padded}
    for held, needed in zip(old, new, strict=True):
        marks: dict[str, np.ndarray] = {}
        for box in held if needed else ():
            if box.key not in marks:
                marks[box.key] = np.zeros(box.global_shape, dtype=bool)
            marks[box.key][_within(box)] = True
        for box in needed:
            numel = box.numel
            if box.padded:  # what only the new world has is zero, and comes from nowhere
                numel = box.numel // box.shape[0] * max(0, min(box.shape[0], rows[box.key] - box.offset[0]))
            here = int(marks[box.key][_within(box)].sum()) if box.key in marks else 0
            total += (numel - here) * box.itemsize_bytes
    return total


def least_busiest(old: Sequence[Sequence[Box]], new: Sequence[Sequence[Box]], hosts: Sequence[str]) -> float:
    """Return how much the busiest of up to 63 senders sends at least, were bytes cut as finely as one likes.

    What a rank needs may come from any holder on its host, and from the others only if there is none. No level is
    enough that is below what some ranks alone can send, shared evenly between them; a flow finds ranks for which it is
    not, until there are none.
    """
    wanted = _wanted(old, new, hosts)
    total, least = sum(wanted.values()), 0.0
    while total:
        graph = nx.DiGraph()
        for holders, nbytes in wanted.items():
            graph.add_edge("all", holders, capacity=nbytes)
            graph.add_edges_from((holders, rank) for rank in holders)
            for rank in holders:
                graph.add_edge(rank, "wire", capacity=least)
        flow, (short, _) = nx.minimum_cut(graph, "all", "wire")
        if flow >= total * (1 - 1e-9):
            break
        alone = {rank for rank in short if isinstance(rank, int)}
        least = sum(nbytes for holders, nbytes in wanted.items() if holders <= alone) / len(alone)
    return least


def _wanted(
    old: Sequence[Sequence[Box]], new: Sequence[Sequence[Box]], hosts: Sequence[str]
) -> Counter[frozenset[int]]:
    """Return bytes by the ranks that may send them, element by element."""
    marks: dict[str, np.ndarray] = {}
    for rank, held in enumerate(old):
        for box in held:
            marks.setdefault(box.key, np.zeros(box.global_shape, dtype=np.int64))[_within(box)] |= 1 << rank
    found: Counter[frozenset[int]] = Counter()
    for rank, needed in enumerate(new):
        near = sum(1 << peer for peer, host in enumerate(hosts) if host == hosts[rank])
        for box in needed:  # beyond the old world's rows there are no marks, and nothing comes from anywhere
            for bits, count in zip(*np.unique(marks[box.key][_within(box)], return_counts=True), strict=True):
                if bits and not bits >> rank & 1:
                    may = int(bits) & near or int(bits)
                    senders = frozenset(peer for peer in range(len(hosts)) if may >> peer & 1)
                    found[senders] += int(count) * box.itemsize_bytes
    return found


def _within(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
