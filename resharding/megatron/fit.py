"""Why a model or its optimizer could not live in another world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import megatron.core
import torch

from resharding.limits import misfit
from resharding.megatron.common import plain
from resharding.megatron.parts import Unsupported, unwrapped
from resharding.megatron.shards import can_be_made, shards_of

FIRST_WITH_SPLIT_EXPERTS = (0, 19)
"""The megatron-core release from which on experts have groups of their own at ep 1 as well, as far as is known."""


def misfit_of(model_chunks: Sequence[torch.nn.Module], sizes: Mapping[str, int]) -> str | None:
    """Say in one sentence why this model cannot be split so, or ``None`` if it can.

    ``sizes`` has any of tp, pp, vpp, cp, ep, etp. The vocabulary is not judged: scripts pad it for every tp.
    """
    modules = [unwrapped(chunk) for chunk in model_chunks]
    config = next((found for module in modules if (found := getattr(module, "config", None)) is not None), None)
    known = {name: sizes[name] for name in ("tp", "pp", "vpp", "cp", "ep", "etp") if name in sizes}
    if config is None:
        return None
    tp, ep, etp = (known.get(name, 1) for name in ("tp", "ep", "etp"))
    release = tuple(int(number) for number in megatron.core.__version__.split(".")[:2])
    if getattr(config, "num_moe_experts", None) and ep == 1 and tp % etp and release < FIRST_WITH_SPLIT_EXPERTS:
        return (
            f"etp={etp} with ep=1 needs tp to be a multiple of {etp}, not {tp}: "
            f"megatron-core {megatron.core.__version__} would average gradients of different parts of an expert"
        )
    return misfit(config, **known, is_mamba=any(hasattr(module, "mamba_stack_spec") for module in modules))


def misfit_of_optimizer(model_chunks: Sequence[torch.nn.Module], optimizer: Any) -> str | None:
    """Say in one sentence why another world could not take over the optimizer's state, or ``None`` if it can.

    Reads no element of a parameter. May be asked while a step runs, in which parameters are one step apart; where
    they stay so, ``common_state`` says it.
    """
    names = {
        id(param): name.removeprefix("module.") for chunk in model_chunks for name, param in chunk.named_parameters()
    }
    steps: dict[str, float] = {}
    try:
        for shard in shards_of(optimizer):
            name = names.get(id(shard.param), f"a parameter of shape {tuple(shard.param.shape)}")
            if not can_be_made(shard.optimizer, shard.group):
                return (
                    f"what {type(shard.optimizer).__name__} keeps for {name} cannot move; use torch's Adam or AdamW, "
                    "or SGD without momentum"
                )
            state = shard.optimizer.state.get(shard.main(), {})
            if "step" in state:
                steps[name] = plain(state["step"])
    except Unsupported as reason:
        return str(reason)
    if steps:
        first, last = min(steps, key=lambda name: steps[name]), max(steps, key=lambda name: steps[name])
        if steps[last] - steps[first] > 1:
            return (
                f"{first} is at step {steps[first]:.0f} of the optimizer and {last} at step {steps[last]:.0f}; "
                "state moves only if all parameters have made the same number of steps"
            )
    return None
