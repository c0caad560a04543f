"""Optimizer state that names no parameter, written by Megatron in real worlds of several ranks."""

from __future__ import annotations

import shutil
from dataclasses import replace
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
from test_checkpoint_megatron import stack, state_of, wrong

from launcher.checkpoint import _model_of
from liverun.buffers import buffers_of
from liverun.layout import Layout
from resharding.checkpoint.buckets import Parameter, Stretch, in_transformer_engines_order
from resharding.checkpoint.convert import convert
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.megatron_dist import MegatronSource
from resharding.checkpoint.model import described
from resharding.checkpoint.opened import Checkpoint

BF16 = torch.bfloat16
DENSE = Model(layers=3, dtype=BF16, groups=2, bias=True, tied=False)
WORLDS = {
    "dense, many buckets": (DENSE, Split(tp=2, dp=2), Split(dp=3)),
    "stages, tied": (Model(layers=4, hidden=64, bucket=9000), Split(pp=2, dp=2, vpp=2), Split(tp=2)),
    "experts": (
        Model(layers=2, dtype=BF16, experts=4, shared=16, groups=2, dense_first=True), Split(tp=2, dp=2, ep=2),
        Split(pp=2),
    ),
}


def arguments_of(model: Model, split: Split) -> dict:
    """What Megatron's scripts keep in a checkpoint's ``args``, as far as it matters."""
    return {
        "num_layers": model.layers, "hidden_size": model.hidden, "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads, "num_query_groups": model.groups, "group_query_attention": True,
        "swiglu": model.gated, "add_bias_linear": model.bias, "normalization": "RMSNorm", "num_experts": model.experts,
        "moe_ffn_hidden_size": model.expert_ffn if model.experts else None,
        "moe_shared_expert_intermediate_size": model.shared,
        "moe_layer_freq": [0] + [1] * (model.layers - 1) if model.dense_first else 1,
        "tensor_model_parallel_size": split.tp, "pipeline_model_parallel_size": split.pp,
        "virtual_pipeline_model_parallel_size": split.vpp if split.vpp > 1 else None,
        "expert_model_parallel_size": split.ep, "expert_tensor_parallel_size": split.expert_tp,
        "transformer_impl": "local", "lr": 1e-3,
    }  # fmt: skip


def saved(folder: Path, model: Model, split: Split) -> Path:
    """Have a world of real ranks save."""
    path = folder / "iter_0000007"
    path.mkdir()
    run_all(save_rank, [(folder, path, model, split, rank) for rank in range(split.size)])
    return path


def save_rank(folder: Path, path: Path, model: Model, split: Split, rank: int) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), split.size), rank=rank, world_size=split.size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    mpu.initialize_model_parallel(
        split.tp, split.pp, split.vpp if split.vpp > 1 else None, expert_model_parallel_size=split.ep,
        expert_tensor_parallel_size=split.etp or None, create_gloo_process_groups=True,
    )  # fmt: skip
    chunks, optimizer, _ = stack(model, split)
    state = state_of(chunks, optimizer, kind="dp_reshardable")
    state |= {"iteration": 7, "consumed_samples": 56, "args": arguments_of(model, split)}
    dist_checkpointing.save(state, str(path))
    dist.barrier()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("dense"), *WORLDS["dense, many buckets"][:2])


