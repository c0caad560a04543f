"""What a training keeps besides the tensors of model and optimizer, as JSON: the same on every rank, and moved whole.

The scheduler, what the script has registered as ``extra``, and numbers of the optimizer (see
``resharding.megatron.common``).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from liverun.world import Training
from resharding import megatron


def taken(training: Training) -> dict[str, Any]:
    """Return the scheduler's, the script's and the optimizer's small state.

    Raises ``TypeError`` for what cannot be JSON, and whatever a ``state_dict()`` of the script's raises.
    """
    scheduler = training.scheduler
    return {
        "scheduler": to_json("scheduler", scheduler.state_dict()) if scheduler is not None else None,
        "extra": {name: to_json(f"extra[{name!r}]", part.state_dict()) for name, part in training.extra.items()},
        "optimizer": megatron.common_state(training.optimizer),
    }


def load(training: Training, state: Mapping[str, Any]) -> None:
    """Load what ``taken`` gave into a stack whose tensors are there; raises whatever a ``load_state_dict`` raises."""
    megatron.load_common_state(training.optimizer, state["optimizer"])
    if training.scheduler is not None and state["scheduler"] is not None:
        training.scheduler.load_state_dict(from_json(state["scheduler"]))
    missing = sorted(set(state["extra"]) ^ set(training.extra))
    if missing:
        raise ValueError(f"extra state {missing} is registered in one world and not in the other")
    for name, part in training.extra.items():
        part.load_state_dict(from_json(state["extra"][name]))


def unmovable(name: str, value: Any) -> str | None:
    """Say in one sentence what of a state dict could not be JSON, and where, or ``None``. Copies no tensor."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                return f"{name} has {key!r} as a key and cannot move; use text as the keys of dicts"
            if (reason := unmovable(f"{name}[{key!r}]", part)) is not None:
                return reason
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            if (reason := unmovable(f"{name}[{index}]", part)) is not None:
                return reason
    elif not (value is None or isinstance(value, bool | int | float | str | torch.Tensor)):
        return f"{name} is a {type(value).__name__} and cannot move; use numbers, text, lists, dicts and tensors"
    return None


def to_json(name: str, value: Any) -> Any:
    """Turn a state dict into JSON, tensors into dtype, shape and bytes; raises ``TypeError`` where that cannot be."""
    if (reason := unmovable(name, value)) is not None:
        raise TypeError(reason)
    return _json(value)


def _json(value: Any) -> Any:
    match value:
        case torch.Tensor():
            data = value.detach().cpu().contiguous()
            raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
            dtype = str(data.dtype).removeprefix("torch.")
            return {_TENSOR: [dtype, list(data.shape), base64.b64encode(raw).decode()]}
        case dict():
            return {key: _json(part) for key, part in value.items()}
        case list() | tuple():
            return [_json(part) for part in value]
        case _:
            return value


def from_json(value: Any) -> Any:
    """Return what ``to_json`` was given, tuples as lists."""
    match value:
        case dict() if set(value) == {_TENSOR}:
            dtype, shape, raw = value[_TENSOR]
            data = torch.frombuffer(bytearray(base64.b64decode(raw)), dtype=torch.uint8) if raw else torch.empty(0)
            return data.view(getattr(torch, dtype)).reshape(shape)
        case dict():
            return {key: from_json(part) for key, part in value.items()}
        case list():
            return [from_json(part) for part in value]
        case _:
            return value


_TENSOR = "__tensor__"
