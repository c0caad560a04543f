"""Weights for models of Hugging Face's Llama family: the folder that ``transformers`` loads. Needs no torch.

Names are mapped here, once, for this one family; everything else in this package knows no parameter names. Numbers go
from file to file, slab by slab.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resharding.checkpoint import folder as folders
from resharding.checkpoint.files import MAX_FILE_BYTES, Files, describe_files, lay_out
from resharding.checkpoint.format import BadCheckpoint, Entry
from resharding.checkpoint.opened import Checkpoint

_NAMES = {
    r"embedding\.word_embeddings\.weight": "model.embed_tokens.weight",
    r"decoder\.final_layernorm\.weight": "model.norm.weight",
    r"output_layer\.weight": "lm_head.weight",
    r"decoder\.layers\.(\d+)\.self_attention\.linear_qkv\.([qkv])\.weight":
        r"model.layers.\1.self_attn.\2_proj.weight",
    r"decoder\.layers\.(\d+)\.self_attention\.linear_qkv\.([qkv])\.bias": r"model.layers.\1.self_attn.\2_proj.bias",
    r"decoder\.layers\.(\d+)\.self_attention\.linear_proj\.(weight|bias)": r"model.layers.\1.self_attn.o_proj.\2",
    r"decoder\.layers\.(\d+)\.mlp\.linear_fc1\.(gate|up)\.(weight|bias)": r"model.layers.\1.mlp.\2_proj.\3",
    r"decoder\.layers\.(\d+)\.mlp\.linear_fc2\.(weight|bias)": r"model.layers.\1.mlp.down_proj.\2",
    r"decoder\.layers\.(\d+)\.(?:self_attention\.linear_qkv\.layer_norm_weight|input_layernorm\.weight)":
        r"model.layers.\1.input_layernorm.weight",
    r"decoder\.layers\.(\d+)\.(?:mlp\.linear_fc1\.layer_norm_weight|pre_mlp_layernorm\.weight)":
        r"model.layers.\1.post_attention_layernorm.weight",
}  # fmt: skip
ASKED = {"rotary_base": "--rope-theta", "layernorm_epsilon": "--norm-eps", "max_sequence_length": "--max-positions"}
"""what weights do not tell, and how it is asked for"""
FAMILY = {
    "normalization": "RMSNorm", "activation_func": "silu", "position_embedding_type": "rope", "rotary_percent": 1.0,
    "rotary_interleaved": False, "rotary_scaling": False, "layernorm_zero_centered_gamma": False,
}  # fmt: skip
"""what models of the family have, and weights do not tell"""
RARE = {
    "glu_linear_offset": 0.0, "activation_func_clamp_value": None, "softmax_scale": None,
    "attention_output_gate": False,
}  # fmt: skip
"""what they have as well, and need not be asked for: no release without these fields has anything else"""


def export_llama(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    model: Mapping[str, Any],
    vocab_size: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write ``folder``, which must not exist, with ``config.json`` and weights. Raises ``BadCheckpoint``.

    ``model`` goes before what the checkpoint says of its model; ``vocab_size`` leaves padding rows out.
    """
    if folder.exists():
        raise BadCheckpoint(f"{folder} exists; name a folder that does not")
    config = _config(checkpoint, {**checkpoint.index.meta.origin.get("model", {}), **model}, vocab_size)
    named = {_named(entry): entry for entry in checkpoint.index.entries if entry.kind == "weight"}
    rows = [(name, entry.dtype, _shape(entry, vocab_size), False) for name, entry in named.items()]
    entries, headers = lay_out(rows, MAX_FILE_BYTES, stem="model", metadata={"format": "pt"})
    temporary = folder.with_name(f".{folder.name}.{folders.fresh_nonce()}.tmp")
    temporary.mkdir(parents=True)
    try:
        with Files(temporary, writing=True) as files:
            for file in describe_files(entries, headers):
                files.create(file.name, headers[file.name], file.nbytes)
            for target in entries:
                for start, data in checkpoint.slabs(named[target.key]):
                    kept = data[: max(0, target.shape[0] - start[0])]
                    if kept.size:
                        files.write(target, start, kept)
                    progress(data.nbytes)
            files.sync()
        _write_json(temporary / "config.json", config)
        weight_map = {target.key: target.file for target in entries}
        total = sum(target.nbytes for target in entries)
        _write_json(
            temporary / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_json(path: Path, value: object) -> None:
    folders.write_synced(path, (json.dumps(value, indent=2) + "\n").encode())


def _named(entry: Entry) -> str:
    for ours, theirs in _NAMES.items():
        match = re.fullmatch(ours, entry.name)
        if match is not None:
            return match.expand(theirs)
    raise BadCheckpoint(f"{entry.key} has no place in a model of the Llama family, so it cannot be exported as one")


def _shape(entry: Entry, vocab_size: int | None) -> tuple[int, ...]:
    if vocab_size is None or not entry.padded:
        return entry.shape
    return (min(vocab_size, entry.shape[0]), *entry.shape[1:])


def _config(checkpoint: Checkpoint, model: Mapping[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """Return ``config.json``. Raises ``BadCheckpoint`` for what is not known."""
    entries = checkpoint.index.by_key
    layers = _layers(checkpoint)
    spec = checkpoint.index.fused.get("decoder.layers.0.self_attention.linear_qkv.weight")
    if spec is None or [name.split(".")[-2] for name, _ in spec.parts] != ["q", "k", "v"]:
        raise BadCheckpoint(f"{checkpoint.folder} does not name q, k and v apart; convert it with --model-config")
    for name, option in ASKED.items():
        if not isinstance(model.get(name), int | float):
            raise BadCheckpoint(f"{checkpoint.folder} does not say what {name} is; pass {option}")
    for name, wanted in FAMILY.items():
        if name not in model:
            raise BadCheckpoint(
                f"{checkpoint.folder} does not say what {name} is; write it into the JSON of --model-config, models "
                f"of the Llama family have {json.dumps(wanted)}"
            )
    for name, wanted in {**FAMILY, **RARE}.items():
        if model.get(name, wanted) != wanted:
            raise BadCheckpoint(
                f"{checkpoint.folder} has {name} {model[name]!r}, and models of the Llama family have {wanted!r}; it "
                "cannot be exported as one"
            )
    (_, queries), (_, head_dim), _ = spec.parts
    embedding = entries["weight/embedding.word_embeddings.weight"]
    gate = entries.get("weight/decoder.layers.0.mlp.linear_fc1.gate.weight")
    if gate is None:
        raise BadCheckpoint(f"{checkpoint.folder} has no gated MLP, as models of the Llama family do")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": embedding.shape[1], "intermediate_size": gate.shape[0], "num_hidden_layers": layers,
        "num_attention_heads": queries // head_dim * spec.repeat, "num_key_value_heads": spec.repeat,
        "head_dim": head_dim, "vocab_size": _shape(embedding, vocab_size)[0],
        "max_position_embeddings": model["max_sequence_length"], "rms_norm_eps": model["layernorm_epsilon"],
        "rope_theta": float(model["rotary_base"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(model["rotary_base"])},
        "tie_word_embeddings": "weight/output_layer.weight" not in entries,
        "attention_bias": _has_biases(checkpoint, "self_attention.linear_qkv.q", "self_attention.linear_proj"),
        "mlp_bias": _has_biases(checkpoint, "mlp.linear_fc1.gate", "mlp.linear_fc2"),
        "dtype": embedding.dtype, "torch_dtype": embedding.dtype, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def _has_biases(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Tell whether two linear layers of a block have biases. Raises ``BadCheckpoint`` where only one has."""
    one, other = (f"weight/decoder.layers.0.{name}.bias" in checkpoint.index.by_key for name in (first, second))
    if one != other:
        raise BadCheckpoint(
            f"{checkpoint.folder} has a bias in {first if one else second} and none in {second if one else first}; "
            "models of the Llama family have both or neither"
        )
    return one


def _layers(checkpoint: Checkpoint) -> int:
    matches = (re.match(r"decoder\.layers\.(\d+)\.", entry.name) for entry in checkpoint.index.entries)
    return 1 + max((int(match[1]) for match in matches if match is not None), default=-1)
