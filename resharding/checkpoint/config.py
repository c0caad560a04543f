"""What a model's configuration says that its tensors do not, under the names of Megatron's model. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resharding.checkpoint.format import Index

CONFIG_FIELDS = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "layernorm_epsilon", "normalization", "gated_linear_unit", "add_bias_linear", "num_moe_experts",
    "activation_func", "rotary_interleaved", "layernorm_zero_centered_gamma", "glu_linear_offset",
    "activation_func_clamp_value", "softmax_scale", "attention_output_gate", "add_qkv_bias", "qk_layernorm",
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_router_enable_expert_bias",
    "moe_router_score_function", "moe_grouped_gemm", "moe_use_legacy_grouped_gemm",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
MODULE_FIELDS = (
    "max_sequence_length", "rotary_base", "rotary_percent", "rotary_scaling", "vocab_size", "position_embedding_type",
)  # fmt: skip
LAYOUT_FIELDS = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size", "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}  # fmt: skip
"""axes of a layout, as Megatron's arguments are called"""
_OTHER_NAMES = {
    "norm_epsilon": "layernorm_epsilon", "max_position_embeddings": "max_sequence_length",
    "use_rope_scaling": "rotary_scaling", "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "padded_vocab_size": "vocab_size",
}  # fmt: skip
"""of Megatron's arguments: what the model calls them"""


def said_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what arguments say of a model, as ``model.described`` says it."""
    named = {_OTHER_NAMES.get(name, name): value for name, value in arguments.items()}
    if arguments.get("swiglu"):
        named.setdefault("activation_func", "silu")
    if named.get("rotary_seq_len_interpolation_factor") is not None:
        named["rotary_scaling"] = True
    return {
        name: named[name]
        for name in (*CONFIG_FIELDS, *MODULE_FIELDS)
        if isinstance(named.get(name), bool | int | float | str | list)
    }


def arguments_of(index: Index) -> dict[str, Any]:
    """Return what a checkpoint of a live job says of its model and layout, as Megatron's arguments."""
    origin = index.meta.origin
    layout = {field: origin.get("layout", {}).get(axis) for axis, field in LAYOUT_FIELDS.items()}
    if layout["virtual_pipeline_model_parallel_size"] == 1:
        del layout["virtual_pipeline_model_parallel_size"]
    said = {**origin.get("model", {}), **{name: size for name, size in layout.items() if size is not None}}
    return {name: value for name, value in said.items() if name != "vocab_size"}