@pytest.mark.parametrize("name", WORLDS)
def test_state_that_names_no_parameter_loads_anywhere(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, split, other = WORLDS[name]
    theirs = request.getfixturevalue("dense") if model is DENSE else saved(tmp_path, model, split)
    source = MegatronSource(theirs, buffers_of=buffers_of)
    path = convert(source, tmp_path / "ours").path
    ranks = ckpt.world(model, other, empty=True)
    for rank in ranks:
        bed.poison(rank.holding)
    ckpt.load(path, ranks)
    assert [line for rank in ranks for line in wrong(rank.holding)] == []
    with Checkpoint.open(path) as checkpoint:
        groups = checkpoint.index.meta.optimizer["groups"]
        assert {group["lr"] for group in groups.values()} == {0.25, 0.5}
        assert {group["step"] for group in groups.values()} == {5.0}


def test_a_configuration_that_is_not_the_models_is_refused_and_what_is_missing_asked_for(
    dense: Path, tmp_path: Path
) -> None:
    path = dense

    def refusal(**changes) -> str:
        with pytest.raises(BadCheckpoint) as caught:
            convert(MegatronSource(path, model=changes, buffers_of=buffers_of), tmp_path / "ours")
        assert not list((tmp_path / "ours").glob("*"))
        return str(caught.value)

    assert "num_layers, transformer_impl is; write it into the JSON of --model-config" in refusal(
        num_layers=None, transformer_impl=None
    )
    assert "mlp.linear_fc1.weight is of shape (80, 32), and the model's of (96, 32)" in refusal(ffn_hidden_size=48)
    assert "it has no decoder.layers.3." in refusal(num_layers=4)
    assert "it has 2 buffers of parameters and a model of this layout 1" in refusal(tensor_model_parallel_size=1)
    assert "elements, and the model's parameters end after" in refusal(add_bias_linear=False)
    assert "elements, and the model's parameters end after" in refusal(num_layers=2)
    assert "Megatron says of this configuration: " in refusal(moe_ffn_hidden_size=8)
    assert "not what its weight was cut from; correct --model-config" in refusal(transformer_impl="transformer_engine")
    weights = convert(MegatronSource(path, weights_only=True), tmp_path / "ours").path
    with Checkpoint.open(weights) as checkpoint:
        assert {entry.kind for entry in checkpoint.index.entries} == {"weight"}
    with pytest.raises(BadCheckpoint, match="dp_reshardable, which does not name the parameters of its optimizer"):
        MegatronSource(path)


def test_a_checkpoint_of_ours_says_the_configuration(dense: Path, tmp_path: Path) -> None:
    """In place of Megatron's arguments, which this folder does not have."""
    model, split, other = WORLDS["dense, many buckets"]
    theirs = shutil.copytree(dense, tmp_path / dense.name)
    common = torch.load(theirs / "common.pt", weights_only=False)
    del common["args"]
    torch.save(common, theirs / "common.pt")
    ranks = ckpt.world(model, split)
    ours = ckpt.save(tmp_path / "job", ranks)
    with Checkpoint.open(ours) as checkpoint:
        index = checkpoint.index
    origin = {"model": described(ranks[0].chunks), "layout": Layout(tp=2).as_dict()}
    (ours / "index.json").write_bytes(replace(index, meta=replace(index.meta, origin=origin)).encode())
    source = MegatronSource(theirs, model=_model_of(ours.parent), buffers_of=buffers_of)
    path = convert(source, tmp_path / "ours").path
    ranks = ckpt.world(model, other, empty=True)
    for rank in ranks:
        bed.poison(rank.holding)
    ckpt.load(path, ranks)
    assert [line for rank in ranks for line in wrong(rank.holding)] == []


def test_with_transformer_engine_norms_stand_before_their_matrix_and_first_matrices_before_second_ones() -> None:
    """The orders are those of its modules: ``LayerNormLinear`` and ``GroupedLinear``."""
    layer = "decoder.layers.0."
    experts = f"{layer}mlp.experts.experts."
    local = [
        "embedding.word_embeddings.weight", f"{layer}self_attention.linear_qkv.layer_norm_weight",
        f"{layer}self_attention.linear_proj.weight", f"{layer}self_attention.linear_qkv.weight",
        f"{layer}self_attention.linear_qkv.bias", f"{layer}pre_mlp_layernorm.weight", f"{layer}mlp.router.weight",
        *(f"{experts}linear_fc{matrix}.{kind}" for _ in range(2) for matrix in (1, 2) for kind in ("weight", "bias")),
        f"{layer}mlp.shared_experts.linear_fc1.weight", "decoder.final_layernorm.weight",
    ]  # fmt: skip
    fused = in_transformer_engines_order(
        Parameter(
            numel=number,
            stretches=(Stretch(name=name, global_shape=(1,), offset=(0,), shape=(1,), base=0, strides=(1,)),),
        )
        for number, name in enumerate(local)
    )
    assert [parameter.numel for parameter in fused] == [0, 2, 1, 3, 4, 5, 6, 7, 8, 11, 12, 9, 10, 13, 14, 15, 16]
