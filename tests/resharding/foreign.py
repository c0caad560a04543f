"""Small folders as DeepSpeed lays them out, for what need not be trained first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from resharding.checkpoint.megatron_write import read_tensor
from resharding.checkpoint.opened import Checkpoint
from resharding.listing import Tensor

RENAME = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.weight": r"decoder.layers.\1.self_attention.linear_qkv.\2.weight",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.weight": r"decoder.layers.\1.self_attention.linear_proj.weight",
    r"model\.layers\.(\d+)\.mlp\.(gate|up)_proj\.weight": r"decoder.layers.\1.mlp.linear_fc1.\2.weight",
    r"model\.layers\.(\d+)\.mlp\.down_proj\.weight": r"decoder.layers.\1.mlp.linear_fc2.weight",
    r"model\.layers\.(\d+)\.input_layernorm\.weight": r"decoder.layers.\1.self_attention.linear_qkv.layer_norm_weight",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.weight": r"decoder.layers.\1.mlp.linear_fc1.layer_norm_weight",
}
"""rules that a user of such a model writes"""


def spec_of(groups: Sequence[str]) -> dict[str, Any]:
    """Return what --patterns says, for groups that Megatron knows under these names."""
    rename = [{"match": match, "to": to} for match, to in RENAME.items()]
    return {"rename": rename, "groups": [json.loads(name) for name in groups]}


def universal(folder: Path, state: Mapping[str, torch.Tensor], *, step: int, groups: Sequence[Mapping[str, Any]]) -> Path:
    """Write ``state``, by kind and name, as DeepSpeed's converter does."""
    for key, value in state.items():
        kind, _, name = key.partition("/")
        path = folder / "zero" / name
        path.mkdir(parents=True, exist_ok=True)
        torch.save({"param": value}, path / f"{'fp32' if kind == 'weight' else kind}.pt")
        torch.save(torch.tensor(float(step)), path / "step.pt")
    torch.save({"param_groups": list(groups), "zero_stage": 1}, folder / "zero" / "optimizer_state.pt")
    about = {"global_steps": step, "global_samples": 8 * step}
    torch.save(about, folder / "mp_rank_00_model_states.pt")
    return folder


def zero(root: Path, params: Mapping[str, torch.Tensor], *, frozen: Mapping[str, torch.Tensor] | None = None) -> Path:
    """Write a folder with ``latest`` in which one step of ZeRO lies: stage 3 of two ranks with ``frozen``, or stage 1.

    ``params`` are bf16; main values are the same, first moments twice as much.
    """
    folder = root / "global_step5"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step5\n")
    size = 2 if frozen else 1

    def cut(value: torch.Tensor, rank: int) -> torch.Tensor:
        length = -(-value.numel() // size)
        return torch.nn.functional.pad(value.flatten(), (0, length * size - value.numel()))[rank * length :][:length].clone()

    for rank in range(size):
        main = torch.cat([cut(value.float(), rank) for value in params.values()])
        state = {0: {"exp_avg": 2 * main, "step": torch.tensor(5.0)}}
        inner = {"state": state, "param_groups": [{"lr": 0.25, "weight_decay": 0.1, "params": [0]}]}
        model: dict[str, Any] = {
            "module": dict(params), "param_shapes": [{name: value.shape for name, value in params.items()}],
            "global_steps": 5, "global_samples": 40,
        }  # fmt: skip
        if frozen is None:
            torch.save(model, folder / "mp_rank_00_model_states.pt")
            optimizer = {"single_partition_of_fp32_groups": [main], "base_optimizer_state": inner, "partition_count": 1}
        else:
            model["module"] = {name: torch.empty(0, dtype=value.dtype) for name, value in (params | frozen).items()}
            model["frozen_param_shapes"] = {name: value.shape for name, value in frozen.items()}
            model["frozen_param_fragments"] = {name: cut(value, rank) for name, value in frozen.items()}
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            optimizer = {"fp32_flat_groups": [main], "optimizer_state_dict": inner}
        file = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, file)
    return root


def as_llama(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the tensors of a fp32 checkpoint of ours under the names that the rules of ``RENAME`` are for."""
    found = {}
    for entry in checkpoint.index.entries:
        if entry.kind != "rng":
            tensor = Tensor(entry.key, entry.dtype, entry.shape, False)
            found[f"{entry.kind}/{_llama(entry.name)}"] = read_tensor(checkpoint, tensor)
    return found


def _llama(name: str) -> str:
    layer = name.split(".")[2]
    words = {
        "self_attention.linear_qkv.q": "self_attn.q_proj", "self_attention.linear_qkv.k": "self_attn.k_proj",
        "self_attention.linear_qkv.v": "self_attn.v_proj", "self_attention.linear_proj": "self_attn.o_proj",
        "mlp.linear_fc1.gate": "mlp.gate_proj", "mlp.linear_fc1.up": "mlp.up_proj", "mlp.linear_fc2": "mlp.down_proj",
    }  # fmt: skip
    for ours, theirs in words.items():
        if name == f"decoder.layers.{layer}.{ours}.weight":
            return f"model.layers.{layer}.{theirs}.weight"
    return {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight": f"model.layers.{layer}.input_layernorm.weight",
        f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight": f"model.layers.{layer}.post_attention_layernorm.weight",
    }.get(name, name)  # fmt: skip
