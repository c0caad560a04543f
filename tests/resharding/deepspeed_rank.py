"""One rank of a DeepSpeed job: RANK SIZE STAGE PORT FOLDER. Trains a small model, saves; ends."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return self.head(hidden * self.scale)


def main() -> None:
    rank, size, stage, port, folder = *map(int, sys.argv[1:5]), sys.argv[5]
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
    )  # fmt: skip
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled here and now
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = Net()
    wide = [param for param in net.parameters() if param.ndim > 1]
    narrow = [param for param in net.parameters() if param.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0, "lr": 5e-4}], lr=1e-3
    )
    config = {
        "train_batch_size": 4 * size, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    dice = torch.Generator().manual_seed(rank)
    for _ in range(3):
        tokens = torch.randint(11, (4, 5), generator=dice)
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
