"""DeepSpeed's ZeRO checkpoints, stages 1 to 3, as a source.

Every data parallel rank has a file with its part of flat vectors, and every tensor parallel rank one that names the
parameters in them. Stages 1 and 2 cut a vector of whole parameters (with padding behind each) into equal parts; stage
3 cuts every parameter by itself. Files are mapped, so that only what is read is in memory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resharding.boxes import Shape
from resharding.checkpoint.bits import bits_of_tensor
from resharding.checkpoint.convert import stripped_part
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.fused import Fused
from resharding.checkpoint.megatron_dist import fused_by_config
from resharding.checkpoint.parts import Part
from resharding.checkpoint.patterns import Pattern, Patterns, from_deepspeed, read_patterns
from resharding.checkpoint.universal import meta_of
from resharding.checkpoint.unpickled import load_torch
from resharding.listing import Tensor

_NAME = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(frozen=True, kw_only=True)
class _Range:
    """Elements of one parameter's slice, in the flat vectors of a group."""

    group: int
    start: int
    shape: Shape


class _Slice:
    """What one tensor parallel rank has: files of its data parallel ranks, and where parameters lie in them."""

    def __init__(self, model: Mapping[str, Any], files: Sequence[Mapping[str, Any]], where: str) -> None:
        self.model = model
        optimizers = [file["optimizer_state_dict"] for file in files]
        first = optimizers[0]
        self.stage3 = "fp32_flat_groups" in first
        key = "fp32_flat_groups" if self.stage3 else "single_partition_of_fp32_groups"
        if key not in first:
            raise BadCheckpoint(f"{where} has no partition of fp32 parameters; it is not of ZeRO stage 1, 2 or 3")
        inner = [o["optimizer_state_dict" if self.stage3 else "base_optimizer_state"] for o in optimizers]
        states = [each["state"] for each in inner]
        names = [name for name, value in next(iter(states[0].values())).items() if _is_flat(value)]
        count = len(first[key])
        self.flat = {"main": [[o[key][g] for o in optimizers] for g in range(count)]}
        for name in names:
            self.flat[name] = [[state[g][name] for state in states] for g in range(count)]
        self.groups = inner[0]["param_groups"]
        self.steps = [float(next(iter(states[0].values())).get("step", math.nan))]
        self.ranges = self._ranges(model["param_shapes"], first.get("param_alignment_paddings"))

    def _ranges(self, shapes: Sequence[Mapping[str, Shape]], paddings: Any) -> dict[str, _Range]:
        found: dict[str, _Range] = {}
        at = 0
        for group, named in enumerate(shapes):
            at = at if self.stage3 else 0
            for number, (name, shape) in enumerate(named.items()):
                found[name] = _Range(group=group, start=at, shape=tuple(shape))
                numel = math.prod(shape)
                if self.stage3:
                    at += -(-numel // len(self.flat["main"][0]))
                else:
                    at += numel + (int(paddings[group][number]) if paddings is not None else 0)
        return found

    def read(self, kind: str, name: str) -> torch.Tensor:
        """Return a parameter's slice, or its moments, put together from all data parallel ranks."""
        where = self.ranges[name]
        numel = math.prod(where.shape)
        pieces: list[torch.Tensor] = []
        if self.stage3:  # every rank has an equal part, one sub-group after the other
            length = -(-numel // len(self.flat[kind][0]))
            for rank in range(len(self.flat[kind][0])):
                vectors = [group[rank] for group in self.flat[kind]]
                pieces.extend(_stretch(vectors, where.start, where.start + length))
        else:
            pieces.extend(_stretch(self.flat[kind][where.group], where.start, where.start + numel))
        whole = torch.cat([piece.reshape(-1) for piece in pieces])
        if whole.numel() < numel:
            raise BadCheckpoint(f"{kind}/{name} has {whole.numel()} of its {numel} elements; files are missing")
        return whole[:numel].reshape(where.shape)


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 1


def _stretch(vectors: Sequence[torch.Tensor], start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield elements ``[start, stop)`` of vectors laid end to end."""
    at = 0
    for vector in vectors:
        first, last = max(start - at, 0), min(stop - at, vector.numel())
        if first < last:
            yield vector[first:last]
        at += vector.numel()


class DeepSpeedSource:
    """A folder ``global_step…`` of a ZeRO stage, or the one its ``latest`` names."""

    def __init__(
        self,
        folder: Path,
        *,
        model: Mapping[str, Any],
        patterns: Mapping[str, Any],
        step: int | None = None,
        consumed_samples: int | None = None,
        vocab_size: int | None = None,
        weights_only: bool = False,
    ) -> None:
        """Open it. Raises ``BadCheckpoint``, also for what has to be told and is not."""
        if (folder / "latest").is_file():
            folder = folder / (folder / "latest").read_text().strip()
        self._folder = folder
        self._slices = _slices(folder)
        first = self._slices[0].model
        info = first.get("universal_checkpoint_info") or {}
        self._patterns: Patterns = read_patterns(patterns) if patterns else from_deepspeed(info)
        if vocab_size is not None:
            raise BadCheckpoint(f"--vocab-size {vocab_size}: name the tensors and their rows with --patterns instead")
        if self._slices[0].stage3 and first.get("frozen_param_shapes"):
            raise BadCheckpoint(f"{folder} is of ZeRO stage 3 with frozen parameters, which cannot be read yet")
        kinds = ["weight"] if weights_only else ["weight", *self._slices[0].flat]
        self._dtype = _weight_dtype(first)
        self.tensors: Sequence[Tensor] = list(self._tensors(kinds))
        self._shapes = {tensor.key: tensor.global_shape for tensor in self.tensors}
        self.nbytes = sum(math.prod(t.global_shape) * getattr(torch, t.dtype).itemsize for t in self.tensors)
        self.fused: Mapping[str, Fused] = fused_by_config(self.tensors, model)
        self.meta = meta_of(
            folder, step=step, consumed_samples=consumed_samples, client=first, source="deepspeed",
            optimizer=self._optimizer(first),
        )  # fmt: skip

    def _tensors(self, kinds: Sequence[str]) -> Iterator[Tensor]:
        for name in dict.fromkeys(itertools.chain.from_iterable(each.ranges for each in self._slices)):
            shape = self._whole(name)[0]
            for kind in kinds:
                if kind == "main" and self._dtype == torch.float32:
                    continue  # the weight is the main parameter
                dtype = self._dtype if kind == "weight" else self._slices[0].flat[kind][0][0].dtype
                yield Tensor(f"{kind}/{name}", str(dtype).removeprefix("torch."), shape, False)
        for name, value in (self._slices[0].model.get("module") or {}).items():
            trained = any(name in each.ranges for each in self._slices)
            if not trained and isinstance(value, torch.Tensor) and value.numel():  # buffers, and what is not trained
                yield Tensor(f"weight/{name}", str(value.dtype).removeprefix("torch."), tuple(value.shape), False)

    def _whole(self, name: str) -> tuple[Shape, Pattern, list[_Slice]]:
        held = [each for each in self._slices if name in each.ranges]
        pattern = self._patterns.of(name, len(held))
        try:
            return pattern.whole_shape([each.ranges[name].shape for each in held]), pattern, held
        except ValueError as error:
            raise BadCheckpoint(f"{name} {error}; pass rules that fit with --patterns") from None

    def parts(self, key: str) -> Iterator[Part]:
        """Yield a tensor's numbers, one tensor parallel rank's after the other. Raises ``BadCheckpoint``."""
        kind, _, name = key.partition("/")
        if all(name not in each.ranges for each in self._slices):
            yield _part(key, (), self._slices[0].model["module"][name])
            return
        shape, pattern, held = self._whole(name)
        if pattern.kind == "fragments" and len(held) > 1:
            shapes = [each.ranges[name].shape for each in held]
            for rank, each in enumerate(held):
                data = self._read(each, kind, name)
                for start, length, at in pattern.places(shapes, rank):
                    offset = tuple(at if axis == pattern.axis else 0 for axis in range(len(shape)))
                    part = stripped_part(_part(key, offset, data.narrow(pattern.axis, start, length)), shape)
                    if part.data.size:
                        yield part
            return
        values = [self._read(each, kind, name) for each in held]
        if pattern.kind == "average":
            values = [torch.stack([value.double() for value in values]).mean(dim=0).to(values[0].dtype)]
        elif any(not torch.equal(value, values[0]) for value in values):
            raise BadCheckpoint(f"{key} is said to be replicated, and tensor parallel ranks have different numbers")
        yield stripped_part(_part(key, (), values[0]), shape)

    def _read(self, held: _Slice, kind: str, name: str) -> torch.Tensor:
        if kind != "weight":
            return held.read(kind, name)
        module = held.model.get("module") or {}
        if name in module and module[name].numel() == math.prod(held.ranges[name].shape):
            found: torch.Tensor = module[name]
            return found
        return held.read("main", name).to(self._dtype)  # stage 3 keeps no weights beside the main values

    def _optimizer(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return every group's settings, under numbers: they have no names, and which parameters are in each."""
        groups, settings = {}, {}
        for number, (group, named) in enumerate(zip(self._slices[0].groups, model["param_shapes"], strict=False)):
            label = f"group {number}"
            fields = {key: _plain(value) for key, value in group.items() if key != "params"}
            settings[label] = {**fields, "parameters": list(named)}
            groups[label] = {key: fields[key] for key in ("lr", "weight_decay") if key in fields}
            groups[label]["step"] = self._slices[0].steps[0]
        return {"groups": groups, "settings": settings}

    def complaint(self) -> str | None:
        """Nothing is wrong with these in a way that could be seen."""
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str | type(None)) else None


def _part(key: str, offset: Shape, value: torch.Tensor) -> Part:
    value = value.detach().contiguous()
    return Part(key=key, offset=offset or (0,) * value.ndim, data=bits_of_tensor(value))


def _weight_dtype(model: Mapping[str, Any]) -> torch.dtype:
    module = model.get("module") or {}
    for name in itertools.chain.from_iterable(model["param_shapes"]):
        if name in module and isinstance(module[name], torch.Tensor):
            found: torch.dtype = module[name].dtype
            return found
    raise BadCheckpoint("the model's states do not say which type its weights have")


def _slices(folder: Path) -> list[_Slice]:
    """Open every file of the folder, by tensor parallel rank. Raises ``BadCheckpoint``."""
    files: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            files.setdefault(int(match[2]), {})[int(match[1])] = path
    if not files:
        raise BadCheckpoint(f"{folder} has no *_optim_states.pt of ZeRO; point at the folder of a step, or above it")
    found = []
    for mp, by_rank in sorted(files.items()):
        if sorted(by_rank) != list(range(len(by_rank))):
            raise BadCheckpoint(f"{folder} has files of data parallel ranks {sorted(by_rank)}; some are missing")
        names = (f"mp_rank_{mp:02d}_model_states.pt", f"zero_pp_rank_0_mp_rank_{mp:02d}_model_states.pt")
        about = next((folder / name for name in names if (folder / name).is_file()), None)
        if about is None:
            raise BadCheckpoint(f"{folder} has no {names[0]}; it is not whole")
        model = load_torch(about, str(about), mapped=True)
        opened = [load_torch(by_rank[rank], str(by_rank[rank]), mapped=True) for rank in sorted(by_rank)]
        count = opened[0]["optimizer_state_dict"].get("partition_count")
        count = max(count) if isinstance(count, list) else count
        if isinstance(count, int) and count != len(opened):
            raise BadCheckpoint(f"{folder} has files of {len(opened)} data parallel ranks out of {count}")
        found.append(_Slice(model, opened, str(folder)))
    return found
