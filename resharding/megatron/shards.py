"""What a Megatron optimizer keeps, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

from resharding.megatron.parts import Part, Unsupported, storage_of

ADAM_STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """Elements ``[first, last)`` of a parameter, in C order, and what the optimizer keeps for them."""

    param: torch.Tensor
    first: int
    last: int
    main: Callable[[], torch.Tensor]
    """the tensor that the inner optimizer trains"""
    has_main: bool
    """whether that tensor has numbers of its own, or is the parameter itself"""
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]


def leaves(optimizer: Any) -> Iterator[Any]:
    """Yield the Megatron optimizers that wrap one torch optimizer each; empty ones are left out.

    Raises ``Unsupported`` for one whose state cannot be moved.
    """
    if isinstance(optimizer, ChainedOptimizer):
        for inner in optimizer.chained_optimizers:
            yield from leaves(inner)
        return
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if type(optimizer) not in (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer):
        raise Unsupported(f"optimizer {type(optimizer).__name__} is not one whose state can be moved yet")
    if not isinstance(optimizer.optimizer, torch.optim.Optimizer) or hasattr(optimizer.optimizer, "sub_optimizers"):
        raise Unsupported(f"optimizer {type(optimizer.optimizer).__name__} is not one whose state can be moved yet")
    yield optimizer


def shards_of(optimizer: Any) -> Iterator[Shard]:
    """Yield what this rank's optimizers train; raises ``Unsupported`` for one whose state cannot be moved."""
    for leaf in leaves(optimizer):
        if isinstance(leaf, DistributedOptimizer):
            yield from _shards_of_distributed(leaf)
        elif isinstance(leaf, Float16OptimizerWithFloat16Params):
            yield from _shards_of_float16(leaf)
        else:
            for group in leaf.optimizer.param_groups:
                for param in group["params"]:
                    yield _whole(leaf, group, param, param)


def _whole(leaf: Any, group: dict[str, Any], param: torch.Tensor, main: torch.Tensor) -> Shard:
    return Shard(param, 0, param.numel(), lambda: main, main is not param, leaf.optimizer, group)


def _shards_of_float16(leaf: Any) -> Iterator[Shard]:
    rows = zip(
        leaf.optimizer.param_groups,
        leaf.float16_groups,
        leaf.fp32_from_float16_groups,
        leaf.fp32_from_fp32_groups,
        strict=True,
    )
    for group, float16, main_of_float16, float32 in rows:
        for param, main in zip(float16, main_of_float16, strict=True):
            yield _whole(leaf, group, param, main)
        for param in float32:
            yield _whole(leaf, group, param, param)


def _shards_of_distributed(leaf: Any) -> Iterator[Shard]:
    if any(
        getattr(leaf.config, name, False)
        for name in ("use_precision_aware_optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8")
    ):
        raise Unsupported("use_precision_aware_optimizer keeps main parameters inside the optimizer")
    rows = zip(leaf.optimizer.param_groups, leaf.model_fp32_groups, leaf.model_float16_groups, strict=True)
    for group, float32, float16 in rows:
        # the optimizer has fp32 parameters first; Megatron's own index map forgets it where a group has both
        for place, param in enumerate([*float32, *float16]):
            held = leaf._get_model_param_range_map(param)["param"]

            def main(group: dict[str, Any] = group, place: int = place) -> torch.Tensor:
                found: torch.Tensor = group["params"][place]
                return found

            if main().numel() != held.end - held.start:
                raise Unsupported(
                    f"the optimizer keeps {main().numel()} elements for a range of {held.end - held.start}"
                )
            has_main = storage_of(main()) != storage_of(param)
            yield Shard(param, held.start, held.end, main, has_main, leaf.optimizer, group)


def kinds_of(part: Part, shard: Shard) -> list[tuple[str, torch.dtype, Callable[[], torch.Tensor]]]:
    """Return name, type and accessor of everything the optimizer keeps for a shard."""
    kinds: list[tuple[str, torch.dtype, Callable[[], torch.Tensor]]] = []
    if shard.has_main:
        kinds.append(("main", shard.main().dtype, shard.main))
    return kinds + [(name, dtype, _state_accessor(part.key, shard, name)) for name, dtype in _states(shard)]


def _states(shard: Shard) -> Iterator[tuple[str, torch.dtype]]:
    """Yield name and type of each state with the parameter's shape, also those the first step will make."""
    main = shard.main()
    state = shard.optimizer.state.get(main)
    if state:
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                if value.shape != main.shape:
                    raise Unsupported(f"optimizer state {name} has shape {tuple(value.shape)}, not its parameter's")
                yield name, value.dtype
    elif isinstance(shard.optimizer, torch.optim.Adam):  # AdamW is one
        for name in _adam_states(shard.group):
            yield name, main.dtype


def _state_accessor(key: str, shard: Shard, name: str) -> Callable[[], torch.Tensor]:
    def tensor() -> torch.Tensor:
        main = shard.main()
        state = shard.optimizer.state.get(main)
        if not state or name not in state:
            raise RuntimeError(f"{name}/{key} does not exist yet; call materialize_optimizer_state() first")
        found: torch.Tensor = state[name]
        if not found.is_contiguous():
            raise RuntimeError(f"{name}/{key} is not contiguous")
        return found

    return tensor


def _adam_states(group: Mapping[str, Any]) -> tuple[str, ...]:
    return (*ADAM_STATES, "max_exp_avg_sq") if group.get("amsgrad") else ADAM_STATES


def materialize_optimizer_state(optimizer: Any, *, empty: bool = False) -> None:
    """Give every parameter of the optimizer the state that torch's Adam or AdamW makes in its first step.

    A freshly built optimizer has none, and so has nowhere to write to. ``step`` is 0 and the moments are
    zero, or uninitialised with ``empty``. State that exists is left as it is. Other optimizers: raises
    ``Unsupported`` unless their state exists or they keep none (plain SGD).
    """
    for leaf in leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            for param in group["params"]:
                if not leaf.optimizer.state.get(param):
                    state = _fresh_state(leaf.optimizer, group, param, empty=empty)
                    if state:
                        leaf.optimizer.state[param] = state


def _fresh_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor, *, empty: bool
) -> dict[str, torch.Tensor]:
    """Follow ``torch.optim.Adam._init_group``."""
    if not can_be_made(optimizer, group):
        raise Unsupported(f"{type(optimizer).__name__} has no state yet, and only Adam's can be made ahead")
    if isinstance(optimizer, torch.optim.SGD):
        return {}
    if group.get("capturable") or group.get("fused"):
        step = torch.zeros((), dtype=torch.float32, device=param.device)
    else:
        step = torch.tensor(0.0, dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32)
    make = torch.empty_like if empty else torch.zeros_like
    moments = {name: make(param.detach(), memory_format=torch.preserve_format) for name in _adam_states(group)}
    return {"step": step, **moments}


def can_be_made(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Tell whether the optimizer's state can be made in a world that has not stepped."""
    plain = isinstance(optimizer, torch.optim.SGD) and not group["momentum"]
    return plain or isinstance(optimizer, torch.optim.Adam)  # AdamW is one
