"""What an optimizer keeps besides tensors, written and checked: step, lr and weight decay per group; the grad scaler."""

from __future__ import annotations

from typing import Any

from resharding import megatron

STEP, SCALE, GROWTH = 3, 4096.0, 17


def fill(optimizer: Any) -> None:
    """Put everything where ``wrong`` wants it."""
    _write(optimizer, STEP, 1.0, SCALE, GROWTH)


def poison(optimizer: Any) -> None:
    """Put everything somewhere else."""
    _write(optimizer, 1, -1.0, 2.0, 0)


def wrong(optimizer: Any) -> list[str]:
    """Return what is not as ``fill`` left it."""
    found: list[tuple[str, Any, Any]] = []
    for leaf in megatron.leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            lr, weight_decay = _schedule(group)
            found += [("lr", group["lr"], lr), ("weight decay", group["weight_decay"], weight_decay)]
            for param in group["params"]:
                if "step" in (state := leaf.optimizer.state.get(param, {})):
                    found.append((f"step of {tuple(param.shape)}", state["step"].item(), STEP))
        if (scaler := getattr(leaf, "grad_scaler", None)) is not None:
            found += [("scale", scaler._scale.item(), SCALE), ("growth", scaler._growth_tracker, GROWTH)]
    return [f"{name} is {now}, not {wanted}" for name, now, wanted in found if now != wanted]


def _schedule(group: dict[str, Any]) -> tuple[float, float]:
    """Return lr and weight decay of a group: those of groups with different settings differ."""
    return 0.125 * (1 + group["wd_mult"]), 0.5 * group["wd_mult"] + 0.0625


def _write(optimizer: Any, step: int, factor: float, scale: float, growth: int) -> None:
    for leaf in megatron.leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            group["lr"], group["weight_decay"] = (factor * value for value in _schedule(group))
            for param in group["params"]:
                if "step" in (state := leaf.optimizer.state.get(param, {})):
                    state["step"].fill_(step)
        if (scaler := getattr(leaf, "grad_scaler", None)) is not None:
            scaler._scale.fill_(scale)
            scaler._growth_tracker = growth
