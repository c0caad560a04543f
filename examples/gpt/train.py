"""Train a GPT with Megatron on however many workers there are; more may come and go while it runs.

    liverun --nproc-per-node 2 --standbys 2 examples/gpt/train.py --data-path data/stdlib
    liverun resize --layout tp=2            # from another terminal, while it trains

What liverun asks for is marked with [liverun]; everything else is a plain Megatron script.
"""

import argparse
import json
import os
import socket
import time
from functools import partial
from pathlib import Path

import torch
from checkpoint import load, save
from data import micro_batches, open_datasets, sample_ids
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from model import build_model, build_optimizer

import liverun


def main() -> None:
    args = parse_arguments()
    num_samples = args.train_steps * args.global_batch_size
    train, valid = open_datasets(
        args.data_path, args.seq_length, args.seed, num_samples, args.global_batch_size
    )

    def build(world):  # [liverun] called for every world this worker is in
        world.seed(args.seed)
        model = build_model(args, world.layout, world.device)
        optimizer, scheduler = build_optimizer(args, model)
        return liverun.Training(model=model, optimizer=optimizer, scheduler=scheduler)

    job = liverun.join(  # [liverun] a standby waits here until it is needed
        build,
        layout=liverun.Layout(
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            vpp=args.num_virtual_stages_per_pipeline_rank,
            cp=args.context_parallel_size,
            ep=args.expert_model_parallel_size,
        ),
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
    )
    if args.load and job.next_step == 0:  # workers that join later get their state from those that run
        step = load(args, args.load, job.training)
        job.resume(step=step, consumed_samples=step * args.global_batch_size)
    while job.unfinished(args.train_steps):
        with job.step() as step:  # [liverun] the only place where the world may change
            eval_loss = None
            if args.eval_interval and step.index % args.eval_interval == 0:
                eval_loss = evaluate(args, job.training.model, valid, step)
            began_s = time.perf_counter()
            loss, grad_norm = train_step(args, job.training, train, step)
            step_s = time.perf_counter() - began_s
            step.report(loss=loss, grad_norm=grad_norm)
        measured = {"loss": loss, "grad_norm": grad_norm, "eval_loss": eval_loss}
        log(args, step, **measured, began_s=began_s, step_s=step_s)
        if args.save and job.next_step % args.save_interval == 0:
            save(args, args.save, job.next_step, job.training)
            if args.exit_after_save:
                break


def train_step(args, training, dataset, step):
    """Run one step on the next global batch; return its mean loss and gradient norm."""
    for chunk in training.model:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    loss = forward_backward(args, training.model, dataset, step.consumed_samples, step, forward_only=False)
    _, grad_norm, _ = training.optimizer.step()
    training.scheduler.step(increment=args.global_batch_size)
    return loss, float(grad_norm)


def evaluate(args, model, dataset, step):
    """Return the mean loss over one fixed batch, the same under every layout."""
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        loss = forward_backward(args, model, dataset, 0, step, forward_only=True)
    for chunk in model:
        chunk.train()
    return loss


