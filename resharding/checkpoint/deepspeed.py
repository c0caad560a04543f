"""DeepSpeed's ZeRO checkpoints, stages 1 to 3, as a source.

Every data parallel rank has a file with its part of flat vectors, and every model parallel rank one that names the
parameters in them. Stages 1 and 2 cut a vector of whole parameters (with padding behind each) into equal parts; stage
3 cuts every parameter by itself, also those that are not trained. Files are mapped, so that only what is read is in
memory, and it is let go of after each tensor. Where weights lie in files of their own, those of pipeline layers and
of experts, see ``deepspeed_layers``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from resharding.boxes import Shape
from resharding.checkpoint.bits import bits_of_tensor
from resharding.checkpoint.convert import mark_of, stripped_part
from resharding.checkpoint.deepspeed_layers import (
    expert_names,
    expert_weights,
    is_expert,
    layer_weights,
    name_tied_layers,
    tensor_parallel_size,
)
from resharding.checkpoint.deepspeed_patterns import from_deepspeed
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.fused import Fused
from resharding.checkpoint.megatron_dist import fused_by_config
from resharding.checkpoint.parts import Part
from resharding.checkpoint.patterns import Layout, Patterns, read_patterns
from resharding.checkpoint.universal import groups_of, meta_of
from resharding.checkpoint.unpickled import load_torch
from resharding.listing import Tensor
from resharding.pages import let_go

_NAME = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_DIFFERENT = "{key} is said to be replicated, and tensor parallel ranks have different numbers"
_AUTOEP = ("ds_autoep_layers", "autoep_layers")
"""where a model parallel rank says which experts DeepSpeed's AutoEP has spread, and how"""


@dataclass(frozen=True, kw_only=True)
class _Range:
    """Elements of one parameter's slice, in the flat vectors of a group."""

    group: int
    start: int
    shape: Shape
    ranks: Sequence[int]
    """data parallel ranks that have a part of it, in order"""


@dataclass(frozen=True, kw_only=True)
class _Frozen:
    """A parameter that is not trained, in equal parts of all data parallel ranks; in memory only once it is read."""

    fragments: Sequence[torch.Tensor]
    shape: Shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""
        return self.fragments[0].dtype

    def numel(self) -> int:
        """Return how many elements it has."""
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """Put it together."""
        return torch.cat([each.reshape(-1) for each in self.fragments])[: self.numel()].reshape(self.shape)


