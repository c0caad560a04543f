"""One of two ranks of ``test_families_over_gloo``: RANK STORE_FILE SEED FAMILY... Real groups, real peers, no fake."""

from __future__ import annotations

import json
import random
import sys
from datetime import timedelta

import bed
import torch.distributed as dist
from bed import Split
from families import MODELS, splits
from megatron.core import parallel_state as mpu

from resharding import megatron
from resharding.boxes import Holding
from resharding.listing import exchange, listing_of
from resharding.plan import plan_for
from resharding.stream import ProcessGroupTransport, execute

SIZE = 2


def holding(name: str, split: Split) -> Holding:
    mpu.initialize_model_parallel(
        split.tp, split.pp, split.vpp if split.vpp > 1 else None, context_parallel_size=split.cp,
        expert_model_parallel_size=split.ep, expert_tensor_parallel_size=split.etp or None,
        create_gloo_process_groups=False,
    )  # fmt: skip
    chunks, optimizer = bed.build(MODELS[name], split)
    megatron.materialize_optimizer_state(optimizer)
    held = megatron.holding_of(chunks, optimizer)
    mpu.destroy_model_parallel()
    return held


def gather(data: bytes) -> list[bytes]:
    said: list[bytes] = [b""] * SIZE
    dist.all_gather_object(said, data)
    return said


def main() -> None:
    rank, store, seed, names = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    group = dist.distributed_c10d._get_default_group()
    told = {}
    for name in names:
        dice = random.Random(f"{seed} {name}")
        before, after = dice.sample([split for split in splits(name)[0] if split.size == SIZE], 2)
        source, target = holding(name, before), holding(name, after)
        bed.fill(source)
        bed.poison(target)
        old, new = exchange(gather, rank, listing_of(source), listing_of(target))
        plan = plan_for(rank, old, new, ["here"] * SIZE)
        keep = dice.random() < 0.5
        report = execute(plan, source, target, ProcessGroupTransport(group), 1 << 16, keep=keep)
        told[name] = {
            "pair": f"{before} -> {after}", "wrong": bed.wrong(target) + bed.wrong(source), "moved": report.bytes_moved,
            "pieces": len(target.pieces),
        }  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
