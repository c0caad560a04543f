"""Megatron's own files, written and loaded by Megatron itself, in a real world of one rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import bed
import ckpt
import common_state
import pytest
import torch
import torch.distributed as dist
from bed import Model, Split
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu

from resharding import megatron
from resharding.checkpoint.convert import convert
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.megatron_dist import MegatronSource
from resharding.checkpoint.megatron_write import write_megatron
from resharding.checkpoint.opened import Checkpoint

BF16 = torch.bfloat16
MODELS = {
    "grouped queries": Model(layers=2, dtype=BF16, tied=False, groups=2, bucket=None),
    "fp32, tied": Model(layers=2, bucket=None),
    "experts": Model(layers=2, dtype=BF16, experts=4, shared=16, groups=2, bucket=None),
}
CONFIG = {"num_attention_heads": 4, "num_query_groups": 2, "hidden_size": 32, "gated_linear_unit": True}
RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
GROUPS = {
    1.0: {"lr_mult": 1.0, "lr": 0.25, "weight_decay": 0.125}, 0.0: {"lr_mult": 0.1, "lr": 0.5, "weight_decay": 0.0625}
}  # fmt: skip
"""What parameter groups are at, by what their weight decay is multiplied with."""
STEP = 5.0


@contextmanager
def one_real_rank(folder: Path) -> Iterator[None]:
    """A world of one rank over gloo: dist_checkpointing runs collectives and writer processes of its own."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    mpu.initialize_model_parallel(create_gloo_process_groups=True)
    try:
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def stack(model: Model, split: Split = Split()):  # noqa: B008
    """Build it with every number in its place; weights are what main values are cut to."""
    chunks, optimizer = bed.build(model, split)
    megatron.materialize_optimizer_state(optimizer)
    holding = megatron.holding_of(chunks, optimizer)
    fill(holding)
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in leaf.optimizer.param_groups:
            group.update(GROUPS[group["wd_mult"]])
        for adam in leaf.optimizer.state.values():
            adam["step"].fill_(STEP)
    return chunks, optimizer, holding


def fill(holding) -> None:
    bed.fill(holding)
    for piece in holding.pieces:
        if piece.box.key.startswith("weight/") and piece.box.dtype == "bfloat16":
            piece.view().copy_(as_cut(piece.box))


def as_cut(box):
    return bed.expected(replace(box, key=box.key.replace("weight/", "main/"), dtype="float32")).to(BF16)


def wrong(holding) -> list[str]:
    return [
        piece.box.key for piece in holding.pieces
        if not torch.equal(
            piece.view(),
            as_cut(piece.box) if piece.box.key.startswith("weight/") and piece.box.dtype == "bfloat16"
            else bed.expected(piece.box),
        )
    ]  # fmt: skip


def wrong_groups(optimizer) -> list[str]:
    """Return what parameter groups have that is not as ``stack`` left it."""
    found = []
    for leaf in megatron.leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            wanted = GROUPS[group["wd_mult"]]
            found += [f"{name} is {group[name]}, not {wanted[name]}" for name in wanted if group[name] != wanted[name]]
            steps = {float(leaf.optimizer.state[param]["step"]) for param in group["params"]}
            found += [f"step is {step}, not {STEP}" for step in steps - {STEP}]
    return found


def state_of(chunks, optimizer, *, is_loading: bool = False, kind: str = "fully_reshardable"):
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    state = {name: chunk.module.sharded_state_dict() for name, chunk in zip(names, chunks, strict=True)}
    state["optimizer"] = optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata={"distrib_optim_sharding_type": kind}
    )
    return state


