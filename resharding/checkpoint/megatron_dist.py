"""Megatron's ``torch_dist`` checkpoints (``fully_reshardable``) as a source, and written for Megatron to load.

In such a folder ``.metadata`` says which chunk of which tensor lies where in the ``.distcp`` files, and ``common.pt``
has what is no tensor. Layers are a first axis there, and a tensor each here.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resharding.boxes import DTYPE_SIZES_BYTES, Shape, overlap
from resharding.checkpoint.bits import bits_of_tensor
from resharding.checkpoint.convert import stripped_part
from resharding.checkpoint.format import BadCheckpoint, Meta
from resharding.checkpoint.fused import Fused, experts, gate_up, query_key_value
from resharding.checkpoint.parts import Part
from resharding.checkpoint.unpickled import load_torch, read_pickle
from resharding.listing import Tensor

_OPTIMIZER = re.compile(r"(?:optimizer\.)?(?:chained_\d+\.)?optimizer\.state\.([a-z_]+?)\.(.*)")
_KINDS = {"param": "main", "fp32_param": "main"}
_LAYERS = re.compile(r"(.*\.layers)\.(?!\d)(.*)")
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
_BUCKETS = re.compile(r".*optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_")
"""keys of ``dp_reshardable``, which names no parameter"""


@dataclass(frozen=True)
class _Chunk:
    """A stretch of a file: the box of one of their tensors."""

    offset: Shape
    shape: Shape
    file: Path
    at: int
    nbytes: int


class MegatronSource:
    """A folder that ``megatron.core.dist_checkpointing`` wrote."""

    def __init__(
        self,
        folder: Path,
        *,
        model: Mapping[str, Any] | None = None,
        step: int | None = None,
        consumed_samples: int | None = None,
        vocab_size: int | None = None,
        weights_only: bool = False,
    ) -> None:
        """Open it. ``model`` has fields of the model's configuration, for the names of fused parts.

        Raises ``BadCheckpoint``, also for what has to be told and is not.
        """
        self._folder = folder
        self._theirs = _chunks_of(folder)
        common = load_torch(folder / "common.pt", str(folder / "common.pt"))
        if any(_BUCKETS.match(key) for key in self._theirs):
            raise BadCheckpoint(
                f"{folder} is dp_reshardable, a kind that does not name the parameters of its optimizer; load it "
                "in the script it came from, run by liverun, and take a checkpoint there"
            )
        self._places: dict[str, tuple[str, int | None]] = {}
        """of our keys: their key, and the layer in it"""
        self.tensors: Sequence[Tensor] = self._tensors(vocab_size)
        if weights_only:
            self.tensors = [tensor for tensor in self.tensors if tensor.key.startswith("weight/")]
        self._by_key = {tensor.key: tensor for tensor in self.tensors}
        self._weights_only = weights_only
        self.nbytes = sum(math.prod(t.global_shape) * DTYPE_SIZES_BYTES[t.dtype] for t in self.tensors)
        self.meta = _meta(common, folder, step, consumed_samples)
        self.fused = fused_by_config(self.tensors, {**_arguments(common), **(model or {})})
        self.suspects: list[str] = []
        """parameters whose main values are not what the weights were cut from; found while converting"""

    def _tensors(self, vocab_size: int | None) -> list[Tensor]:
        found: dict[str, Tensor] = {}
        for theirs, (dtype, shape, _) in self._theirs.items():
            match = _OPTIMIZER.fullmatch(theirs)
            kind, name = (_KINDS.get(match[1], match[1]), match[2]) if match else ("weight", theirs)
            if kind == "main" and self._theirs.get(name, ("",))[0] == "float32":
                continue  # the weight is the main parameter
            padded = name in _PADDED
            layered = _LAYERS.fullmatch(name)
            rows = range(shape[0]) if layered else (None,)
            for row in rows:
                ours = f"{layered[1]}.{row}.{layered[2]}" if layered else name
                size = shape[1:] if layered else shape
                if padded and vocab_size is not None:
                    size = (min(vocab_size, size[0]), *size[1:])
                key = f"{kind}/{ours}"
                found[key] = Tensor(key, dtype, size, padded)
                self._places[key] = (theirs, row)
        return list(found.values())

    def parts(self, key: str) -> Iterator[Part]:
        """Yield a tensor's numbers, chunk by chunk. Raises ``BadCheckpoint``."""
        theirs, row = self._places[key]
        shape = self._by_key[key].global_shape
        for offset, data in self._read(theirs, row):
            part = stripped_part(Part(key=key, offset=offset, data=bits_of_tensor(data)), shape)
            if part.data.size:
                yield part
        if key.startswith("weight/") and not self._weights_only:
            self._suspect(key.partition("/")[2], theirs, row)

    def complaint(self) -> str | None:
        """Say in one sentence what is wrong with what was converted, or ``None``."""
        if not self.suspects:
            return None
        return (
            f"{self._folder}: the main values of {self.suspects[0]} are not what its weight was cut from; "
            "megatron-core 0.16 writes optimizer state to wrong places where a buffer has several buckets; pass "
            "--weights-only, or save it again with one bucket"
        )

    def _read(self, theirs: str, row: int | None) -> Iterator[tuple[Shape, torch.Tensor]]:
        for chunk in self._theirs[theirs][2]:
            if row is not None and not chunk.offset[0] <= row < chunk.offset[0] + chunk.shape[0]:
                continue
            with chunk.file.open("rb") as file:
                file.seek(chunk.at)
                data = load_torch(io.BytesIO(file.read(chunk.nbytes)), str(chunk.file))
            if not isinstance(data, torch.Tensor) or tuple(data.shape) != chunk.shape:
                raise BadCheckpoint(f"{theirs} in {chunk.file} is no chunk of shape {chunk.shape}, as it should be")
            data = data.detach().contiguous()
            if row is None:
                yield chunk.offset, data
            else:
                yield chunk.offset[1:], data[row - chunk.offset[0]].contiguous()

    def _suspect(self, name: str, theirs: str, row: int | None) -> None:
        """Compare main values with the weight they were cut from: megatron-core 0.16 may have misplaced them."""
        main = next((key for key in self._theirs if _is_main(key, theirs)), None)
        if main is None:
            return
        mains = list(self._read(main, row))
        for offset, weight in self._read(theirs, row):
            for other, values in mains:
                shared = overlap(offset, tuple(weight.shape), other, tuple(values.shape))
                if shared is None:
                    continue
                one, two = (_narrowed(t, o, *shared) for t, o in ((weight, offset), (values, other)))
                if not torch.equal(one, two.to(one.dtype)):
                    self.suspects.append(name)
                    return


