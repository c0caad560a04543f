"""Flags of a model, read as Megatron's scripts take them; what changes the state and cannot be planned is refused."""

from __future__ import annotations

import ast
import enum
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig

OWN = {
    "vocab_size": int, "padded_vocab_size": int, "make_vocab_size_divisible_by": int, "max_position_embeddings": int,
    "seq_length": int, "position_embedding_type": str, "use_rotary_position_embeddings": bool,
    "untie_embeddings_and_output_weights": bool, "swiglu": bool, "quick_geglu": bool,
    "disable_bias_linear": bool, "squared_relu": bool, "num_experts": int, "group_query_attention": bool,
    "use_distributed_optimizer": bool, "ddp_bucket_size": int, "overlap_grad_reduce": bool, "bf16": bool,
    "fp16": bool, "optimizer": str, "sgd_momentum": float, "pad_buckets_for_high_nccl_busbw": bool,
    "spec": str | list[str],
    "hybrid_override_pattern": str, "hybrid_attention_ratio": float, "hybrid_mlp_ratio": float,
    "num_distributed_optimizer_instances": int,
}  # fmt: skip
"""flags that are no field of Megatron's configuration, or one of another meaning"""
RENAMED = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
}
"""flags whose field has another name"""
OF_THE_LAYOUT = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
})  # fmt: skip
_FP8 = "its scales belong to one rank of one layout, and a live change of world refuses them too"
_SPLIT = "it splits parameters by rules of its own"
_OTHER = "the plan is of a GPT or Mamba model with equal layers"
REFUSED = {
    "fp8": _FP8, "fp8_format": _FP8, "fp8_param": _FP8, "fp8_param_gather": _FP8, "fp4": _FP8, "fp4_format": _FP8,
    "fp4_param": _FP8, "fp4_param_gather": _FP8,
    "use_precision_aware_optimizer": "a live change of world refuses this optimizer too",
    "optimizer_cpu_offload": "a live change of world refuses this optimizer too",
    "use_megatron_fsdp": _SPLIT, "use_custom_fsdp": _SPLIT, "use_torch_fsdp2": _SPLIT,
    "ddp_num_buckets": "the size of a bucket follows from the number of parameters of a rank; give --ddp-bucket-size",
    "pipeline_model_parallel_layout": "it is written for one pp and vpp; give the layers of the first and last stage",
    "heterogeneous_layers_config_path": _OTHER, "heterogeneous_layers_config_encoded_json": _OTHER,
    "heterogeneous_block_specs": _OTHER, "experimental_attention_variant": _OTHER, "linear_attention_type": _OTHER,
    "encoder_num_layers": _OTHER, "decoder_num_layers": _OTHER, "retro_add_retriever": _OTHER,
}  # fmt: skip
"""flags that change the state in a way that is not planned, and why"""
_OFF: tuple[Any, ...] = (None, False, 0, "", [])