def saved_by_megatron(folder: Path, model: Model, kind: str = "fully_reshardable") -> Path:
    path = folder / "iter_0000007"
    path.mkdir()
    with one_real_rank(folder):
        chunks, optimizer, _ = stack(model)
        state = {**state_of(chunks, optimizer, kind=kind), "iteration": 7, "consumed_samples": 56}
        dist_checkpointing.save(state, str(path))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_what_megatron_saved_loads_anywhere_and_goes_back_to_megatron(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    source = MegatronSource(saved_by_megatron(tmp_path, model), model=CONFIG)
    path = convert(source, tmp_path / "ours").path
    ep = 2 if model.experts else 1  # from ep 1 to 2, which Megatron's own files cannot
    ranks = ckpt.world(model, Split(tp=2, dp=ep, ep=ep), empty=True)
    for rank in ranks:
        bed.poison(rank.holding)
    ckpt.load(path, ranks)
    assert [line for rank in ranks for line in wrong(rank.holding)] == []
    with Checkpoint.open(path) as checkpoint:
        meta = checkpoint.index.meta
        assert (meta.step, meta.consumed_samples) == (7, 56)
        settings = {name: json.loads(name) for name in meta.optimizer["groups"]}
        said = {
            settings[name]["wd_mult"]: {"lr_mult": settings[name]["lr_mult"], **group}
            for name, group in meta.optimizer["groups"].items()
        }
        assert said == {wd_mult: {**group, "step": STEP} for wd_mult, group in GROUPS.items()}
        names = {entry.key for entry in checkpoint.index.entries}
        assert "exp_avg/decoder.layers.1.self_attention.linear_qkv.q.weight" in names or name == "fp32, tied"
        theirs = write_megatron(checkpoint, tmp_path / "theirs")
        with pytest.raises(BadCheckpoint, match="theirs exists; name a folder that does not"):
            write_megatron(checkpoint, theirs)
    (tmp_path / "store").unlink()
    with one_real_rank(tmp_path):
        chunks, optimizer, holding = stack(model)
        bed.poison(holding)
        common_state.poison(optimizer)
        loaded = dist_checkpointing.load(state_of(chunks, optimizer, is_loading=True), str(theirs))
        chunks[0].module.load_state_dict(loaded["model"])
        keep_steps(optimizer)
        optimizer.load_state_dict(loaded["optimizer"])
        assert wrong(holding) == []
        assert wrong_groups(optimizer) == []


def keep_steps(optimizer) -> None:
    """torch's Adam keeps a step for each parameter, which Megatron's load forgets and asks for: its group's is taken."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):

        def set_states(param, tensors, part=part, original=part._set_main_param_and_optimizer_states):
            number, _ = part.model_param_group_index_map[param]
            original(param, {**tensors, "step": torch.tensor(float(part.optimizer.param_groups[number]["step"]))})

        part._set_main_param_and_optimizer_states = set_states


def test_files_that_megatron_wrote_wrongly_are_flagged_and_their_weights_are_not(tmp_path: Path) -> None:
    """Several buckets with padding between them: megatron-core 0.16 misplaces what lies behind it, without a word."""
    model = replace(MODELS["grouped queries"], bucket=3000)
    path = saved_by_megatron(tmp_path, model)
    with pytest.raises(BadCheckpoint, match=r"the main values of .* are not what its weight was cut from; .*--weights-only"):
        convert(MegatronSource(path), tmp_path / "ours")
    assert not list((tmp_path / "ours").iterdir())
    weights = convert(MegatronSource(path, weights_only=True), tmp_path / "ours").path
    with Checkpoint.open(weights) as checkpoint:
        assert {entry.kind for entry in checkpoint.index.entries} == {"weight"}


def test_what_a_folder_does_not_say_is_asked_for(tmp_path: Path) -> None:
    path = saved_by_megatron(tmp_path, MODELS["fp32, tied"])
    common = torch.load(path / "common.pt", weights_only=False)
    del common["consumed_samples"]
    torch.save(common, path / "common.pt")
    with pytest.raises(BadCheckpoint, match="does not say what --consumed-samples is; pass it"):
        MegatronSource(path)
    assert MegatronSource(path, consumed_samples=3, step=9).meta.step == 9
    with pytest.raises(BadCheckpoint, match=r"has no \.metadata"):
        MegatronSource(tmp_path)


def test_a_conversion_that_was_interrupted_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resharding.checkpoint.convert.SYNC_BYTES", 1)
    path = saved_by_megatron(tmp_path, MODELS["grouped queries"])
    whole = convert(MegatronSource(path, model=CONFIG), tmp_path / "whole")
    assert whole.num_resumed == 0

    def interrupt(_nbytes: int, left=[20]) -> None:  # noqa: B006
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(MegatronSource(path, model=CONFIG), tmp_path / "parts", progress=interrupt)
    again = convert(MegatronSource(path, model=CONFIG), tmp_path / "parts")
    assert again.num_resumed >= 19
    for file in whole.path.iterdir():
        assert file.read_bytes() == (again.path / file.name).read_bytes()
    assert sorted(each.name for each in (tmp_path / "parts").iterdir()) == ["latest", "step-00000007"]
    shutil.rmtree(tmp_path / "parts")


def test_nothing_in_their_pickles_is_executed(tmp_path: Path) -> None:
    import os

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'owned'}",)

    path = saved_by_megatron(tmp_path, MODELS["fp32, tied"])
    common = torch.load(path / "common.pt", weights_only=False)
    torch.save({**common, "args": Evil()}, path / "common.pt")
    assert MegatronSource(path).meta.step == 7
    assert not (tmp_path / "owned").exists()
