"""DeepSpeed's universal checkpoints as a source: ``zero/<parameter>/fp32.pt``, ``exp_avg.pt`` and so on.

Beside them lie ``step.pt``, the steps of a parameter's optimizer, and ``zero/optimizer_state.pt`` with the settings
of its parameter groups.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from resharding.checkpoint.bits import bits_of_tensor
from resharding.checkpoint.config import said_of
from resharding.checkpoint.convert import mark_of
from resharding.checkpoint.format import BadCheckpoint, Meta
from resharding.checkpoint.fused import Fused
from resharding.checkpoint.megatron_dist import fused_by_config
from resharding.checkpoint.parts import Part
from resharding.checkpoint.unpickled import load_torch
from resharding.listing import Tensor

_STEP = "step"
_GROUPS = "optimizer_state.pt"


class UniversalSource:
    """A folder that DeepSpeed's ``ds_to_universal`` wrote: the weights are fp32, and main parameters too."""

    def __init__(
        self,
        folder: Path,
        *,
        model: Mapping[str, Any],
        step: int | None = None,
        consumed_samples: int | None = None,
        vocab_size: int | None = None,
        weights_only: bool = False,
        patterns: Mapping[str, Any] | None = None,
    ) -> None:
        """Open it; who wrote it has left out padding of the vocabulary, so ``vocab_size`` is refused.

        ``patterns`` are for whoever renames what is found here; slices have been put together.
        Raises ``BadCheckpoint``, also for what has to be told and is not.
        """
        if vocab_size is not None:
            raise BadCheckpoint(f"{folder} has no padding to leave out; call this without --vocab-size")
        self.mark = mark_of(folder, model=model, patterns=patterns, consumed_samples=consumed_samples)
        client = _client(folder)
        shapes = {name: tuple(shape) for named in client.get("param_shapes") or () for name, shape in named.items()}
        self._files: dict[str, Path] = {}
        tensors: list[Tensor] = []
        for path in sorted((folder / "zero").glob("*/*.pt")):
            kind = "weight" if path.stem == "fp32" else path.stem
            if kind == _STEP or (weights_only and kind != "weight"):
                continue
            value = _param(path)
            size = tuple(value.shape)
            told = shapes.get(path.parent.name, size)
            if len(size) == 1 and math.prod(told) == size[0]:
                size = told  # ZeRO stage 3 writes them flat
            key = f"{kind}/{path.parent.name}"
            self._files[key] = path
            tensors.append(Tensor(key, str(value.dtype).removeprefix("torch."), size, False))
        if not tensors:
            raise BadCheckpoint(f"{folder} has no zero/*/fp32.pt; point at the folder of a universal checkpoint")
        self.tensors: Sequence[Tensor] = tensors
        self._shapes = {tensor.key: tensor.global_shape for tensor in tensors}
        for key, path in self._files.items():
            weight = f"weight/{path.parent.name}"
            if self._shapes[key] != self._shapes.get(weight):
                raise BadCheckpoint(f"{path} has not the shape of fp32.pt beside it; pass --weights-only to omit it")
        self.nbytes = sum(path.stat().st_size for path in self._files.values())
        self.fused: Mapping[str, Fused] = fused_by_config(tensors, model)
        self.meta = meta_of(
            folder, step=step, consumed_samples=consumed_samples, client=client, model=model,
            source="deepspeed universal",
            optimizer={} if weights_only else _optimizer(folder, client),
        )  # fmt: skip

    def parts(self, key: str) -> Iterator[Part]:
        """Yield a tensor's numbers in one piece. Raises ``BadCheckpoint``."""
        value = _param(self._files[key]).detach().contiguous()
        bits = bits_of_tensor(value).reshape(self._shapes[key])
        yield Part(key=key, offset=(0,) * bits.ndim, data=bits)

    def complaint(self) -> str | None:
        """Nothing is wrong with these in a way that could be seen."""
        return None


def _client(folder: Path) -> Mapping[str, Any]:
    """Return what the model's states say, which DeepSpeed copies beside the parameters; empty where they are not."""
    path = next(iter(sorted(folder.glob("*model_states.pt"))), None)
    found = load_torch(path, str(path), mapped=True) if path is not None else {}
    return found if isinstance(found, Mapping) else {}