def forward_backward(args, model, dataset, first_sample, step, *, forward_only):
    """Run Megatron's schedule; return the mean loss over the global batch, the same on every rank."""
    device = step.world.device
    batches = [
        micro_batches(dataset, first_sample, step.num_microbatches, args.micro_batch_size, device)
        for _ in model
    ]
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches if len(model) > 1 else batches[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=step.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for loss_and_count in losses:  # empty unless this rank is in the last stage
        total += loss_and_count["loss_and_count"]
    torch.distributed.all_reduce(
        total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return (total[0] / total[1]).item()


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_function, batch["loss_mask"])


def loss_function(loss_mask, losses):
    loss = (losses.float() * loss_mask).sum()
    count = loss_mask.sum()
    both = torch.stack([loss.detach().double(), count.double()])
    return loss / count, {"loss_and_count": both}


def log(args, step, *, loss, grad_norm, eval_loss, began_s, step_s):
    world = step.world
    if world.rank == 0 and args.log_interval and step.index % args.log_interval == 0:
        print(
            f"step {step.index:5d} | loss {loss:.4f} | grad norm {grad_norm:.3f} | {step_s * 1000:.0f} ms"
            f" | {world.world_size} x ({world.layout}) | generation {world.generation}",
            flush=True,
        )
    if world.rank == 0 and args.loss_log:
        record = {
            "step": step.index,
            "loss": loss,
            "grad_norm": grad_norm,
            "generation": world.generation,
            "world_size": world.world_size,
            "layout": str(world.layout),
            "consumed_samples": step.consumed_samples,
            "began_s": began_s,
            "step_s": step_s,
        }
        append_line(Path(args.loss_log), record if eval_loss is None else {**record, "eval_loss": eval_loss})
    if args.sample_log and reads_data():
        ids = [
            sample
            for micro_batch in range(step.num_microbatches)
            for sample in sample_ids(step.consumed_samples, micro_batch, args.micro_batch_size)
        ]
        record = {"step": step.index, "generation": world.generation, "rank": world.rank, "ids": ids}
        append_line(Path(args.sample_log) / f"{socket.gethostname()}-{os.getpid()}.jsonl", record)


def reads_data() -> bool:
    """Tell whether this rank stands for its data parallel replica in audits."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.get_pipeline_model_parallel_rank() == 0
    )


def append_line(path: Path, record: dict) -> None:
    """Append one whole line, however many processes append to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, json.dumps(record).encode() + b"\n")
    finally:
        os.close(file)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Train a GPT with Megatron on a world that may change.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=4)
    model.add_argument("--hidden-size", type=int, default=128)
    model.add_argument("--num-attention-heads", type=int, default=8)
    model.add_argument("--num-query-groups", type=int, default=4, help="key and value heads")
    model.add_argument("--ffn-hidden-size", type=int, default=512)
    model.add_argument("--seq-length", type=int, default=64)
    model.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    model.add_argument("--hidden-dropout", type=float, default=0.0)
    model.add_argument("--attention-dropout", type=float, default=0.0)
    model.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    model.add_argument("--num-experts", type=int, default=None, help="experts in place of each layer's MLP")
    model.add_argument("--moe-router-topk", type=int, default=2, help="experts that a token goes to")
    model.add_argument("--bf16", action="store_true", help="bf16 model, fp32 main parameters")
    model.add_argument("--transformer-impl", choices=["local", "transformer_engine"], default="local")
    split = parser.add_argument_group("split of the model; liverun's --layout goes first")
    split.add_argument("--tensor-model-parallel-size", type=int, default=1)
    split.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    split.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=1)
    split.add_argument("--context-parallel-size", type=int, default=1, help="needs transformer_engine")
    split.add_argument("--expert-model-parallel-size", type=int, default=1, help="needs --num-experts")
    train = parser.add_argument_group("training")
    train.add_argument("--data-path", required=True, help="prefix of the .bin and .idx files")
    train.add_argument("--train-steps", type=int, default=1000)
    train.add_argument("--micro-batch-size", type=int, default=2)
    train.add_argument("--global-batch-size", type=int, default=8)
    train.add_argument("--lr", type=float, default=1e-3)
    train.add_argument("--min-lr", type=float, default=1e-4)
    train.add_argument("--lr-warmup-samples", type=int, default=80)
    train.add_argument("--lr-decay-samples", type=int, default=None, help="default: the whole run")
    train.add_argument("--weight-decay", type=float, default=0.01)
    train.add_argument("--clip-grad", type=float, default=1.0)
    train.add_argument("--no-distributed-optimizer", action="store_true")
    train.add_argument("--seed", type=int, default=1234)
    train.add_argument(
        "--eval-interval", type=int, default=0, help="steps between evaluations of a fixed batch"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--log-interval", type=int, default=10)
    out.add_argument("--loss-log", help="file that gets one JSON object a step")
    out.add_argument("--sample-log", help="folder that gets the samples every replica used, step by step")
    out.add_argument("--save", help="folder for checkpoints")
    out.add_argument("--save-interval", type=int, default=100)
    out.add_argument("--load", help="folder to resume from")
    out.add_argument("--exit-after-save", action="store_true")
    out.add_argument("--dist-ckpt-optim-fully-reshardable", action="store_true",
                     help="write an optimizer state that fits any layout; slower")  # fmt: skip
    args = parser.parse_args()
    if args.context_parallel_size > 1 and args.transformer_impl == "local":
        parser.error("--context-parallel-size needs --transformer-impl transformer_engine")
    if args.expert_model_parallel_size > 1 and args.num_experts is None:
        parser.error("--expert-model-parallel-size needs --num-experts")
    if args.num_attention_heads % args.num_query_groups:
        parser.error("--num-attention-heads must be a multiple of --num-query-groups")
    return args


if __name__ == "__main__":
    main()
