"""Megatron's ``fully_reshardable`` files of worlds of several ranks: written there, converted, and loaded there again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import bed
import ckpt
import pytest
import torch
import torch.distributed as dist
from bed import Model, Split
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from processes import run_all
from test_checkpoint_megatron import CONFIG, keep_steps, stack, state_of, wrong

from resharding.checkpoint.convert import convert
from resharding.checkpoint.megatron_dist import MegatronSource
from resharding.checkpoint.megatron_write import write_megatron
from resharding.checkpoint.opened import Checkpoint

BF16 = torch.bfloat16
DENSE = Model(layers=2, dtype=BF16, groups=2, tied=False, bucket=None)
EXPERTS = Model(layers=2, dtype=BF16, experts=4, shared=16, groups=2, bucket=None)
WORLDS = {
    "tensor and data parallel": (DENSE, Split(tp=2, dp=2), Split(pp=2), Split(dp=2)),
    "stages, tied": (Model(layers=2, bucket=None), Split(pp=2), Split(tp=2, dp=2), Split(tp=2)),
    "experts": (EXPERTS, Split(dp=2, ep=2), Split(tp=2, dp=2, ep=1), Split(dp=2, ep=2)),
}
"""Model; written under, loaded by us under, and loaded by Megatron under."""


def in_ranks(body: Callable[[Path, Model, Split], None], path: Path, model: Model, split: Split) -> None:
    """Run ``body(path, model, split)`` in each rank of a real world."""
    run_all(one_rank, [(body, path, model, split, rank) for rank in range(split.size)])


def one_rank(body: Callable[[Path, Model, Split], None], path: Path, model: Model, split: Split, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(path.with_suffix(f".{body.__name__}")), split.size), rank=rank,
        world_size=split.size, timeout=timedelta(seconds=60),
    )  # fmt: skip
    mpu.initialize_model_parallel(
        split.tp, split.pp, expert_model_parallel_size=split.ep, create_gloo_process_groups=True
    )
    body(path, model, split)
    dist.barrier()
    dist.destroy_process_group()


def save(path: Path, model: Model, split: Split) -> None:
    chunks, optimizer, _ = stack(model, split)
    dist_checkpointing.save({**state_of(chunks, optimizer), "iteration": 7, "consumed_samples": 56}, str(path))


def load(path: Path, model: Model, split: Split) -> None:
    chunks, optimizer, holding = stack(model, split)
    bed.poison(holding)
    loaded = dist_checkpointing.load(state_of(chunks, optimizer, is_loading=True), str(path))
    chunks[0].module.load_state_dict(loaded["model"])
    keep_steps(optimizer)
    optimizer.load_state_dict(loaded["optimizer"])
    assert wrong(holding) == []
    assert {group["lr"] for group in optimizer.param_groups} <= {0.25, 0.5}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "experts" else [pytest.mark.long]) for name in WORLDS]
)
def test_what_several_ranks_of_megatron_wrote_loads_anywhere_and_goes_back_to_them(name: str, tmp_path: Path) -> None:
    model, written, ours, theirs = WORLDS[name]
    path = tmp_path / "iter_0000007"
    path.mkdir()

    in_ranks(save, path, model, written)
    converted = convert(MegatronSource(path, model=CONFIG), tmp_path / "ours").path
    ranks = ckpt.world(model, ours, empty=True)
    for rank in ranks:
        bed.poison(rank.holding)
    ckpt.load(converted, ranks)
    assert [line for rank in ranks for line in wrong(rank.holding)] == []
    with Checkpoint.open(converted) as checkpoint:
        write_megatron(checkpoint, tmp_path / "theirs", expert_parallel=theirs.ep > 1)
    in_ranks(load, tmp_path / "theirs", model, theirs)
