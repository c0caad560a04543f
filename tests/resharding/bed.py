"""Every rank of a Megatron world, one after the other, in this process: torch's fake process group stands in for peers."""

from __future__ import annotations

import copy
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import experts
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from liverun.device import install
from liverun.hybrid import mamba_model
from resharding import megatron
from resharding.boxes import Box, Holding

install()


@dataclass(frozen=True, kw_only=True)
class Model:
    """A small GPT: SwiGLU, grouped queries, rotary positions, RMSNorm; or a Mamba stack."""

    layers: int = 4
    hidden: int = 32
    heads: int = 4
    groups: int = 4
    ffn: int = 40
    vocab: int = 64
    sequence: int = 8
    tied: bool = True
    bias: bool = False
    dtype: torch.dtype = torch.float32
    distributed: bool = True
    bucket: int | None = 3000
    frozen: str = ""
    """parameters whose name contains this are not trained"""
    gated: bool = True
    learned: bool = False
    """positions are learned"""
    mla: bool = False
    experts: int | None = None
    expert_ffn: int = 24
    shared: int | None = None
    """width of the shared expert"""
    router_bias: bool = False
    grouped: bool = False
    """experts of a rank lie in one tensor"""
    dense_first: bool = False
    """the first layer has no experts"""
    hybrid: str = ""
    """Mamba: a letter for each layer, M, * (attention) or - (MLP)"""
    ahead: int = 0
    """layers that predict further tokens, in the last stage"""
    vocab_multiple: int = 0
    """the vocabulary is padded to a multiple of so much for every tensor parallel rank, as scripts do"""
    bert: bool = False
    high_padding: bool = False
    """buckets padded for bus bandwidth"""


@dataclass(frozen=True, kw_only=True)
class Split:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    """0: as tp, Megatron's default"""
    first: int = 0
    """layers of the first stage, if it has more or less than the others"""
    last: int = 0
    """the same for the last stage"""
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    def __str__(self) -> str:
        text = f"tp{self.tp}pp{self.pp}dp{self.dp}vpp{self.vpp}"
        text += f"cp{self.cp}" if self.cp > 1 else ""
        text += f"ep{self.ep}etp{self.expert_tp}" if self.ep > 1 or self.etp else ""
        return text + (f"first{self.first}" if self.first else "") + (f"last{self.last}" if self.last else "") + ("sp" if self.sequence_parallel else "")


@dataclass
class Rank:
    chunks: list[Any]
    optimizer: Any
    holding: Holding
    ranks: dict[str, int]


def config_of(model: Model, split: Split) -> TransformerConfig:
    kind = MLATransformerConfig if model.mla else TransformerConfig
    options: dict[str, Any] = {}
    if model.experts:
        options |= {
            "num_moe_experts": model.experts, "moe_ffn_hidden_size": model.expert_ffn, "moe_router_topk": 2,
            "moe_shared_expert_intermediate_size": model.shared, "expert_model_parallel_size": split.ep,
            "expert_tensor_parallel_size": split.expert_tp, "moe_grouped_gemm": model.grouped,
            "moe_use_legacy_grouped_gemm": model.grouped, "moe_token_dispatcher_type": "alltoall",
            "moe_router_enable_expert_bias": model.router_bias,
            "moe_router_score_function": "sigmoid" if model.router_bias else "softmax",
            "moe_router_load_balancing_type": "none",
            "moe_layer_freq": [0] + [1] * (model.layers - 1) if model.dense_first else 1,
        }  # fmt: skip
    if model.mla:
        options |= {
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8,
            "rope_type": "rope",
        }  # fmt: skip
    if model.hybrid:
        options |= {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 4, "is_hybrid_model": True}
    if model.ahead:
        options["mtp_num_layers"] = model.ahead
    if split.first:
        options["num_layers_in_first_pipeline_stage"] = split.first
    if split.last:
        options["num_layers_in_last_pipeline_stage"] = split.last
    return kind(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        ffn_hidden_size=model.ffn,
        gated_linear_unit=model.gated,
        activation_func=torch.nn.functional.silu if model.gated else torch.nn.functional.gelu,
        add_bias_linear=model.bias,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=model.dtype == torch.bfloat16,
        fp16=model.dtype == torch.float16,
        params_dtype=model.dtype,
        pipeline_dtype=model.dtype,
        tensor_model_parallel_size=split.tp,
        pipeline_model_parallel_size=split.pp,
        virtual_pipeline_model_parallel_size=split.vpp if split.vpp > 1 else None,
        context_parallel_size=split.cp,
        sequence_parallel=split.sequence_parallel,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **options,
    )


