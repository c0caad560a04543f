"""One rank of ``test_training_state_moves_between_real_worlds``: RANK SIZE FOLDER. Trains, moves, looks at the loss."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import bed
import oracle
import torch
import torch.distributed as dist
from bed import Model, Split
from megatron.core import parallel_state as mpu

from resharding import megatron
from resharding.boxes import decode_boxes
from resharding.plan import plan_for
from resharding.stream import execute
from resharding.transport import ProcessGroupTransport


def loss_of(chunks, tokens):
    """Mean loss over the whole batch; every data parallel rank has its share of ``tokens`` [batch, sequence + 1]."""
    share = tokens.chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
    sequence = tokens.shape[1] - 1
    positions = torch.arange(sequence).expand(len(share), -1)
    mask = torch.triu(torch.ones(sequence, sequence, dtype=torch.bool), 1)[None, None]
    return chunks[0](share[:, :-1], positions, mask, labels=share[:, 1:]).float().mean()


def train_step(chunks, optimizer, tokens) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    loss_of(chunks, tokens).backward()
    for chunk in chunks:
        chunk.finish_grad_sync()
    done, _, _ = optimizer.step()
    assert done


def mean_loss(chunks, tokens) -> float:
    with torch.no_grad():
        loss = loss_of(chunks, tokens).reshape(1)
        dist.all_reduce(loss, group=mpu.get_data_parallel_group())
    return loss.item() / mpu.get_data_parallel_world_size()


def place() -> dict[str, int]:
    return {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "dp": mpu.get_data_parallel_rank(),
        "ep": 0,
        "etp": 0,
    }


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    bridge = dist.distributed_c10d._get_default_group()
    model = Model(layers=2, dtype=torch.bfloat16 if sys.argv[4] == "bf16" else torch.float32)
    batches = torch.randint(model.vocab, (6, 4, model.sequence + 1), generator=torch.Generator().manual_seed(1))
    chunks, optimizer, losses = None, None, []
    for number, split in enumerate([Split(tp=size), Split(dp=size), Split(tp=size)]):
        source = megatron.holding_of(chunks, optimizer) if chunks else None
        common = megatron.common_state(optimizer) if chunks else {}
        if chunks:
            mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(split.tp, split.pp, create_gloo_process_groups=False)
        new_chunks, new_optimizer = bed.build(model, split)
        if source is not None:
            megatron.materialize_optimizer_state(new_optimizer, empty=True)
            target = megatron.holding_of(new_chunks, new_optimizer)
            bed.poison(target)
            said = [None] * size
            dist.all_gather_object(said, (source.encode_boxes(), target.encode_boxes(), common))
            old, new = [decode_boxes(a) for a, _, _ in said], [decode_boxes(b) for _, b, _ in said]
            plan = plan_for(rank, old, new, ["here"] * size)
            execute(plan, source, target, ProcessGroupTransport(bridge), staging_bytes=16 << 10)
            megatron.load_common_state(new_optimizer, megatron.merge_common_state([c for _, _, c in said]))
            oracle.dump_rank(new_chunks, new_optimizer, folder / f"after{number}.{rank}", place())
            losses.append(mean_loss(new_chunks, batches[5]))
        chunks, optimizer = new_chunks, new_optimizer
        for step in range(2):
            train_step(chunks, optimizer, batches[2 * number + step])
        oracle.dump_rank(chunks, optimizer, folder / f"before{number + 1}.{rank}", place())
        losses.append(mean_loss(chunks, batches[5]))
    if rank == 0:
        torch.save(losses, folder / "losses")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
