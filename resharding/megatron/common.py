"""What an optimizer keeps besides tensors: numbers of its parameter groups, and the grad scaler."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from resharding.megatron.parts import Unsupported
from resharding.megatron.shards import leaves

GROUP_SETTINGS = (*param_group_identifier_keys, "max_lr", "min_lr", "start_wd", "end_wd")
"""Fields by which parameter groups of two worlds are the same group; they carry no names."""
SCHEDULED_FIELDS = ("lr", "weight_decay")
"""Fields of a parameter group that the scheduler writes."""


def common_state(optimizer: Any) -> dict[str, Any]:
    """Return what the optimizer keeps besides tensors: step, lr, weight decay per group; the grad scaler.

    The result is JSON. Groups are named by their settings. A rank that holds no range of a group has ``None``
    for its step. Raises ``Unsupported`` for parameters of one group at different steps.
    """
    groups: dict[str, dict[str, Any]] = {}
    scaler: dict[str, Any] = {}
    for leaf in leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            fields = {name: plain(group[name]) for name in SCHEDULED_FIELDS if name in group}
            fields["step"] = _step_of(leaf.optimizer, group)
            name = group_name(group)
            groups[name] = _agreed(f"parameter group {name}", [groups.get(name, {}), fields])
        found = getattr(leaf, "grad_scaler", None)
        if found is not None:
            state = {name: plain(value) for name, value in found.state_dict().items()}
            scaler = _agreed("grad scaler", [scaler, state])
    return {"groups": groups, "grad_scaler": scaler}


def group_settings(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return every field of the parameter groups, by the group's name as in ``common_state``: betas, eps and so on.

    What a live world gets from its own configuration, and a file for others has to say. JSON; the same on all ranks.
    """
    found: dict[str, dict[str, Any]] = {}
    for leaf in leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            fields = {name: plain(value) for name, value in group.items() if name not in ("params", "step")}
            found[group_name(group)] = {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in fields.items()
                if isinstance(value, bool | int | float | str | list | tuple | None)
            }
    return found


def merge_common_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine what the ranks of a world have in common; empty states of joiners are fine.

    Raises ``ValueError`` naming the field on which two ranks disagree.
    """
    groups: dict[str, dict[str, Any]] = {}
    scaler: dict[str, Any] = {}
    for state in states:
        for name, fields in state.get("groups", {}).items():
            groups[name] = _agreed(f"parameter group {name}", [groups.get(name, {}), fields])
        scaler = _agreed("grad scaler", [scaler, state.get("grad_scaler", {})])
    return {"groups": groups, "grad_scaler": scaler}


def load_common_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Write a merged ``common_state`` into an optimizer whose tensor state exists.

    Megatron gives experts groups of their own only where ep is above 1; where the one world has them and the other
    has not, they are at what the group with otherwise the same settings is at.

    Raises ``ValueError`` if a group of this optimizer is not in it.
    """
    groups = with_expert_twins(state["groups"])
    for leaf in leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            name = group_name(group)
            if name not in groups:
                raise ValueError(f"no state for parameter group {name}; there is {list(state['groups'])}")
            fields = groups[name]
            for field in SCHEDULED_FIELDS:
                if field in fields:
                    group[field] = _like(group.get(field), fields[field])
            step = fields.get("step")
            if step is None:
                continue
            if "step" in group:
                group["step"] = _like(group["step"], step)
            for param in group["params"]:
                own = leaf.optimizer.state.get(param, {})
                if "step" in own:
                    own["step"] = _like(own["step"], step)
        scaler = getattr(leaf, "grad_scaler", None)
        if scaler is not None and state["grad_scaler"]:
            now = scaler.state_dict()
            scaler.load_state_dict({name: _like(now[name], state["grad_scaler"][name]) for name in now})


def group_names(optimizer: Any) -> set[str]:
    """Return the settings by which parameter groups find their state in another world, whatever becomes of experts.

    Groups of experts are told apart from dense ones only in worlds that split experts.
    """
    groups = (group for leaf in leaves(optimizer) for group in leaf.optimizer.param_groups)
    kept = ({name: value for name, value in group.items() if name != "is_expert_parallel"} for group in groups)
    return {group_name(group) for group in kept}


def group_name(group: Mapping[str, Any]) -> str:
    """Return the settings of a parameter group as JSON: what the group is called in every world."""
    return json.dumps({name: plain(group[name]) for name in sorted(set(GROUP_SETTINGS)) if name in group})


def with_expert_twins(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return parameter groups under both values of ``is_expert_parallel``; a name that is no JSON has no twin."""
    found = dict(groups)
    for name, fields in groups.items():
        try:
            settings = json.loads(name)
        except ValueError:
            continue
        if isinstance(settings, dict) and "is_expert_parallel" in settings:
            settings["is_expert_parallel"] = not settings["is_expert_parallel"]
            found.setdefault(json.dumps(settings), fields)
    return found


def _step_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float | None:
    states = (optimizer.state.get(param, {}) for param in group["params"])
    steps = {plain(state["step"]) for state in states if "step" in state}
    if not steps and "step" in group and group["params"]:
        # fused Adam counts per group; with torch's Adam it is what a checkpoint load left there, and stale
        steps.add(plain(group["step"]))
    if len(steps) > 1:
        raise Unsupported(f"parameters of group {group_name(group)} are at different steps {sorted(steps)}")
    return steps.pop() if steps else None


def plain(value: Any) -> Any:
    """Return a number in place of a tensor of one element."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _like(now: Any, value: Any) -> Any:
    """Return ``value`` as what ``now`` is: a tensor of one element, or a plain number."""
    return torch.full_like(now, value) if isinstance(now, torch.Tensor) else value


def _agreed(what: str, sides: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side in sides:
        for name, value in side.items():
            if value is None:
                found.setdefault(name, None)
            elif found.get(name) in (None, value):
                found[name] = value
            else:
                raise ValueError(f"{what}: {name} is {found[name]} on one rank and {value} on another")
    return found