def _vocab(model: Model, split: Split) -> int:
    step = model.vocab_multiple * split.tp or 1
    return -(-model.vocab // step) * step


def _bert(model: Model, config: TransformerConfig, split: Split) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    config.normalization = "LayerNorm"
    return BertModel(
        config, num_tokentypes=2, transformer_layer_spec=bert_layer_local_spec, vocab_size=_vocab(model, split),
        max_sequence_length=model.sequence, pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(), add_binary_head=True, share_embeddings_and_output_weights=model.tied,
    )  # fmt: skip


def _gpt(model: Model, config: TransformerConfig, where: dict[str, Any], stage: int, split: Split) -> GPTModel:
    if model.experts:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=where["vp_stage"]
        )
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=model.mla)
    if model.mla or split.cp > 1:  # the attention kernel has no state, and Megatron's own does neither
        if not isinstance(multi_latent_attention.TELinear, type):
            multi_latent_attention.TELinear = type("TELinear", (), {})
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
    post_process = mpu.is_pipeline_last_stage(ignore_virtual=False, **where)
    return GPTModel(
        config,
        spec,
        vocab_size=_vocab(model, split),
        max_sequence_length=model.sequence,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, **where),
        post_process=post_process,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="learned_absolute" if model.learned else "rope",
        **({"vp_stage": stage} if split.vpp > 1 else {}),
        **(
            {"mtp_block_spec": get_gpt_mtp_block_spec(config, spec, False, where["vp_stage"])}
            if model.ahead and post_process
            else {}
        ),
    )


def _mamba(model: Model, config: TransformerConfig, where: dict[str, Any]) -> Any:
    return mamba_model(
        config, vocab_size=model.vocab, max_sequence_length=model.sequence,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, **where),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, **where),
        hybrid_override_pattern=model.hybrid, share_embeddings_and_output_weights=model.tied,
    )  # fmt: skip


@contextmanager
def _norms_for_sequence_parallel(config: TransformerConfig) -> Iterator[None]:
    """Megatron's norms without Transformer Engine refuse sequence parallelism; their parameters are the same."""
    make = WrappedTorchNorm.__new__

    def made(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        config = copy.copy(config)
        config.sequence_parallel = False
        return make(cls, config, *args, **kwargs)

    if config.sequence_parallel:
        WrappedTorchNorm.__new__ = made
    try:
        yield
    finally:
        WrappedTorchNorm.__new__ = make


def build(model: Model, split: Split) -> tuple[list[Any], Any]:
    """Build chunks and optimizer for the rank that is initialised here, as a training script would."""
    model_parallel_cuda_manual_seed(123)
    if model.grouped:
        experts.gg.assert_grouped_gemm_is_available = lambda: None  # the kernels are for the forward pass
    config = config_of(model, split)
    chunks = []
    for stage in range(split.vpp):
        where = {"vp_stage": stage if split.vpp > 1 else None}
        with _norms_for_sequence_parallel(config):
            if model.bert:
                module = _bert(model, config, split)
            else:
                module = _mamba(model, config, where) if model.hybrid else _gpt(model, config, where, stage, split)
        module = module.to(model.dtype) if not model.hybrid else module
        for name, param in module.named_parameters():
            if model.frozen and model.frozen in name:
                param.requires_grad = False
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=model.distributed,
            bucket_size=model.bucket,
            overlap_grad_reduce=True,
            pad_buckets_for_high_nccl_busbw=model.high_padding,
        )
        chunks.append(DistributedDataParallel(config, ddp, module, disable_bucketing=stage > 0))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            weight_decay=0.1,
            bf16=model.dtype == torch.bfloat16,
            fp16=model.dtype == torch.float16,
            params_dtype=model.dtype,
            use_distributed_optimizer=model.distributed,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    return chunks, optimizer


