"""Save and load with Megatron's ``dist_checkpointing``, in its torch_dist format."""

import json
import shutil
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer import DistributedOptimizer

RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
SAME_LAYOUT = {"distrib_optim_sharding_type": "dp_reshardable"}


def save(args, folder: str, step: int, training) -> None:
    """Write ``folder/iter_<step>``, then point ``folder/latest.json`` at it. All ranks call this."""
    path = Path(folder) / f"iter_{step:07d}"
    rank = torch.distributed.get_rank()
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(_state(args, training, is_loading=False), str(path))
    if rank == 0:
        latest = {"step": step, "split": _split(training)}
        (Path(folder) / "latest.tmp").write_text(json.dumps(latest))
        (Path(folder) / "latest.tmp").replace(Path(folder) / "latest.json")
    torch.distributed.barrier()


@torch.no_grad()
def load(args, folder: str, training) -> int:
    """Read the newest checkpoint of ``folder`` into ``training`` and return the step it was taken at.

    The weights fit any layout. The optimizer fits the layout it was saved under, or any layout if written and
    read with ``--dist-ckpt-optim-fully-reshardable``; where it does not fit, it starts afresh.
    """
    try:
        latest = json.loads((Path(folder) / "latest.json").read_text())
    except FileNotFoundError:
        raise SystemExit(f"nothing to load: {folder}/latest.json does not exist") from None
    fits = args.dist_ckpt_optim_fully_reshardable or latest["split"] == _split(training)
    if not fits and torch.distributed.get_rank() == 0:
        print(f"{folder} was saved under another layout: weights are loaded, the optimizer starts afresh")
    state = _state(args, training, is_loading=True, with_optimizer=fits)
    state = dist_checkpointing.load(state, str(Path(folder) / f"iter_{latest['step']:07d}"))
    for index, chunk in enumerate(training.model):
        chunk.module.load_state_dict(state[f"model{index}"])
    if fits:
        _load_optimizer(training.optimizer, state["optimizer"])
    else:
        training.optimizer.reload_model_params()
    training.scheduler.load_state_dict(state["scheduler"])
    return latest["step"]


def _state(args, training, *, is_loading: bool, with_optimizer: bool = True) -> dict:
    metadata = RESHARDABLE if args.dist_ckpt_optim_fully_reshardable else SAME_LAYOUT
    state = {f"model{index}": chunk.module.sharded_state_dict() for index, chunk in enumerate(training.model)}
    if with_optimizer:
        if is_loading:
            _give_adam_a_state(training.optimizer)
        optimizer = training.optimizer.sharded_state_dict(
            dict(state), is_loading=is_loading, metadata=metadata
        )
        state["optimizer"] = optimizer
    state["scheduler"] = training.scheduler.state_dict()
    return state


def _distributed(optimizer) -> list[DistributedOptimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(part, DistributedOptimizer)]


def _give_adam_a_state(optimizer) -> None:
    """Let the optimizer make its tensors: Megatron cannot describe one that has not stepped yet."""
    for part in _distributed(optimizer):
        part._init_optimizer_states_with_dummy_values()


def _load_optimizer(optimizer, state: dict) -> None:
    """Load, and work around what Megatron does to torch's own Adam.

    It has one step a parameter. Megatron's load forgets it on the way, and then gives one tensor to all
    parameters, which every one of them counts up.
    """
    for part in _distributed(optimizer):

        def set_states(model_param, tensors, part=part, original=part._set_main_param_and_optimizer_states):
            group, order = part.model_param_group_index_map[model_param]
            adam = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
            original(model_param, tensors | {key: adam[key] for key in ("step",) if key in adam})

        part._set_main_param_and_optimizer_states = set_states
    optimizer.load_state_dict(state)
    for part in _distributed(optimizer):
        del part._set_main_param_and_optimizer_states
        for adam in part.optimizer.state.values():
            if torch.is_tensor(adam.get("step")):
                adam["step"] = adam["step"].clone()


def _split(training) -> dict:
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": len(training.model),
    }