def _param(path: Path) -> torch.Tensor:
    found = load_torch(path, str(path), mapped=True)
    value = found.get("param") if isinstance(found, Mapping) else found
    if not isinstance(value, torch.Tensor):
        raise BadCheckpoint(f"{path} holds no parameter")
    return value


def _optimizer(folder: Path, client: Mapping[str, Any]) -> dict[str, Any]:
    """Return every group's settings and steps, and as far as it is said which parameters are in each."""
    path = folder / "zero" / _GROUPS
    if not path.is_file():
        return {}
    said = load_torch(path, str(path), mapped=True)
    groups = said.get("param_groups") if isinstance(said, Mapping) else None
    if not isinstance(groups, Sequence):
        raise BadCheckpoint(f"{path} has no param_groups; pass --weights-only to leave the optimizer out")
    named = {number: list(shapes) for number, shapes in enumerate(client.get("param_shapes") or ())}
    files = {path.parent.name: path for path in (folder / "zero").glob(f"*/{_STEP}.pt")}
    steps = {name: plain(load_torch(path, str(path))) for name, path in files.items()}
    inner = said.get("optimizer_state_dict")  # ZeRO stage 3: its first rank's own state, where steps are
    states = inner.get("state", {}).values() if isinstance(inner, Mapping) else ()
    others = {plain(state["step"]) for state in states if "step" in state}

    def step_of(number: int) -> Any:
        found = {steps[name] for name in named.get(number, steps) if name in steps} or others
        if len(found) > 1:
            raise BadCheckpoint(
                f"parameters of group {number} of {folder} are at different steps, {sorted(found)}; pass "
                "--weights-only to leave the optimizer out"
            )
        return next(iter(found), None)

    return groups_of(groups, named, step_of, folder)


def groups_of(
    groups: Sequence[Mapping[str, Any]],
    named: Mapping[int, Sequence[str]],
    step_of: Callable[[int], Any],
    folder: Path,
) -> dict[str, Any]:
    """Return what an index says of an optimizer. Groups are under numbers, as they have no names.

    ``named`` are the parameters of each, ``step_of`` the steps that its parameters have made; else the group has
    them. Raises ``BadCheckpoint`` where neither does.
    """
    found: dict[str, Any] = defaultdict(dict)
    for number, group in enumerate(groups):
        label = f"group {number}"
        fields = {key: plain(value) for key, value in group.items() if key != "params"}
        step = step_of(number)
        step = fields.get("step") if step is None else plain(step)
        if not isinstance(step, int | float):
            raise BadCheckpoint(f"{folder} does not say how many steps {label} has made; pass --weights-only")
        found["settings"][label] = {**fields, "parameters": list(named.get(number, ()))}
        found["groups"][label] = {key: fields[key] for key in ("lr", "weight_decay") if key in fields}
        found["groups"][label]["step"] = float(step)
    return dict(found)


def plain(value: Any) -> Any:
    """Return a value of a parameter group as JSON, and ``None`` for what is none."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else None


def meta_of(
    folder: Path,
    *,
    step: int | None,
    consumed_samples: int | None,
    client: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    model: Mapping[str, Any],
    source: str,
) -> Meta:
    """Return what a DeepSpeed checkpoint says of itself. Raises ``BadCheckpoint`` for what has to be told."""
    named = folder.name.removeprefix("global_step").partition("_")[0]
    if step is None:
        step = client.get("global_steps", int(named) if named.isdecimal() else None)
    if consumed_samples is None:
        consumed_samples = client.get("global_samples")
    if not isinstance(step, int):
        raise BadCheckpoint(f"{folder} does not say what --step is; pass it")
    if not isinstance(consumed_samples, int):
        raise BadCheckpoint(f"{folder} does not say what --consumed-samples is; pass it")
    return Meta(
        step=step, consumed_samples=consumed_samples,
        optimizer={"groups": {}, "grad_scaler": {}, "settings": {}, **optimizer},
        origin={"source": source, "folder": str(folder), "model": said_of(model)},
    )  # fmt: skip
