"""Every rank of a Megatron world, one after the other, in this process: torch's fake process group stands in for peers."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from liverun.device import install
from resharding import megatron
from resharding.boxes import Box, Holding

install()


@dataclass(frozen=True, kw_only=True)
class Model:
    """A small GPT: SwiGLU, grouped queries, rotary positions, RMSNorm."""

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


@dataclass(frozen=True, kw_only=True)
class Split:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}dp{self.dp}vpp{self.vpp}"


@dataclass
class Rank:
    chunks: list[Any]
    optimizer: Any
    holding: Holding
    ranks: dict[str, int]


def config_of(model: Model, split: Split) -> TransformerConfig:
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        ffn_hidden_size=model.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
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
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def build(model: Model, split: Split) -> tuple[list[Any], Any]:
    """Build chunks and optimizer for the rank that is initialised here, as a training script would."""
    model_parallel_cuda_manual_seed(123)
    config = config_of(model, split)
    chunks = []
    for stage in range(split.vpp):
        where = {"vp_stage": stage if split.vpp > 1 else None}
        module = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=model.vocab,
            max_sequence_length=model.sequence,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, **where),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, **where),
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="rope",
            **({"vp_stage": stage} if split.vpp > 1 else {}),
        ).to(model.dtype)
        for name, param in module.named_parameters():
            if model.frozen and model.frozen in name:
                param.requires_grad = False
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=model.distributed, bucket_size=model.bucket, overlap_grad_reduce=True
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
            split.tp, split.pp, split.vpp if split.vpp > 1 else None, create_gloo_process_groups=False
        )
        yield {
            "rank": rank,
            "tp": mpu.get_tensor_model_parallel_rank(),
            "pp": mpu.get_pipeline_model_parallel_rank(),
            "dp": mpu.get_data_parallel_rank(),
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


def expected(box: Box) -> torch.Tensor:
    """Return what every element of a box should be: a number made from its key and its global place."""
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


def wrong(holding: Holding) -> list[str]:
    """Return the boxes that do not hold what they should."""
    return [
        f"{piece.box.key} at {piece.box.offset} of {piece.box.shape}"
        for piece in holding.pieces
        if not torch.equal(piece.view(), expected(piece.box))
    ]