class _Slice:
    """What one model parallel rank has: files of its data parallel ranks, and where parameters lie in them."""

    def __init__(
        self, models: Sequence[Mapping[str, Any]], files: Sequence[Mapping[str, Any]], where: str, stage: int
    ) -> None:
        """``models`` are the files with weights: one for each data parallel rank in ZeRO stage 3, else one."""
        self.model = model = models[0]
        self.module: dict[str, torch.Tensor] = dict(model.get("module") or {})
        """weights, by name, as far as they are known"""
        self.frozen: dict[str, _Frozen] = {}
        """of ZeRO stage 3: parameters that are not trained, which ``module`` has empty"""
        self.pipeline_stage = stage
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
        self.step: Any = next(iter(states[0].values())).get("step")
        """that the optimizer has made; DeepSpeed's own Adam counts in its groups"""
        counts = first.get("partition_count")
        self.ranges = self._ranges(model["param_shapes"], first.get("param_alignment_paddings"), counts, where)
        if self.stage3:
            for name, shape in (model.get("frozen_param_shapes") or {}).items():
                fragments = [each["frozen_param_fragments"][name] for each in models]
                self.frozen[name] = _Frozen(fragments=fragments, shape=tuple(shape))

    def _ranges(
        self, shapes: Sequence[Mapping[str, Shape]], paddings: Any, counts: Any, where: str
    ) -> dict[str, _Range]:
        found: dict[str, _Range] = {}
        size = len(self.flat["main"][0])
        at = 0
        for group, named in enumerate(shapes):
            at = at if self.stage3 else 0
            parts = counts[group] if isinstance(counts, list) else size
            if size % parts:
                raise BadCheckpoint(f"{where} has files of {size} data parallel ranks, and a group shared by {parts}")
            for number, (name, shape) in enumerate(named.items()):
                # of experts, every rank of an expert parallel group has its own: peers stand next to each other
                peers = size // parts
                names = [name] if peers == 1 else expert_names(name, named, peers, where)
                for peer, each in enumerate(names):
                    found[each] = _Range(
                        group=group, start=at, shape=tuple(shape), ranks=range(peer, size, peers)
                    )
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
            length = -(-numel // len(where.ranks))
            for rank in where.ranks:
                vectors = [group[rank] for group in self.flat[kind]]
                pieces.extend(_stretch(vectors, where.start, where.start + length))
        else:
            vectors = [self.flat[kind][where.group][rank] for rank in where.ranks]
            pieces.extend(_stretch(vectors, where.start, where.start + numel))
        whole = torch.cat([piece.reshape(-1) for piece in pieces])
        if whole.numel() < numel:
            raise BadCheckpoint(f"{kind}/{name} has {whole.numel()} of its {numel} elements; files are missing")
        return whole[:numel].reshape(where.shape)

    def let_go(self, kind: str, name: str) -> None:
        """Take out of memory what has been read of a parameter; to read it again is no error."""
        if isinstance(weight := self.module.get(name), torch.Tensor):
            let_go(weight)
        if name in self.frozen:
            for fragment in self.frozen[name].fragments:
                let_go(fragment)
        if name in self.ranges:
            group = self.ranges[name].group
            for each in {kind, "main"} & self.flat.keys():
                for vectors in self.flat[each] if self.stage3 else [self.flat[each][group]]:
                    for vector in vectors:
                        let_go(vector)


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
        self.mark = mark_of(folder, model=model, patterns=patterns, consumed_samples=consumed_samples)
        self._slices = _slices(folder)
        first = self._slices[0].model
        info = first.get("universal_checkpoint_info") or {}
        self._patterns: Patterns = read_patterns(patterns) if "rules" in patterns else from_deepspeed(info)
        if vocab_size is not None:
            raise BadCheckpoint(f"--vocab-size {vocab_size}: name the tensors and their rows with --patterns instead")
        if any(said.get(key) for each in self._slices for said in (each.model, info) for key in _AUTOEP):
            raise BadCheckpoint(f"{folder} has experts of AutoEP, which cannot be read yet")
        if self._slices[0].stage3 and first.get("frozen_param_shapes") and len(self._slices) > 1:
            raise BadCheckpoint(
                f"{folder} is of ZeRO stage 3 with frozen parameters and tensor parallel, which cannot be read yet"
            )
        kinds = ["weight"] if weights_only else ["weight", *self._slices[0].flat]
        self._dtype = _weight_dtype(self._slices)
        self.tensors: Sequence[Tensor] = list(self._tensors(kinds))
        self._shapes = {tensor.key: tensor.global_shape for tensor in self.tensors}
        self.nbytes = sum(math.prod(t.global_shape) * getattr(torch, t.dtype).itemsize for t in self.tensors)
        self.fused: Mapping[str, Fused] = fused_by_config(self.tensors, model)
        self.meta = meta_of(
            folder, step=step, consumed_samples=consumed_samples, client=first, source="deepspeed", model=model,
            optimizer=self._optimizer(),
        )  # fmt: skip

    def _tensors(self, kinds: Sequence[str]) -> Iterator[Tensor]:
        for name in dict.fromkeys(itertools.chain.from_iterable(each.ranges for each in self._slices)):
            shape = self._whole(name)[0]
            for kind in kinds:
                if kind == "main" and self._dtype == torch.float32:
                    continue  # the weight is the main parameter
                dtype = self._dtype if kind == "weight" else self._slices[0].flat[kind][0][0].dtype
                yield Tensor(f"{kind}/{name}", str(dtype).removeprefix("torch."), shape, False)
        for name, value in self._untrained().items():
            # stage 3 leaves empty tensors where it has cut
            if isinstance(value, torch.Tensor | _Frozen) and value.numel():
                yield Tensor(f"weight/{name}", str(value.dtype).removeprefix("torch."), tuple(value.shape), False)

    def _untrained(self) -> dict[str, Any]:
        """Return buffers, and parameters that are not trained, as the first rank that has one has it."""
        found: dict[str, Any] = {}
        for each in reversed(self._slices):
            found.update(each.module | each.frozen)
        trained = set(itertools.chain.from_iterable(each.ranges for each in self._slices))
        return {name: value for name, value in found.items() if name not in trained}

    def _whole(self, name: str) -> tuple[Shape, Layout, list[_Slice]]:
        """Return shape, pattern and holders of a parameter; of what pipeline stages share, those of the first one."""
        held = [each for each in self._slices if name in each.ranges]
        held = [each for each in held if each.pipeline_stage == held[0].pipeline_stage]
        pattern = self._patterns.of(name, len(held))
        try:
            return pattern.whole_shape([each.ranges[name].shape for each in held]), pattern, held
        except ValueError as error:
            raise BadCheckpoint(f"{name} {error}; pass rules that fit with --patterns") from None

    def parts(self, key: str) -> Iterator[Part]:
        """Yield a tensor's numbers, one tensor parallel rank's after the other. Raises ``BadCheckpoint``."""
        kind, _, name = key.partition("/")
        try:
            yield from self._parts(key, kind, name)
        finally:
            for each in self._slices:
                each.let_go(kind, name)

    def _parts(self, key: str, kind: str, name: str) -> Iterator[Part]:
        if all(name not in each.ranges for each in self._slices):
            value = self._untrained()[name]
            yield _part(key, (), value.read() if isinstance(value, _Frozen) else value)
            return
        shape, pattern, held = self._whole(name)
        if pattern.kind == "fragments" and len(held) > 1:
            shapes = [each.ranges[name].shape for each in held]
            for rank, each in enumerate(held):
                data = self._read(each, kind, name)
                for block in pattern.blocks(shapes, rank):
                    mine = _block(data, block.start, block.size)
                    if block.twin is not None:
                        peer, start = block.twin
                        if not torch.equal(mine, _block(self._read(held[peer], kind, name), start, block.size)):
                            raise BadCheckpoint(_DIFFERENT.format(key=key))
                        continue
                    part = stripped_part(_part(key, block.at, mine), shape)
                    if part.data.size:
                        yield part
            return
        values = [self._read(each, kind, name) for each in held]
        if pattern.kind == "average":
            values = [torch.stack([value.double() for value in values]).mean(dim=0).to(values[0].dtype)]
        elif any(not torch.equal(value, values[0]) for value in values):
            raise BadCheckpoint(_DIFFERENT.format(key=key))
        yield stripped_part(_part(key, (), values[0]), shape)

    def _read(self, held: _Slice, kind: str, name: str) -> torch.Tensor:
        if kind != "weight":
            return held.read(kind, name)
        weight = held.module.get(name)
        if weight is None or weight.numel() != math.prod(held.ranges[name].shape):
            return held.read("main", name).to(self._dtype)  # stage 3 keeps no weights beside the main values
        if is_expert(name) and not torch.equal(held.read("main", name).to(weight.dtype), weight):
            raise BadCheckpoint(
                f"{self._folder}: the main values of {name} are not what its weight was cut from; experts were "
                "spread over ranks in another way than DeepSpeed's default, which cannot be read"
            )
        return weight

    def _optimizer(self) -> dict[str, Any]:
        """Return every group's settings, and which parameters are in each."""
        first = self._slices[0]
        named: dict[int, list[str]] = defaultdict(list)
        for each in self._slices:
            for name, where in each.ranges.items():
                if name not in named[where.group]:
                    named[where.group].append(name)
        return groups_of(first.groups, named, lambda _number: first.step, self._folder)

    def complaint(self) -> str | None:
        """Nothing is wrong with these in a way that could be seen."""
        return None


def _block(data: torch.Tensor, start: Shape, size: Shape) -> torch.Tensor:
    return data[tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))]


