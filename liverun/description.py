"""A model as its Megatron flags describe it, built as shapes only: for planning with nothing running.

Flags are Megatron's own, as in a training script's command line or as a JSON object. Those that say nothing about
the shape of the state (data, learning rates, logging) are named and left out; the split over ranks is the layout's.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import experts
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.overrides import TorchFunctionMode

from liverun.flags import OWN, is_mamba, read, words_of
from liverun.hybrid import mamba_model
from liverun.layout import Layout
from resharding import megatron
from resharding.boxes import Holding
from resharding.checkpoint.buckets import Buffer
from resharding.checkpoint.model import buffers_in

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
        return cls.of_flags(given | words_of(words))

    @classmethod
    def of_flags(cls, given: Mapping[str, Any]) -> Self:
        """Take flags by name, in any spelling. Raises ``ValueError`` with one sentence."""
        found, ignored = read(given)
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
        # the kernels are for the forward pass
        with _ShapesOnly(), mock.patch.object(experts.gg, "assert_grouped_gemm_is_available"):
            chunks = [self._chunk(config, layout, stage, dtype) for stage in range(layout.vpp)]
            optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer=flags.get("optimizer") or "adam", lr=1e-3, bf16=dtype is torch.bfloat16,
                    fp16=dtype is torch.float16, params_dtype=dtype, sgd_momentum=flags.get("sgd_momentum", 0.9),
                    use_distributed_optimizer=flags.get("use_distributed_optimizer", False),
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
        tied = not self.flags.get("untie_embeddings_and_output_weights", False)
        if self.flags.get("mtp_num_layers") and tied and layout.pp > 1:
            return (
                f"--mtp-num-layers with tied embeddings cannot be had at pp={layout.pp} in Megatron; "
                "give --untie-embeddings-and-output-weights"
            )
        asked = types.SimpleNamespace(config=self._config(Layout(), torch.float32))
        if is_mamba(self.flags):
            asked.mamba_stack_spec = None
        return megatron.misfit_of([asked], layout.as_dict() | {"etp": layout.expert_tp})

    def _config(self, layout: Layout, dtype: torch.dtype) -> Any:
        flags = dict(self.flags)
        kind = MLATransformerConfig if flags.get("multi_latent_attention") else TransformerConfig
        options = {name: value for name, value in flags.items() if name not in OWN}
        if flags.get("swiglu") or flags.get("quick_geglu"):
            options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
        if flags.get("swiglu") and not flags.get("ffn_hidden_size"):  # as Megatron's scripts take it
            options["ffn_hidden_size"] = int(4 * flags["hidden_size"] * 2 / 3 / 64) * 64
        if flags.get("group_query_attention") is False:
            options.pop("num_query_groups", None)
        elif flags.get("group_query_attention"):
            options.setdefault("num_query_groups", 1)
        # in modules, as Transformer Engine groups them, each expert has parameters of its own
        legacy = flags.get("moe_use_legacy_grouped_gemm") or flags.get("transformer_impl") == "local"
        options["moe_grouped_gemm"] = bool(flags.get("moe_grouped_gemm") and legacy)
        if num_experts := flags.get("num_experts"):
            options["num_moe_experts"] = num_experts
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
            "expert_tensor_parallel_size": layout.expert_tp,
            "perform_initialization": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False,
            "masked_softmax_fusion": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
        })  # fmt: skip

    def _chunk(self, config: Any, layout: Layout, stage: int, dtype: torch.dtype) -> Any:
        flags = self.flags
        where = {"ignore_virtual": layout.vpp == 1, "vp_stage": stage if layout.vpp > 1 else None}
        vocab = flags.get("padded_vocab_size")
        if vocab is None:
            multiple = flags.get("make_vocab_size_divisible_by", 128) * layout.tp
            vocab = -(-flags["vocab_size"] // multiple) * multiple
        positions = "rope" if flags.get("use_rotary_position_embeddings") else "learned_absolute"
        options = {
            "vocab_size": vocab,
            "max_sequence_length": flags.get("max_position_embeddings") or flags.get("seq_length") or 1024,
            "pre_process": parallel_state.is_pipeline_first_stage(**where),
            "post_process": parallel_state.is_pipeline_last_stage(**where),
            "share_embeddings_and_output_weights": not flags.get("untie_embeddings_and_output_weights", False),
            "position_embedding_type": flags.get("position_embedding_type", positions),
        }
        if is_mamba(flags):
            module = mamba_model(config, **options, **{name: flags[name] for name in _OF_MAMBA if name in flags})
        else:
            module = self._gpt(config, where["vp_stage"], options)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=flags.get("use_distributed_optimizer", False),
            bucket_size=flags.get("ddp_bucket_size"),
            # without it Megatron makes one bucket
            overlap_grad_reduce=flags.get("overlap_grad_reduce", "ddp_bucket_size" in flags),
            pad_buckets_for_high_nccl_busbw=flags.get("pad_buckets_for_high_nccl_busbw", False),
        )  # fmt: skip
        return DistributedDataParallel(config, ddp, module.to(dtype), disable_bucketing=stage > 0)

    def _gpt(self, config: Any, vp_stage: int | None, options: Mapping[str, Any]) -> Any:
        if self.has_experts:
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
            )
        else:
            spec = get_gpt_layer_local_spec(
                normalization=config.normalization, qk_layernorm=config.qk_layernorm,
                multi_latent_attention=config.multi_latent_attention,
            )
        layers = list(getattr(spec, "layer_specs", [spec]))
        if config.mtp_num_layers:
            layers.append(get_gpt_decoder_layer_specs(
                config, use_transformer_engine=False, normalization=config.normalization
            )[-1])
        # the attention kernel has no state, and Megatron's own takes neither latent attention nor context parallelism
        for layer in layers:
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
        ahead = None
        if config.mtp_num_layers:
            ahead = get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=False, vp_stage=vp_stage)
        return GPTModel(config, spec, mtp_block_spec=ahead, vp_stage=vp_stage, **options)


_OF_MAMBA = ("hybrid_override_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio")


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
            expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.expert_tp,
            create_gloo_process_groups=False,
        )  # fmt: skip
        with mock.patch.object(dist, "all_gather_object", _gather_own):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _gather_own(objects: list[Any], own: Any, group: Any = None) -> None:  # noqa: ARG001 - torch's signature
    """All ranks of a group would say the same: the fake group gives nothing back."""
    objects[:] = [own] * len(objects)
