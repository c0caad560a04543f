"""A model as its Megatron flags describe it, built as shapes only: for planning with nothing running.

Flags are Megatron's own, as in a training script's command line or as a JSON object. Those that say nothing about
the shape of the state (data, learning rates, logging) are named and left out; the split over ranks is the layout's.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.overrides import TorchFunctionMode

from liverun.layout import Layout
from resharding import megatron
from resharding.boxes import Holding
from resharding.checkpoint.buckets import Buffer
from resharding.checkpoint.model import buffers_in

OWN = {
    "vocab_size": int, "padded_vocab_size": int, "make_vocab_size_divisible_by": int, "max_position_embeddings": int,
    "seq_length": int, "position_embedding_type": str, "untie_embeddings_and_output_weights": bool, "swiglu": bool,
    "disable_bias_linear": bool, "squared_relu": bool, "num_experts": int, "group_query_attention": bool,
    "use_distributed_optimizer": bool, "ddp_bucket_size": int, "bf16": bool, "fp16": bool, "optimizer": str,
    "pad_buckets_for_high_nccl_busbw": bool,
}  # fmt: skip
"""flags that are no field of Megatron's configuration, or one of another meaning"""
OF_THE_LAYOUT = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
})  # fmt: skip
_TYPE_NAMES = {torch.bfloat16: "BFloat16Tensor", torch.float16: "HalfTensor", torch.float32: "FloatTensor"}
_FACTORIES = frozenset({
    "empty", "zeros", "ones", "full", "rand", "randn", "empty_like", "zeros_like", "ones_like", "full_like",
    "new_empty", "new_zeros", "new_ones", "new_full",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Description:
    """What flags say of a model."""

    flags: Mapping[str, Any]
    """by Megatron's name, with underscores"""
    ignored: tuple[str, ...] = ()
    """flags that say nothing about the shape of the state"""
    kinds: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, file: Path | None, words: Sequence[str]) -> Self:
        """Read a JSON object of flags, and flags as a script has them; the latter go first.

        Raises ``ValueError`` with one sentence.
        """
        given: dict[str, Any] = {}
        if file is not None:
            try:
                given = json.loads(file.read_text())
            except (OSError, ValueError) as error:
                raise ValueError(f"--model {file}: {error}; name a file with one JSON object of flags") from None
            if not isinstance(given, dict):
                raise ValueError(f'--model {file} holds no JSON object; write it like {{"num-layers": 32}}')
        return cls.of_flags(given | _flags_of(words))

    @classmethod
    def of_flags(cls, given: Mapping[str, Any]) -> Self:
        """Take flags by name, in any spelling. Raises ``ValueError`` with one sentence."""
        found: dict[str, Any] = {}
        ignored = []
        known = _fields()
        for name, value in given.items():
            plain = name.lstrip("-").replace("-", "_")
            kind = OWN.get(plain) or known.get(plain)
            if kind is None or plain in OF_THE_LAYOUT:
                ignored.append(name)
            else:
                found[plain] = _read(name, value, kind)
        for needed in ("num_layers", "hidden_size", "num_attention_heads"):
            if needed not in found:
                flag = needed.replace("_", "-")
                raise ValueError(f"the model has no --{flag}; give it with --model FILE or after --")
        if not {"vocab_size", "padded_vocab_size"} & found.keys():
            raise ValueError("the model has no --vocab-size; give it with --model FILE or after --")
        return cls(flags=found, ignored=tuple(ignored))

    def build(self, layout: Layout) -> Holding:
        """Return what a rank holds, shapes only; Megatron's parallel state is that of its world."""
        with _ShapesOnly():
            return megatron.holding_of(*self.stack(layout))

    def buffers(self, layout: Layout) -> list[Buffer]:
        """Return a rank's flat buffers of optimizer state; Megatron's parallel state is that of its world."""
        with _ShapesOnly():
            return buffers_in(*self.stack(layout))

    def stack(self, layout: Layout) -> tuple[list[Any], Any]:
        """Return a rank's model chunks and optimizer, shapes only; Megatron's parallel state is that of its world."""
        flags = self.flags
        dtype = torch.bfloat16 if flags.get("bf16") else torch.float16 if flags.get("fp16") else torch.float32
        config = self._config(layout, dtype)
        with _ShapesOnly():
            chunks = [self._chunk(config, layout, stage, dtype) for stage in range(layout.vpp)]
            optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam", lr=1e-3, bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16,
                    params_dtype=dtype, use_distributed_optimizer=flags.get("use_distributed_optimizer", False),
                ),
                chunks,
                use_gloo_process_groups=False,
            )
        return chunks, optimizer

    @property
    def has_experts(self) -> bool:
        """Whether ranks of one stage differ in more than their share of dense parameters."""
        return bool(self.flags.get("num_experts") or self.flags.get("num_moe_experts"))

    def misfit(self, layout: Layout) -> str | None:
        """Say in one sentence why the model cannot be split so, or ``None`` if it can."""
        config = types.SimpleNamespace(config=self._config(Layout(), torch.float32))
        return megatron.misfit_of([config], layout.as_dict())

    def _config(self, layout: Layout, dtype: torch.dtype) -> Any:
        flags = dict(self.flags)
        kind = MLATransformerConfig if flags.get("multi_latent_attention") else TransformerConfig
        options = {name: value for name, value in flags.items() if name not in OWN}
        if flags.get("swiglu"):
            options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
        if flags.get("group_query_attention") is False:
            options.pop("num_query_groups", None)
        if experts := flags.get("num_experts"):
            options["num_moe_experts"] = experts
            options.setdefault("moe_token_dispatcher_type", "alltoall")
        options["add_bias_linear"] = not flags.get("disable_bias_linear", False)
        if kind is MLATransformerConfig:
            options.setdefault("rope_type", "rope")
        return kind(**options | {
            "params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype is torch.bfloat16,
            "fp16": dtype is torch.float16, "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp, "context_parallel_size": layout.cp,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": _expert_tp(layout),
            "perform_initialization": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False,
            "masked_softmax_fusion": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
        })  # fmt: skip

    def _chunk(self, config: Any, layout: Layout, stage: int, dtype: torch.dtype) -> Any:
        flags = self.flags
        where = {"ignore_virtual": layout.vpp == 1, "vp_stage": stage if layout.vpp > 1 else None}
        if self.has_experts:
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=config.normalization, vp_stage=where["vp_stage"]
            )
        else:
            spec = get_gpt_layer_local_spec(
                normalization=config.normalization, qk_layernorm=config.qk_layernorm,
                multi_latent_attention=config.multi_latent_attention,
            )
        # the attention kernel has no state, and Megatron's own takes neither latent attention nor context parallelism
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
        vocab = flags.get("padded_vocab_size")
        if vocab is None:
            multiple = flags.get("make_vocab_size_divisible_by", 128) * layout.tp
            vocab = -(-flags["vocab_size"] // multiple) * multiple
        module = GPTModel(
            config, spec, vocab_size=vocab,
            max_sequence_length=flags.get("max_position_embeddings") or flags.get("seq_length") or 1024,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=not flags.get("untie_embeddings_and_output_weights", False),
            position_embedding_type=flags.get("position_embedding_type", "learned_absolute"),
            vp_stage=where["vp_stage"],
        )  # fmt: skip
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=flags.get("use_distributed_optimizer", False), overlap_grad_reduce=True,
            bucket_size=flags.get("ddp_bucket_size"),
            pad_buckets_for_high_nccl_busbw=flags.get("pad_buckets_for_high_nccl_busbw", False),
        )  # fmt: skip
        return DistributedDataParallel(config, ddp, module.to(dtype), disable_bucketing=stage > 0)


