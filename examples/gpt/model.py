"""A GPT with rotary positions, SwiGLU, grouped-query attention and, if asked for, experts, as Megatron builds it."""

import data
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig


def build_model(args, layout, device):
    """Return the model chunks of this rank, wrapped in Megatron's DDP, split as ``layout`` says."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        ffn_hidden_size=args.ffn_hidden_size,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        overlap_p2p_comm=layout.vpp > 1,  # interleaving over two stages mixes messages up without it
        batch_p2p_comm=layout.vpp == 1,
        context_parallel_size=layout.cp,
        num_moe_experts=args.num_experts,
        moe_router_topk=args.moe_router_topk,
        moe_token_dispatcher_type="allgather",  # noqa: S106 - Megatron's "alltoall" is for GPUs only
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        sequence_parallel=args.num_experts is not None and layout.tp > 1,  # experts do not train over tp without
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    if args.transformer_impl == "local":
        spec = get_gpt_layer_local_spec(num_experts=args.num_experts, normalization=config.normalization)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=args.num_experts)
    multiple = args.make_vocab_size_divisible_by
    vocab_size = -(-data.ByteTokenizer.vocab_size // multiple) * multiple
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=not args.no_distributed_optimizer
    )
    chunks = []
    for index in range(layout.vpp):
        stage = {"ignore_virtual": layout.vpp == 1, "vp_stage": index if layout.vpp > 1 else None}
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=vocab_size,
            max_sequence_length=args.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            vp_stage=stage["vp_stage"],
        ).to(device)
        if args.bf16:
            chunk = Float16Module(config, chunk)
        chunks.append(DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0))
    return chunks


def build_optimizer(args, model):
    """Return the optimizer, and a cosine schedule that counts samples."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=not args.no_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, model, use_gloo_process_groups=False)
    model[0].config.grad_scale_func = optimizer.scale_loss
    decay_samples = args.lr_decay_samples or args.train_steps * args.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=min(args.lr_warmup_samples, decay_samples - 1),
        lr_decay_steps=decay_samples,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=decay_samples,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