@contextmanager
def rank_of(split: Split, rank: int) -> Iterator[dict[str, int]]:
    """Be one rank of a world; yields its place along every axis."""
    dist.init_process_group("fake", rank=rank, world_size=split.size, store=FakeStore())
    gather = dist.all_gather_object
    dist.all_gather_object = _gather_own  # the fake group gives back nothing to unpickle
    try:
        mpu.initialize_model_parallel(
            split.tp,
            split.pp,
            split.vpp if split.vpp > 1 else None,
            context_parallel_size=split.cp,
            expert_model_parallel_size=split.ep,
            expert_tensor_parallel_size=split.etp or None,
            create_gloo_process_groups=False,
        )
        yield {
            "rank": rank,
            "tp": mpu.get_tensor_model_parallel_rank(),
            "pp": mpu.get_pipeline_model_parallel_rank(),
            "dp": mpu.get_data_parallel_rank(with_context_parallel=True),
            "ep": mpu.get_expert_model_parallel_rank(),
            "etp": mpu.get_expert_tensor_parallel_rank(),
        }
    finally:
        dist.all_gather_object = gather
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def _gather_own(objects: list[Any], own: Any, group: Any = None) -> None:
    objects[:] = [own] * len(objects)


def world(model: Model, split: Split, *, empty: bool = False, inside: Callable[[Rank], None] | None = None) -> list[Rank]:
    """Build every rank; optimizer state exists. ``inside`` runs while the rank is the current one."""
    ranks = []
    for rank in range(split.size):
        with rank_of(split, rank) as place:
            chunks, optimizer = build(model, split)
            megatron.materialize_optimizer_state(optimizer, empty=empty)
            made = Rank(chunks, optimizer, megatron.holding_of(chunks, optimizer), place)
            if inside:
                inside(made)
            ranks.append(made)
    return ranks


@functools.cache
def _salt(key: str) -> int:
    return zlib.crc32(key.encode())


@functools.lru_cache(maxsize=1 << 15)
def expected(box: Box) -> torch.Tensor:
    """Return what every element of a box should be: a number made from its key and its global place. Not to be changed."""
    flat = torch.zeros(box.shape, dtype=torch.int64)
    for axis, (start, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        step = math.prod(box.global_shape[axis + 1 :]) if not box.padded else 100_003 if axis == 0 else 1
        along = torch.arange(start, start + size) * step
        flat = flat + along.view([-1 if i == axis else 1 for i in range(len(box.shape))])
    mixed = (flat * 2654435761 + _salt(box.key)) % 2**31
    return pattern(mixed, getattr(torch, box.dtype))


def pattern(mixed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn 31 random bits into a number that is exact in ``dtype`` (7 bits in bfloat16, 24 in float32)."""
    bits = {torch.bfloat16: 7, torch.float16: 10}.get(dtype, 23)
    return (mixed >> (31 - bits)).to(dtype)


def fill(holding: Holding) -> None:
    with torch.no_grad():
        for piece in holding.pieces:
            piece.view().copy_(expected(piece.box))


def poison(holding: Holding) -> None:
    with torch.no_grad():
        for piece in holding.pieces:
            piece.view().fill_(-1)


def wrong(holding: Holding, rows: Mapping[str, int] | None = None) -> list[str]:
    """Return the boxes that do not hold what they should; beyond so many ``rows`` a padded tensor has to be zero."""
    return [
        f"{piece.box.key} at {piece.box.offset} of {piece.box.shape}"
        for piece in holding.pieces
        if not torch.equal(piece.view(), _cropped(piece.box, rows) if rows and piece.box.padded else expected(piece.box))
    ]


def _cropped(box: Box, rows: Mapping[str, int]) -> torch.Tensor:
    found = expected(box).clone()
    found[max(0, rows[box.key] - box.offset[0]) :] = 0
    return found
