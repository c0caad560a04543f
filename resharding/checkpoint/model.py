"""What there is to know of a Megatron model beyond its boxes: how tensors are fused, and its flat buffers.

Read from its modules, not from their names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from resharding import megatron
from resharding.checkpoint.buckets import Buffer, Parameter, Stretch
from resharding.checkpoint.config import CONFIG_FIELDS, MODULE_FIELDS
from resharding.checkpoint.fused import Fused, experts, gate_up, query_key_value


def fused_in(model_chunks: Sequence[torch.nn.Module]) -> dict[str, Fused]:
    """Return the parts of every fused tensor that these chunks hold a part of, by its name without kind.

    Chunks of other pipeline stages add theirs. A tensor that is fused in a way not known here is left whole, which
    is no harm: layouts agree on it as it is.
    """
    attentions: dict[int, Any] = {}
    gated: set[int] = set()
    for chunk in model_chunks:
        for module in chunk.modules():
            config = getattr(module, "config", None)
            if hasattr(module, "linear_qkv") and hasattr(module, "num_query_groups_per_partition"):
                attentions.update({id(param): module for param in _matrix(module.linear_qkv)})
            if getattr(config, "gated_linear_unit", False):
                gated.update(id(param) for param in _first_matrix(module))
    found: dict[str, Fused] = {}
    for part in megatron.placed_parts(model_chunks):
        name, shape = part.key, part.global_shape
        owner = id(part.owner)
        if owner in attentions:
            found.update(_attention(name, attentions[owner], shape))
            continue
        names = [name]
        if ".experts." in name and len(shape) - part.owner.ndim in (0, 1) and _has_experts_first(part):
            found[name] = experts(name, shape[0])
            names, shape = [row for row, _ in found[name].parts], shape[1:]
        if owner in gated and shape and shape[0] % 2 == 0:
            found.update({each: gate_up(each, shape[0] // 2) for each in names})
    return found


def described(model_chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return what a model's configuration says that its tensors do not, as JSON: for tools that read checkpoints."""
    found: dict[str, Any] = {}
    for chunk in model_chunks:
        module = megatron.unwrapped(chunk)
        for holder, names in ((getattr(module, "config", None), CONFIG_FIELDS), (module, MODULE_FIELDS)):
            for name in names:
                value = getattr(holder, name, None)
                value = getattr(value, "__name__", value)  # of a function
                if isinstance(value, bool | int | float | str | list):
                    found[name] = value
        stretched = getattr(getattr(module, "rotary_pos_emb", None), "seq_len_interpolation_factor", None)
        if stretched is not None:
            found["rotary_scaling"] = True
        kinds = {type(each).__module__ for each in module.modules()}
        is_fused = any("extensions.transformer_engine" in kind for kind in kinds)
        found["transformer_impl"] = "transformer_engine" if is_fused else "local"
    return found


def buffers_in(model_chunks: Sequence[torch.nn.Module], optimizer: Any) -> list[Buffer]:
    """Return the flat buffers of this rank's distributed optimizer; reads no element, takes tensors on meta.

    Raises ``megatron.Unsupported`` for an optimizer that is not Megatron's distributed one.
    """
    parts: dict[int, list[Any]] = defaultdict(list)
    for part in megatron.placed_parts(model_chunks):
        parts[id(part.owner)].append(part)
    leaves = [leaf for leaf in getattr(optimizer, "chained_optimizers", [optimizer]) if leaf is not None]
    found = []
    for number, leaf in enumerate(leaves):
        if not hasattr(leaf, "data_parallel_group_idx"):
            raise megatron.Unsupported(f"optimizer {type(leaf).__name__} keeps no flat buffers")
        chained = f"chained_{number}." if len(leaves) > 1 else ""
        for index, buffer in enumerate(leaf.buffers):
            ends = buffer.param_index_map
            found.append(
                Buffer(
                    place=f"{chained}optimizer.distributed.dp_group_idx_{leaf.data_parallel_group_idx}.gbuf_idx_{index}",
                    dtype=str(buffer.param_dtype).removeprefix("torch."),
                    parameters=tuple(
                        Parameter(numel=param.numel(), stretches=tuple(_stretch(part) for part in parts[id(param)]))
                        for param in sorted(ends, key=lambda param: ends[param][0], reverse=True)
                    ),
                )
            )
    return found


def _stretch(part: Any) -> Stretch:
    return Stretch(
        name=part.key, global_shape=part.global_shape, offset=part.offset,
        shape=(1,) * part.prepended + part.shape, base=part.base, strides=(1,) * part.prepended + part.strides,
    )  # fmt: skip


def _matrix(linear: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield weights and biases; a norm may live in the same module. Experts in one module have them numbered."""
    for name, param in linear.named_parameters(recurse=False):
        if re.fullmatch(r"(weight|bias)\d*", name):
            yield param


def _first_matrix(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    if hasattr(module, "linear_fc1") and hasattr(module, "linear_fc2"):
        yield from _matrix(module.linear_fc1)
    elif hasattr(module, "weight1") and hasattr(module, "weight2"):  # experts that lie in one tensor
        yield module.weight1


def _has_experts_first(part: Any) -> bool:
    """Tell whether the first axis is that of the experts: it is prepended, or they lie in one matrix."""
    return bool(part.prepended == 1 or len(part.global_shape) == part.owner.ndim + 1)


def _attention(name: str, module: Any, shape: tuple[int, ...]) -> dict[str, Fused]:
    config = module.config
    found = query_key_value(
        name, heads=config.num_attention_heads, groups=config.num_query_groups,
        head_dim=module.hidden_size_per_attention_head, gated=bool(getattr(config, "attention_output_gate", False)),
    )  # fmt: skip
    return {name: found} if shape and shape[0] == found.rows else {}