def read(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return flags by field, and the names of those that say nothing about the shape of the state.

    Raises ``ValueError`` with one sentence for a value that Megatron does not take, and for what cannot be planned.
    """
    found: dict[str, Any] = {}
    ignored = []
    known = _fields()
    for name, value in given.items():
        plain = name.lstrip("-").replace("-", "_")
        plain = RENAMED.get(plain, plain)
        if plain in REFUSED:
            if value not in _OFF:
                raise ValueError(f"{name} {_shown(value)}cannot be planned: {REFUSED[plain]}")
            continue
        kind = OWN.get(plain) or known.get(plain)
        if kind is None or plain in OF_THE_LAYOUT or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
            ignored.append(name)
        else:
            found[plain] = _read(name, value, kind)
    _refuse_values(found)
    return found, ignored


def words_of(words: Sequence[str]) -> dict[str, Any]:
    """Read ``--name value``, ``--name=value`` and ``--name``. Raises ``ValueError`` with one sentence."""
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        if not name.startswith("--"):
            raise ValueError(f"{words[at]!r} is no flag; write the model's flags like --num-layers 32")
        at += 1
        if equals:
            found[name] = value
            continue
        taken = []
        while at < len(words) and not words[at].startswith("--"):
            taken.append(words[at])
            at += 1
        found[name] = True if not taken else taken[0] if len(taken) == 1 else taken
    return found


def is_mamba(flags: Mapping[str, Any]) -> bool:
    """Whether the flags are those of Megatron's Mamba scripts."""
    named = ("is_hybrid_model", "hybrid_override_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio")
    return any(flags.get(name) for name in named) or any("mamba" in part for part in _words(flags.get("spec")))


def _refuse_values(flags: Mapping[str, Any]) -> None:
    """Refuse flags that are planned with some values only."""
    spec = _words(flags.get("spec"))
    if spec and spec != ["local"] and not any("mamba" in part for part in spec):
        raise ValueError(f"--spec {' '.join(spec)} cannot be planned: the plan knows Megatron's own layers only")
    if flags.get("softmax_type") == "learnable":
        raise ValueError("--softmax-type learnable cannot be planned: its parameters lie in the attention kernel")
    if "E" in (flags.get("hybrid_override_pattern") or ""):
        raise ValueError("--hybrid-override-pattern with E cannot be planned: experts are known in GPT models only")
    if is_mamba(flags) and flags.get("mtp_num_layers"):
        raise ValueError("--mtp-num-layers cannot be planned for a Mamba model: Megatron's has no such layers")
    if (instances := flags.get("num_distributed_optimizer_instances") or 1) > 1:
        raise ValueError(f"--num-distributed-optimizer-instances {instances} cannot be planned: {_SPLIT}")
    optimizer, momentum = flags.get("optimizer") or "adam", flags.get("sgd_momentum", 0.9)
    if optimizer == "sgd" and momentum:
        raise ValueError(
            f"--optimizer sgd with a momentum of {momentum} cannot be planned: a live change of world refuses it "
            "too; add --sgd-momentum 0"
        )
    if optimizer not in ("adam", "sgd"):
        raise ValueError(f"--optimizer {optimizer} cannot be planned: live changes of world move adam and plain sgd")


def _words(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _shown(value: Any) -> str:
    return "" if value is True else f"{' '.join(_words(value)) if isinstance(value, list | str) else value} "


def _fields() -> dict[str, Any]:
    """Return Megatron's configuration by field, with the type of each."""
    hints = typing.get_type_hints(MLATransformerConfig)
    return {one.name: hints[one.name] for one in fields(MLATransformerConfig)}


def _read(name: str, value: Any, kind: Any) -> Any:
    """Turn a flag's value into what the configuration's field takes."""
    options = typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)
    items = [_item_of(option) for option in options if typing.get_origin(option) in (list, tuple)]
    if isinstance(value, str):
        if items and ("[" in value or "(" in value):
            value = _evaluated(name, value)
        else:
            return _one(name, value, options, kind)
    if isinstance(value, list):
        if not items:
            raise ValueError(f"{name} takes one value, not {len(value)}: {' '.join(map(str, value))}")
        return [_one(name, part, (items[0],), kind) if isinstance(part, str) else part for part in value]
    if value is True and bool not in options:
        raise ValueError(f"{name} needs a value")
    return value


_UNIONS = (typing.Union, type(int | str))


def _item_of(option: Any) -> Any:
    return typing.get_args(option)[0]


def _one(name: str, value: str, options: Sequence[Any], kind: Any) -> Any:
    for one in (bool, int, float):
        try:
            if one is bool and bool in options and value.lower() in ("true", "false"):
                return value.lower() == "true"
            if one is not bool and one in options:
                return one(value)
        except ValueError:
            continue
    literals = [option for option in options if typing.get_origin(option) is typing.Literal]
    if str in options or any(value in typing.get_args(literal) for literal in literals):
        return value
    raise ValueError(f"{name} {value!r} is not what Megatron takes for it: {kind}")


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda one, other: one + other, ast.Mult: lambda one, other: one * other,
}  # fmt: skip


def _evaluated(name: str, text: str) -> Any:
    """Return the list that an expression like ``([0]*1+[1]*26)`` is; Megatron evaluates it as Python."""

    def value_of(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return value_of(body)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [value_of(part) for part in parts]
            case ast.Constant(value=int() | float() | str() as value):
                return value
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value_of(left), value_of(right))
        raise ValueError(f"{name} {text!r} is no list; write it like '[0]*1+[1]*26'")

    try:
        return value_of(ast.parse(text, mode="eval"))
    except (SyntaxError, TypeError):
        raise ValueError(f"{name} {text!r} is no list; write it like '[0]*1+[1]*26'") from None