def _narrowed(tensor: torch.Tensor, offset: Shape, start: Shape, shape: Shape) -> torch.Tensor:
    for axis, (at, size) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(axis, at - offset[axis], size)
    return tensor


def _is_main(key: str, theirs: str) -> bool:
    match = _OPTIMIZER.fullmatch(key)
    return match is not None and match[1] in _KINDS and match[2] == theirs


def _chunks_of(folder: Path) -> dict[str, tuple[str, Shape, list[_Chunk]]]:
    """Return dtype, shape and chunks of every tensor in the folder."""
    for name in (".metadata", "common.pt"):
        if not (folder / name).is_file():
            raise BadCheckpoint(f"{folder} is no torch_dist checkpoint, it has no {name}; point at an iter_ folder")
    metadata = read_pickle(folder / ".metadata")
    found: dict[str, tuple[str, Shape, list[_Chunk]]] = {}
    for key, about in metadata.state_dict_metadata.items():
        if hasattr(about, "chunks"):
            dtype = str(about.properties.dtype).removeprefix("torch.")
            found[key] = (dtype, tuple(about.size), [])
    sizes = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, about in metadata.state_dict_metadata.items()
        for chunk in getattr(about, "chunks", ())
    }
    for index, place in metadata.storage_data.items():
        if index.fqn in found:
            offset = tuple(index.offset) if index.offset is not None else (0,) * len(found[index.fqn][1])
            file = folder / Path(place.relative_path).name
            chunk = _Chunk(offset, sizes[index.fqn, offset], file, place.offset, place.length)
            found[index.fqn][2].append(chunk)
    return found