def _part(key: str, offset: Shape, value: torch.Tensor) -> Part:
    value = value.detach().contiguous()
    return Part(key=key, offset=offset or (0,) * value.ndim, data=bits_of_tensor(value))


def _weight_dtype(slices: Sequence[_Slice]) -> torch.dtype:
    for each in slices:
        for name in each.ranges:
            if isinstance(each.module.get(name), torch.Tensor):
                return each.module[name].dtype
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
    by_tensor_rank: dict[int, list[_Slice]] = defaultdict(list)
    for mp, by_rank in sorted(files.items()):
        if sorted(by_rank) != list(range(len(by_rank))):
            raise BadCheckpoint(f"{folder} has files of data parallel ranks {sorted(by_rank)}; some are missing")
        models = _models(folder, mp, len(by_rank))
        opened = [load_torch(by_rank[rank], str(by_rank[rank]), mapped=True) for rank in sorted(by_rank)]
        count = opened[0]["optimizer_state_dict"].get("partition_count")
        count = max(count) if isinstance(count, list) else count
        if isinstance(count, int) and count != len(opened):
            raise BadCheckpoint(f"{folder} has files of {len(opened)} data parallel ranks out of {count}")
        tensor_size = tensor_parallel_size(models[0], folder)
        found.append(_Slice(models, opened, str(folder), mp // tensor_size))
        found[-1].module.update(expert_weights(folder, mp))
        by_tensor_rank[mp % tensor_size].append(found[-1])
    for rank, peers in by_tensor_rank.items():
        weights = layer_weights(folder, rank)
        name_tied_layers(
            weights, {name: partial(each.read, "main", name) for each in peers for name in each.ranges}
        )
        for each in peers:
            each.module.update(weights)
    return found


def _models(folder: Path, mp: int, num_ranks: int) -> list[Mapping[str, Any]]:
    """Open the files with what a model parallel rank has besides its optimizer. Raises ``BadCheckpoint``."""
    whole = folder / f"mp_rank_{mp:02d}_model_states.pt"
    paths = [folder / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt" for rank in range(num_ranks)]
    found: list[Mapping[str, Any]] = []
    for path in [whole] if whole.is_file() else paths:
        if not path.is_file():
            raise BadCheckpoint(f"{folder} has no {path.name if found else whole.name}; it is not whole")
        found.append(load_torch(path, str(path), mapped=True))
        if not found[0].get("frozen_param_shapes"):
            break  # the others say the same
    return found
