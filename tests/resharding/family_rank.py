"""One of the ranks of ``test_families_over_gloo``: PLACE STORE_FILE SEED FAMILY... Real groups, real peers, no fake.

A world's ranks are some of the processes, and its groups are destroyed once it is built; the bridge has all of them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from datetime import timedelta

import bed
import common_state
import torch
import torch.distributed as dist
from bed import Split
from families import MODELS, Members, splits
from megatron.core import parallel_state as mpu

from resharding import megatron
from resharding.boxes import Holding
from resharding.listing import exchange, listing_of
from resharding.pages import PageReturner
from resharding.plan import plan_all
from resharding.stream import execute
from resharding.transport import ProcessGroupTransport

SIZE = 4
SIZES = ((2, 4), (4, 2), (2, 2))
"""of the old and the new world, family by family"""
LIMIT = timedelta(seconds=60)


def pair_of(name: str, dice: random.Random) -> tuple[Split, Split, Members]:
    """Draw two layouts, and which processes are their ranks: some join, some leave, in any order."""
    old, new = SIZES[list(MODELS).index(name) % len(SIZES)]
    small = splits(name)[0]
    before = dice.choice([split for split in small if split.size == old])
    after = dice.choice([split for split in small if split.size == new and split != before])
    return before, after, Members(tuple(dice.sample(range(SIZE), old)), tuple(dice.sample(range(SIZE), new)), SIZE)


def built(name: str, split: Split, places: tuple[int, ...], place: int, store: dist.Store) -> tuple[object, Holding]:
    """Build this process's rank of a world, if it is in it."""
    if place not in places:
        return None, Holding.of([])
    dist.init_process_group("gloo", store=store, rank=places.index(place), world_size=split.size, timeout=LIMIT)
    mpu.initialize_model_parallel(
        split.tp, split.pp, split.vpp if split.vpp > 1 else None, context_parallel_size=split.cp,
        expert_model_parallel_size=split.ep, expert_tensor_parallel_size=split.etp or None,
        create_gloo_process_groups=False,
    )  # fmt: skip
    chunks, optimizer = bed.build(MODELS[name], split)
    megatron.materialize_optimizer_state(optimizer)
    held = megatron.holding_of(chunks, optimizer)
    dist.barrier()
    mpu.destroy_model_parallel()
    dist.destroy_process_group()
    return optimizer, held


def gather_over(store: dist.Store, place: int) -> Callable[[bytes], list[bytes]]:
    turns = iter(range(1000))

    def gather(data: bytes) -> list[bytes]:
        turn = next(turns)
        store.set(f"{turn}/{place}", data)
        return [bytes(store.get(f"{turn}/{peer}")) for peer in range(SIZE)]

    return gather


def main() -> None:
    place, path, seed, names = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    store = dist.FileStore(path, SIZE)
    group = dist.ProcessGroupGloo(dist.PrefixStore("bridge", store), place, SIZE, LIMIT)
    gather = gather_over(dist.PrefixStore("said", store), place)
    told = {}
    for name in names:
        dice = random.Random(f"{seed} {name}")
        moved, turn = 0, 0
        while not moved:
            before, after, members = pair_of(name, dice)
            keep = dice.random() < 0.5
            inner = [dist.PrefixStore(f"{name}/{turn}/{side}", store) for side in ("old", "new")]
            old_optimizer, source = built(name, before, members.old, place, inner[0])
            optimizer, target = built(name, after, members.new, place, inner[1])
            old, new = exchange(gather, place, listing_of(source), listing_of(target))
            plans = plan_all(old, new, ["here"] * SIZE)
            moved, turn = sum(plan.bytes_moved for plan in plans), turn + 1
        bed.fill(source)
        bed.poison(target)
        common: dict[str, object] = {}
        if old_optimizer is not None:
            common_state.fill(old_optimizer)
            common = megatron.common_state(old_optimizer)
        merged = megatron.merge_common_state([json.loads(said) for said in gather(json.dumps(common).encode())])
        returner = PageReturner(source)
        report = execute(
            plans[place], source, target, ProcessGroupTransport(group), 1 << 16, keep=keep,
            release=None if keep else returner.piece,
        )  # fmt: skip
        rows = {box.key: box.global_shape[0] for listing in old for box in listing.boxes if box.padded}
        wrong = bed.wrong(target, rows) + (bed.wrong(source) if keep else [])
        if optimizer is not None:
            common_state.poison(optimizer)
            megatron.load_common_state(optimizer, merged)
            wrong += common_state.wrong(optimizer)
        told[name] = {
            "pair": f"{before} -> {after}, {'kept' if keep else 'given back'}", "wrong": wrong, "moved": report.bytes_moved,
            "pieces": len(target.pieces), "is_new": optimizer is not None,
        }  # fmt: skip
    group.allreduce([torch.zeros(1)]).wait()
    gather(b"")  # nobody leaves while another one still reads from the store
    print(json.dumps(told))


if __name__ == "__main__":
    main()
