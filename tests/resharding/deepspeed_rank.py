"""One rank of a DeepSpeed job: RANK SIZE STAGE PORT FOLDER KIND. Trains a small model, saves; ends.

KIND is plain, fp32, frozen (some parameters are not trained), experts, pipeline (two stages, a tied embedding), or
autotp (every parameter that can be is cut over all ranks).
"""

from __future__ import annotations

import os
import re
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


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 8)
        self.down = torch.nn.Linear(8, 6)

    def forward(self, hidden):
        return self.down(torch.relu(self.up(hidden)))


class Mixture(torch.nn.Module):
    """A layer of four experts between two others; a rank has two of them."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.embed = torch.nn.Embedding(11, 6)
        self.first = MoE(6, Expert(), num_experts=4, ep_size=2, use_residual=False, min_capacity=8)
        self.second = MoE(6, Expert(), num_experts=4, ep_size=2, use_residual=False, min_capacity=8)
        self.head = torch.nn.Linear(6, 11, bias=False)

    def forward(self, tokens):
        return self.head(self.second(self.first(self.embed(tokens))[0])[0])


class Fused(torch.nn.Module):
    """Query, key and value in one, a layer cut along its input with a bias that is whole, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.qkv = torch.nn.Linear(6, 12, bias=False)
        self.out = torch.nn.Linear(12, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)

    def forward(self, tokens):
        return self.head(self.out(torch.relu(self.qkv(self.norm(self.embed(tokens))))))


AUTOTP = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*qkv\.weight$"], "partition_type": "column", "shape": [[8, 2, 2], -1], "partition_dim": 0},
            {"patterns": [r".*out\.weight$"], "partition_type": "row"},
        ],
    },
}


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(11, 6))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens):
        return torch.nn.functional.embedding(tokens, self.weight)


def pipeline():
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    def back(module, hidden):
        return torch.nn.functional.linear(hidden, module.weight)

    layers = [
        TiedLayerSpec("embed", Embedding), LayerSpec(torch.nn.Linear, 6, 6), torch.relu,
        LayerSpec(torch.nn.Linear, 6, 6), LayerSpec(torch.nn.Linear, 6, 6, bias=False),
        TiedLayerSpec("embed", Embedding, forward_fn=back),
    ]  # fmt: skip
    return PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=loss_of)


def loss_of(logits, tokens):
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def state_of(net, optimizer, rank: int, kind: str):
    """Yield what DeepSpeed itself says that every parameter's state is, experts by their number in the whole model."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # linked in the first step, before there is a state
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for local, param in net.named_parameters():
        name = local
        if kind == "experts":
            name = re.sub(r"_experts\.(\d+)", lambda found: f"_experts.{rank % 2 * 2 + int(found[1])}", local)
        if param.requires_grad:
            yield f"main/{name}", safe_get_full_fp32_param(param).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                yield f"{key}/{name}", safe_get_full_optimizer_state(param, key).clone()
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            yield f"weight/{name}", param.detach().clone()
    for name, buffer in net.named_buffers():
        yield f"weight/{name}", buffer.clone()


def main() -> None:
    rank, size, stage, port, folder, kind = *map(int, sys.argv[1:5]), *sys.argv[5:7]
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
    )  # fmt: skip
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled here and now
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = {"experts": Mixture, "pipeline": pipeline, "autotp": Fused}.get(kind, Net)()
    if kind == "frozen":
        net.embed.weight.requires_grad = net.layers[1].bias.requires_grad = False
    trained = [param for param in net.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1, "name": "wide"},
        {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0, "lr": 5e-4, "name": "narrow"},
    ]
    if kind == "experts":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    config = {
        "train_batch_size": 4 * (size // 2 if kind == "pipeline" else size), "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": kind != "fp32"},
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    if kind == "autotp":
        config |= {"tensor_parallel": AUTOTP}
        del config["train_batch_size"]  # half of the ranks share each sample
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    dice = torch.Generator().manual_seed(0 if kind == "autotp" else rank)
    for _ in range(3):
        if kind == "pipeline":
            batch = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(rank))
            engine.train_batch(iter([(batch, batch)] * 2))
            continue
        tokens = torch.randint(11, (4, 5), generator=dice)
        loss = loss_of(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder)
    if kind != "autotp":
        torch.save(dict(state_of(net, engine.optimizer, rank, kind)), f"{folder}/truth-{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