class _ShapesOnly(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed
    """Function mode under which tensors of floating point have a shape and no memory; others are real."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _FACTORIES and _is_floating(name, args, options):
            options["device"] = "meta"
            options.pop("generator", None)
        elif args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if name == "type" and len(args) == 1 and not options:
                return f"torch.cuda.{_TYPE_NAMES[args[0].dtype]}"  # by which Megatron sorts parameters
            if name == "to":
                args = tuple(arg for arg in args if not isinstance(arg, torch.device | str))
                options.pop("device", None)
        return func(*args, **options)


def _is_floating(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    dtype = options.get("dtype")
    if dtype is None:
        like = name.endswith("_like") or name.startswith("new_")
        if not like and name == "full":
            return isinstance(args[1] if len(args) > 1 else options.get("fill_value"), float)
        dtype = args[0].dtype if like else torch.get_default_dtype()
    return bool(dtype.is_floating_point)


@contextmanager
def rank_of_a_world(layout: Layout, rank: int, size: int) -> Iterator[None]:
    """Be one rank of a world that is not there; torch's fake process group stands in for its peers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not isinstance(multi_latent_attention.TELinear, type):  # a name for Transformer Engine's, compared with types
        multi_latent_attention.TELinear = type("TELinear", (), {})
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None, context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=_expert_tp(layout),
            create_gloo_process_groups=False,
        )  # fmt: skip
        with mock.patch.object(dist, "all_gather_object", _gather_own):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _expert_tp(layout: Layout) -> int | None:
    """As the worlds of a job are built: Megatron's own default where neither axis of experts is named."""
    return layout.etp if (layout.etp, layout.ep) != (1, 1) else None


def _gather_own(objects: list[Any], own: Any, group: Any = None) -> None:  # noqa: ARG001 - torch's signature
    """All ranks of a group would say the same: the fake group gives nothing back."""
    objects[:] = [own] * len(objects)


def _fields() -> dict[str, Any]:
    """Return Megatron's configuration by field, with the type of each."""
    hints = typing.get_type_hints(MLATransformerConfig)
    return {one.name: hints[one.name] for one in fields(MLATransformerConfig)}


def _flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Read ``--name value``, ``--name=value`` and ``--name``."""
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


def _read(name: str, value: Any, kind: Any) -> Any:
    """Turn a flag's value into what the configuration's field takes."""
    options = typing.get_args(kind) or (kind,)
    if isinstance(value, str):
        for one in (bool, int, float):
            try:
                if one is bool and bool in options and value.lower() in ("true", "false"):
                    return value.lower() == "true"
                if one is not bool and one in options:
                    return one(value)
            except ValueError:
                continue
        if str in options:
            return value
        raise ValueError(f"{name} {value!r} is not what Megatron takes for it: {kind}")
    if value is True and bool not in options:
        raise ValueError(f"{name} needs a value")
    return value
