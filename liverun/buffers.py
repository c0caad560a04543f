"""Where a model's parameters lie in its optimizer's flat buffers, from what a Megatron checkpoint says of the model.

Every rank that holds parameters of its own is built as shapes only, one after the other in this process. Needed for
optimizer state that names no parameter. Run as a program of its own: it takes over torch's and Megatron's globals.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from liverun import device
from liverun.description import Description, rank_of_a_world
from liverun.flags import RENAMED
from liverun.layout import Layout
from resharding.checkpoint.buckets import Buffer, in_transformer_engines_order
from resharding.checkpoint.config import LAYOUT_FIELDS

MODEL_FIELDS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention",
    "num_query_groups", "kv_channels", "normalization", "add_qkv_bias", "qk_layernorm", "swiglu", "gated_linear_unit",
    "attention_output_gate", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim", "num_experts", "num_moe_experts", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_router_enable_expert_bias",
    "moe_router_score_function", "moe_grouped_gemm", "moe_use_legacy_grouped_gemm",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "position_embedding_type",
    "max_position_embeddings", "padded_vocab_size", "untie_embeddings_and_output_weights", "bf16", "fp16",
    "transformer_impl",
)  # fmt: skip
"""arguments that decide which parameters there are, their order and their shapes; all else is not looked at"""
_NEEDED = (
    "num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "transformer_impl",
)  # fmt: skip
IMPLEMENTATIONS = ("local", "transformer_engine")


def buffers_of(arguments: Mapping[str, Any]) -> list[Buffer]:
    """Return the buffers of every data parallel group; ``arguments`` are Megatron's, by name with underscores.

    Raises ``ValueError`` with one sentence for what is missing and for what makes no model.
    """
    said = {RENAMED.get(name, name): value for name, value in arguments.items() if value is not None}
    experts = said.keys() & {"num_experts", "num_moe_experts"}
    needed = [*_NEEDED, *(["expert_model_parallel_size"] if experts else [])]
    if missing := [name for name in needed if name not in said]:
        raise ValueError(f"it is not known what {', '.join(missing)} is")
    if said["transformer_impl"] not in IMPLEMENTATIONS:
        raise ValueError(f"transformer_impl {said['transformer_impl']!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    flags = {name: said[name] for name in MODEL_FIELDS if name in said} | {"use_distributed_optimizer": True}
    flags["disable_bias_linear"] = not said.get("add_bias_linear", True)
    fused = said["transformer_impl"] == "transformer_engine"
    sizes = {axis: said[name] for axis, name in LAYOUT_FIELDS.items() if name in said}
    layout = Layout(**{"etp": sizes.get("tp", 1) if "ep" in sizes else 1} | sizes)
    try:
        return _buffers(Description.of_flags(flags), layout, fused=fused)
    except AssertionError as error:  # Megatron asserts what its configuration does not allow
        raise ValueError(f"Megatron says of this configuration: {error}") from None


def _buffers(description: Description, layout: Layout, *, fused: bool) -> list[Buffer]:
    if (reason := description.misfit(layout)) is not None:
        raise ValueError(reason)
    size = math.lcm(layout.model_size, layout.etp * layout.ep * layout.pp)
    found: dict[str, Buffer] = {}
    for rank in range(size):
        with rank_of_a_world(layout, rank, size):
            for buffer in description.buffers(layout):
                found.setdefault(buffer.place, _in_order(buffer) if fused else buffer)
    return list(found.values())


def _in_order(buffer: Buffer) -> Buffer:
    return replace(buffer, parameters=in_transformer_engines_order(buffer.parameters))


def main() -> None:
    """Read arguments as one JSON object on stdin, print the buffers; exit 2 with one sentence for a mistake."""
    device.install()
    try:
        found = buffers_of(json.load(sys.stdin))
    except (ValueError, TypeError) as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        raise SystemExit(2) from None
    json.dump([buffer.as_json() for buffer in found], sys.stdout)
    sys.stdout.write("\n")
