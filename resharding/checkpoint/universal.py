"""DeepSpeed's universal checkpoints as a source: ``zero/<parameter>/fp32.pt``, ``exp_avg.pt`` and so on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from resharding.checkpoint.bits import bits_of_tensor
from resharding.checkpoint.convert import mark_of
from resharding.checkpoint.format import BadCheckpoint, Meta
from resharding.checkpoint.fused import Fused
from resharding.checkpoint.megatron_dist import fused_by_config
from resharding.checkpoint.parts import Part
from resharding.checkpoint.unpickled import load_torch
from resharding.listing import Tensor

KINDS = {"fp32": "main", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


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
    ) -> None:
        """Open it; who wrote it has left out padding of the vocabulary, so ``vocab_size`` is refused.

        Raises ``BadCheckpoint``, also for what has to be told and is not.
        """
        if vocab_size is not None:
            raise BadCheckpoint(f"{folder} has no padding to leave out; call this without --vocab-size")
        self.mark = mark_of(folder, model=model, consumed_samples=consumed_samples)
        client = _client(folder)
        shapes = {name: tuple(shape) for named in client.get("param_shapes") or () for name, shape in named.items()}
        self._files: dict[str, Path] = {}
        tensors: list[Tensor] = []
        for path in sorted((folder / "zero").glob("*/*.pt")):
            kind = KINDS.get(path.stem)
            if kind is None or (weights_only and kind != "main"):
                continue
            value = _param(path)
            size = tuple(value.shape)
            told = shapes.get(path.parent.name, size)
            if len(size) == 1 and math.prod(told) == size[0]:
                size = told  # ZeRO stage 3 writes them flat
            key = f"{'weight' if kind == 'main' else kind}/{path.parent.name}"
            self._files[key] = path
            tensors.append(Tensor(key, str(value.dtype).removeprefix("torch."), size, False))
        if not tensors:
            raise BadCheckpoint(f"{folder} has no zero/*/fp32.pt; point at the folder of a universal checkpoint")
        self.tensors: Sequence[Tensor] = tensors
        self._shapes = {tensor.key: tensor.global_shape for tensor in tensors}
        self.nbytes = sum(path.stat().st_size for path in self._files.values())
        self.fused: Mapping[str, Fused] = fused_by_config(tensors, model)
        self.meta = meta_of(
            folder, step=step, consumed_samples=consumed_samples, client=client, optimizer={},
            source="deepspeed universal",
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


def meta_of(
    folder: Path,
    *,
    step: int | None,
    consumed_samples: int | None,
    client: Mapping[str, Any],
    optimizer: Mapping[str, Any],
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
        origin={"source": source, "folder": str(folder)},
    )  # fmt: skip
