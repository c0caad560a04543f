"""Megatron's ``fully_reshardable`` files of worlds of several ranks: written there, converted, and loaded there again."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import bed
import ckpt
import common_state
import pytest
import torch
import torch.distributed as dist
from bed import Model, Rank, Split
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron_rank import mean_loss, train_step
from processes import run_all
from test_checkpoint_megatron import CONFIG, GROUPS, keep_steps, stack, state_of, wrong, wrong_groups

from resharding import megatron
from resharding.boxes import Holding
from resharding.checkpoint import reader
from resharding.checkpoint.convert import convert
from resharding.checkpoint.format import INDEX_NAME
from resharding.checkpoint.megatron_dist import MegatronSource
from resharding.checkpoint.megatron_write import read_tensor, write_megatron
from resharding.checkpoint.model import fused_in
from resharding.checkpoint.opened import Checkpoint

BF16 = torch.bfloat16
DENSE = Model(layers=2, dtype=BF16, groups=2, tied=False, bucket=None)
EXPERTS = Model(layers=2, dtype=BF16, experts=4, shared=16, groups=2, bucket=None)
WORLDS = {
    "tensor and data parallel": (DENSE, Split(tp=2, dp=2), Split(pp=2), Split(dp=2)),
    "stages, tied": (Model(layers=2, bucket=None), Split(pp=2), Split(tp=2, dp=2), Split(tp=2)),
    "experts": (EXPERTS, Split(dp=2, ep=2), Split(tp=2, dp=2, ep=1), Split(dp=2, ep=2)),
    "experts, brought together": (EXPERTS, Split(), Split(dp=2, ep=2), Split()),
}
"""Model; written by Megatron under, loaded and saved again by us under, and loaded by Megatron under."""


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
    common_state.poison(optimizer)
    loaded = dist_checkpointing.load(state_of(chunks, optimizer, is_loading=True), str(path))
    chunks[0].module.load_state_dict(loaded["model"])
    keep_steps(optimizer)
    optimizer.load_state_dict(loaded["optimizer"])
    assert wrong(holding) == []
    assert wrong_groups(optimizer) == []


def saved_again(folder: Path, ranks: list[Rank]) -> Path:
    """Save as a job does, with what its optimizers keep besides tensors."""
    path = ckpt.save(folder, ranks, step=7)
    optimizer = {
        **megatron.merge_common_state([megatron.common_state(rank.optimizer) for rank in ranks]),
        "settings": {name: said for rank in ranks for name, said in megatron.group_settings(rank.optimizer).items()},
    }
    with Checkpoint.open(path) as checkpoint:
        index = checkpoint.index
    (path / INDEX_NAME).write_bytes(replace(index, meta=replace(index.meta, optimizer=optimizer)).encode())
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "experts" in name else [pytest.mark.long]) for name in WORLDS]
)
def test_what_several_ranks_of_megatron_wrote_loads_anywhere_and_goes_back_to_them(name: str, tmp_path: Path) -> None:
    """Straight from what they wrote, and from what we saved again under a layout in which experts lie otherwise."""
    model, written, ours, theirs = WORLDS[name]
    path = tmp_path / "iter_0000007"
    path.mkdir()

    in_ranks(save, path, model, written)
    converted = convert(MegatronSource(path, model=CONFIG), tmp_path / "ours").path
    ranks = ckpt.world(model, ours, empty=True)
    with Checkpoint.open(converted) as checkpoint:
        said = checkpoint.index.meta.optimizer
    for rank in ranks:
        bed.poison(rank.holding)
        common_state.poison(rank.optimizer)
        for leaf in megatron.leaves(rank.optimizer):
            for group in leaf.optimizer.param_groups:
                group["lr_mult"] = GROUPS[group["wd_mult"]]["lr_mult"]
        megatron.load_common_state(rank.optimizer, said)
    ckpt.load(converted, ranks)
    assert [line for rank in ranks for line in wrong(rank.holding) + wrong_groups(rank.optimizer)] == []
    for number, folder in enumerate((converted, saved_again(tmp_path / "again", ranks))):
        with Checkpoint.open(folder) as checkpoint:
            back = write_megatron(checkpoint, tmp_path / f"theirs{number}", expert_parallel=theirs.ep > 1)
        in_ranks(load, back, model, theirs)


AMSGRAD = Model(layers=2, groups=2, bucket=None)
BATCHES = torch.randint(AMSGRAD.vocab, (8, 4, AMSGRAD.sequence + 1), generator=torch.Generator().manual_seed(1))
DONE = 4
"""steps, when it is saved"""


def keep_largest(rank: Rank) -> None:
    """Have Adam keep its largest second moments, and forget its last ones so soon that they are others."""
    for leaf in megatron.leaves(rank.optimizer):
        leaf.optimizer.state.clear()
        for group in leaf.optimizer.param_groups:
            group.update(amsgrad=True, betas=(0.5, 0.5), lr=0.01)
    megatron.materialize_optimizer_state(rank.optimizer)
    rank.holding = megatron.holding_of(rank.chunks, rank.optimizer)
    vars(rank).update(fused=fused_in(rank.chunks))


def trained(rank: Rank, steps: range) -> list[float]:
    """Train; return the loss before each step."""
    losses = []
    for step in steps:
        losses.append(mean_loss(rank.chunks, BATCHES[step]))
        train_step(rank.chunks, rank.optimizer, BATCHES[step])
    return losses


def train_and_save(path: Path, model: Model, split: Split) -> None:
    rank = Rank(*bed.build(model, split), Holding.of([]), {})
    keep_largest(rank)
    trained(rank, range(DONE))
    saved_again(path, [rank])
    (path / "losses.json").write_text(json.dumps(trained(rank, range(DONE, len(BATCHES)))))


def load_and_train(path: Path, model: Model, split: Split) -> None:
    rank = Rank(*bed.build(model, split), Holding.of([]), {})
    keep_largest(rank)
    bed.poison(rank.holding)
    common_state.poison(rank.optimizer)
    with Checkpoint.open(path / "step-00000007") as checkpoint:
        reader.read_into(checkpoint, rank.holding)
        megatron.load_common_state(rank.optimizer, checkpoint.index.meta.optimizer)
    truth = json.loads((path / "losses.json").read_text())
    assert trained(rank, range(DONE, len(BATCHES))) == pytest.approx(truth, rel=1e-5)


def test_what_an_optimizer_keeps_beyond_two_moments_is_trained_on_with_under_another_layout(tmp_path: Path) -> None:
    """Largest second moments (AMSGrad): bit for bit in the files of another layout, and in what training makes of them."""
    path = tmp_path / "amsgrad"
    in_ranks(train_and_save, path, AMSGRAD, Split())
    with Checkpoint.open(path / "step-00000007") as checkpoint:
        state = {tensor.key: read_tensor(checkpoint, tensor) for tensor in checkpoint.index.whole}
    moments = {key.removeprefix("exp_avg_sq/"): value for key, value in state.items() if key.startswith("exp_avg_sq/")}
    assert len(moments) > 10
    assert all((state[f"max_exp_avg_sq/{name}"] > value).any() for name, value in moments.items())
    ranks = bed.world(AMSGRAD, Split(tp=2, dp=2), inside=keep_largest)
    for rank in ranks:
        bed.poison(rank.holding)
    ckpt.load(path / "step-00000007", ranks)
    again = ckpt.save(tmp_path / "again", ranks, step=7)
    names = sorted(file.name for file in again.glob("*.safetensors"))
    assert "max_exp_avg_sq-00001.safetensors" in names
    assert filecmp.cmpfiles(path / "step-00000007", again, names, shallow=False)[0] == names
    in_ranks(load_and_train, path, AMSGRAD, Split(tp=2))