def _arguments(common: Mapping[str, Any]) -> dict[str, Any]:
    args = common.get("args")
    found = dict(vars(args)) if hasattr(args, "__dict__") else dict(args) if isinstance(args, Mapping) else {}
    if "swiglu" in found:
        found["gated_linear_unit"] = found["swiglu"]
    if found.get("group_query_attention") is False:
        found["num_query_groups"] = found.get("num_attention_heads")
    return found


def _meta(common: Mapping[str, Any], folder: Path, step: int | None, consumed_samples: int | None) -> Meta:
    from resharding import megatron

    named = re.fullmatch(r"iter_(\d+)", folder.name)
    if step is None:
        step = common.get("iteration", int(named[1]) if named else None)
    if consumed_samples is None:
        consumed_samples = _arguments(common).get("consumed_train_samples", common.get("consumed_samples"))
    for option, value in (("--step", step), ("--consumed-samples", consumed_samples)):
        if not isinstance(value, int):
            raise BadCheckpoint(f"{folder} does not say what {option} is; pass it")
    groups: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for group in _groups(common.get("optimizer", {})):
        if "wd_mult" in group:
            name = megatron._group_name(group)
            fields = {field: group[field] for field in megatron.SCHEDULED_FIELDS if field in group}
            groups[name] = {**fields, "step": float(group.get("step", step))}
            settings[name] = {key: value for key, value in group.items() if key not in ("params", "step")}
    assert isinstance(step, int)
    assert isinstance(consumed_samples, int)
    return Meta(
        step=step, consumed_samples=consumed_samples,
        optimizer={"groups": groups, "grad_scaler": {}, "settings": settings},
        scheduler=_plain(common.get("opt_param_scheduler", common.get("scheduler"))),
        origin={"source": "megatron torch_dist", "folder": str(folder)},
    )  # fmt: skip


def _groups(tree: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name == "param_groups" and isinstance(value, Sequence):
                yield from (group for group in value if isinstance(group, Mapping))
            else:
                yield from _groups(value)


def _plain(value: Any) -> Any:
    """Return a scheduler's state as JSON, or ``None`` if it is something else."""
    plain = (bool, int, float, str, type(None))
    if isinstance(value, Mapping) and all(isinstance(each, plain) for each in value.values()):
        return dict(value)
    return None


def fused_by_config(tensors: Sequence[Tensor], model: Mapping[str, Any]) -> dict[str, Fused]:
    """Return the parts of fused tensors as far as a model's configuration tells them; others stay whole."""
    heads = model.get("num_attention_heads")
    groups = model.get("num_query_groups") or heads
    head_dim = model.get("kv_channels")
    if head_dim is None and heads and "hidden_size" in model:
        head_dim = model["hidden_size"] // heads
    gated = bool(model.get("gated_linear_unit"))
    found: dict[str, Fused] = {}
    for tensor in tensors:
        kind, _, name = tensor.key.partition("/")
        shape = tensor.global_shape
        if kind != "weight":
            continue
        names = [name]
        if ".experts." in name and len(shape) in (2, 3):
            found[name] = experts(name, shape[0])
            names, shape = [part for part, _ in found[name].parts], shape[1:]
        if re.search(r"\.linear_qkv\.(weight|bias)$", name) and heads and groups and head_dim:
            spec = query_key_value(
                name, heads=heads, groups=groups, head_dim=head_dim, gated=bool(model.get("attention_output_gate"))
            )
            if shape[0] == spec.rows:
                found[name] = spec
        elif gated and re.search(r"\.linear_fc1\.(weight|bias)$", name) and shape[0] % 2 == 0:
            found.update({each: gate_up(each, shape[0] // 2) for each in names})
    return found


