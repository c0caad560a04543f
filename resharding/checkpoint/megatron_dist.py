"""Megatron's ``torch_dist`` checkpoints as a source, ``fully_reshardable`` or ``dp_reshardable``.

In such a folder ``.metadata`` says which chunk of which tensor lies where in the ``.distcp`` files, and ``common.pt``
has what is no tensor. Layers are a first axis there, and a tensor each here.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from resharding.boxes import DTYPE_SIZES_BYTES, Shape, overlap
from resharding.checkpoint.bits import bits_of_tensor
from resharding.checkpoint.buckets import Buffer, Found, Misfit, buckets_in, locate
from resharding.checkpoint.config import said_of
from resharding.checkpoint.convert import mark_of, stripped_part
from resharding.checkpoint.format import BadCheckpoint, Meta
from resharding.checkpoint.fused import Fused, experts, gate_up, query_key_value
from resharding.checkpoint.parts import Part
from resharding.checkpoint.unpickled import load_torch, read_pickle
from resharding.listing import Tensor

_OPTIMIZER = re.compile(r"(?:optimizer\.)?(?:chained_\d+\.)?optimizer\.state\.([a-z_]+?)\.(.*)")
_KINDS = {"param": "main", "fp32_param": "main"}
_LAYERS = re.compile(r"(.*\.layers)\.(?!\d)(.*)")
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""whose first axis may end in rows that mean nothing"""
_BUCKET = re.compile(r"(?:.*\.)?optimizer\.distributed\.dp_group_idx_\d+\..*")
"""keys of ``dp_reshardable``, which names no parameter"""
_GROUPS = re.compile(r"(?:.*\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/.*")
"""objects with parameter groups, for each model parallel rank"""
BuffersOf = Callable[[Mapping[str, Any]], Sequence[Buffer]]
"""Returns where a model has its parameters in flat buffers, given Megatron's arguments by name.

Raises ``ValueError`` with a sentence.
"""


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
        buffers_of: BuffersOf | None = None,
    ) -> None:
        """Open it. ``model`` has fields of the model's configuration, for the names of fused parts.

        With ``buffers_of`` it may be ``dp_reshardable``: that is asked which parameters there are, in which order.
        Raises ``BadCheckpoint``, also for what has to be told and is not.
        """
        self._folder = folder
        self.mark = mark_of(folder, model=model, vocab_size=vocab_size, consumed_samples=consumed_samples)
        self._theirs, objects = _chunks_of(folder)
        common = load_torch(folder / "common.pt", str(folder / "common.pt"))
        arguments = {**_arguments(common), **(model or {})}
        self._founds: dict[str, list[Found]] = {}
        """of parameters whose optimizer state lies in buckets: where"""
        self._kinds: list[str] = []
        """of the tensors of a bucket"""
        self._in_buckets = any(_BUCKET.fullmatch(key) for key in self._theirs)
        if self._in_buckets and not weights_only:
            self._locate(arguments, buffers_of)
        self._places: dict[str, tuple[str, int | None]] = {}
        """of our keys: their key, and the layer in it"""
        self.tensors: Sequence[Tensor] = self._tensors(vocab_size)
        if weights_only:
            self.tensors = [tensor for tensor in self.tensors if tensor.key.startswith("weight/")]
        self._by_key = {tensor.key: tensor for tensor in self.tensors}
        self._weights_only = weights_only
        self.nbytes = sum(math.prod(t.global_shape) * DTYPE_SIZES_BYTES[t.dtype] for t in self.tensors)
        groups = [
            load_torch(io.BytesIO(_bytes(place)), key) for key, place in objects.items() if _GROUPS.fullmatch(key)
        ]
        meta = _meta(common, groups or common.get("optimizer", {}), folder, step, consumed_samples)
        self.meta = replace(meta, origin={**meta.origin, "model": said_of(arguments)})
        self.fused = fused_by_config(self.tensors, arguments)
        self.suspects: list[str] = []
        """parameters whose main values are not what the weights were cut from; found while converting"""

    def _locate(self, arguments: Mapping[str, Any], buffers_of: BuffersOf | None) -> None:
        """Find every parameter's optimizer state in the buckets. Raises ``BadCheckpoint``."""
        about = f"{self._folder} is dp_reshardable, which does not name the parameters of its optimizer"
        if buffers_of is None:
            raise BadCheckpoint(f"{about}; convert it with the command, or with --weights-only")
        plain = (bool, int, float, str, list)
        said = {name: value for name, value in arguments.items() if isinstance(value, plain)}
        try:
            buffers = buffers_of(said | self._seen())
        except ValueError as error:
            raise BadCheckpoint(
                f"{about}, and {error}; write it into the JSON of --model-config under Megatron's name for the "
                "argument, or pass --weights-only"
            ) from None
        try:
            self._compare_shapes(buffers)
            buckets, self._kinds = buckets_in({key: math.prod(row[1]) for key, row in self._theirs.items()})
            self._founds = locate(buffers, buckets)
        except Misfit as error:
            raise BadCheckpoint(
                f"{about}, and it was not written with this model configuration and layout: {error}; correct "
                "--model-config"
            ) from None

    def _seen(self) -> dict[str, Any]:
        """Return arguments of the model that the tensors tell."""
        positions = self._theirs.get("embedding.position_embeddings.weight")
        found: dict[str, Any] = {
            "untie_embeddings_and_output_weights": "output_layer.weight" in self._theirs,
            "position_embedding_type": "rope" if positions is None else "learned_absolute",
        }
        if positions is not None:
            found["max_position_embeddings"] = positions[1][0]
        if (vocabulary := self._theirs.get("embedding.word_embeddings.weight")) is not None:
            found["padded_vocab_size"] = vocabulary[1][0]
            found |= {"bf16": vocabulary[0] == "bfloat16", "fp16": vocabulary[0] == "float16"}
        return found

    def _compare_shapes(self, buffers: Sequence[Buffer]) -> None:
        """Raise ``Misfit`` unless every parameter of the model is a weight here, of the same shape."""
        shapes: dict[str, Shape] = {}
        for theirs, (_, shape, _) in self._theirs.items():
            if not _BUCKET.fullmatch(theirs):
                shapes.update(_by_layer(theirs, shape))
        for parameter in itertools.chain.from_iterable(buffer.parameters for buffer in buffers):
            for stretch in parameter.stretches:
                if stretch.name not in shapes:
                    raise Misfit(f"it has no {stretch.name}, and the model has")
                if (shape := shapes[stretch.name]) != stretch.global_shape:
                    raise Misfit(f"{stretch.name} is of shape {shape}, and the model's of {stretch.global_shape}")

    def _tensors(self, vocab_size: int | None) -> list[Tensor]:
        found: dict[str, Tensor] = {}
        for theirs, (dtype, shape, _) in self._theirs.items():
            if _BUCKET.fullmatch(theirs):
                continue
            match = _OPTIMIZER.fullmatch(theirs)
            kind, name = (_KINDS.get(match[1], match[1]), match[2]) if match else ("weight", theirs)
            if kind == "main" and self._theirs.get(name, ("",))[0] == "float32":
                continue  # the weight is the main parameter
            padded = name in PADDED
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
        for name, founds in self._founds.items():
            weight = found[f"weight/{name}"]
            for kind in self._kinds:
                key = f"{_KINDS.get(kind, kind)}/{name}"
                if key.startswith("main/") and weight.dtype == "float32":
                    continue
                dtype = self._theirs[founds[0].bucket.key + kind][0]
                found[key] = Tensor(key, dtype, weight.global_shape, weight.padded)
                self._places[key] = (kind, None)
        return list(found.values())

    def parts(self, key: str) -> Iterator[Part]:
        """Yield a tensor's numbers, chunk by chunk. Raises ``BadCheckpoint``."""
        theirs, row = self._places[key]
        shape = self._by_key[key].global_shape
        kind, _, name = key.partition("/")
        pieces = self._read(theirs, row)
        if kind != "weight" and name in self._founds:
            pieces = self._from_buckets(name, theirs)
        for offset, data in pieces:
            part = stripped_part(Part(key=key, offset=offset, data=bits_of_tensor(data)), shape)
            if part.data.size:
                yield part
        if kind == "weight" and not self._weights_only:
            self._suspect(name, theirs, row)

    def complaint(self) -> str | None:
        """Say in one sentence what is wrong with what was converted, or ``None``."""
        if not self.suspects:
            return None
        if self._in_buckets:
            return (
                f"{self._folder}: what the model configuration takes for the main values of {self.suspects[0]} is "
                "not what its weight was cut from; correct --model-config (transformer_impl, how layers go over "
                "stages), or pass --weights-only"
            )
        return (
            f"{self._folder}: the main values of {self.suspects[0]} are not what its weight was cut from; "
            "megatron-core 0.16 writes optimizer state to wrong places where a buffer has several buckets; pass "
            "--weights-only, or save it again with one bucket"
        )

    def _read(self, theirs: str, row: int | None) -> Iterator[tuple[Shape, torch.Tensor]]:
        for chunk in self._theirs[theirs][2]:
            if row is not None and not chunk.offset[0] <= row < chunk.offset[0] + chunk.shape[0]:
                continue
            data = _data(chunk, theirs)
            if row is None:
                yield chunk.offset, data
            else:
                yield chunk.offset[1:], data[row - chunk.offset[0]].contiguous()

    def _from_buckets(self, name: str, kind: str) -> Iterator[tuple[Shape, torch.Tensor]]:
        """Yield a parameter's numbers of a kind, box by box of the ranks that had it."""
        for found in self._founds[name]:
            theirs = found.bucket.key + kind
            flat = self._range(theirs, found.start, found.start + found.numel)
            stretch = found.stretch
            yield stretch.offset, flat.as_strided(stretch.shape, stretch.strides, stretch.base).contiguous()

    def _range(self, theirs: str, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of a flat tensor. Raises ``BadCheckpoint`` where some are missing."""
        pieces, at = [], start
        for chunk in sorted(self._theirs[theirs][2], key=lambda chunk: chunk.offset):
            (first,), (size,) = chunk.offset, chunk.shape
            if first <= at < min(first + size, stop):
                piece = _data(chunk, theirs)[at - first : stop - first]
                pieces.append(piece)
                at += piece.numel()
        if at != stop:
            raise BadCheckpoint(f"{self._folder}: elements {at} to {stop} of {theirs} are in no file")
        return torch.cat(pieces)

    def _mains(self, name: str, theirs: str, row: int | None) -> list[tuple[Shape, torch.Tensor]]:
        if name in self._founds:
            return list(self._from_buckets(name, "param")) if "param" in self._kinds else []
        main = next((key for key in self._theirs if _is_main(key, theirs)), None)
        return list(self._read(main, row)) if main is not None else []

    def _suspect(self, name: str, theirs: str, row: int | None) -> None:
        """Compare main values with the weight they were cut from.

        megatron-core 0.16 may have misplaced them, and a model configuration may not be the right one.
        """
        mains = self._mains(name, theirs, row)
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


def _bytes(chunk: _Chunk) -> bytes:
    with chunk.file.open("rb") as file:
        file.seek(chunk.at)
        return file.read(chunk.nbytes)


def _data(chunk: _Chunk, key: str) -> torch.Tensor:
    """Read a chunk of the tensor ``key``. Raises ``BadCheckpoint``."""
    data = load_torch(io.BytesIO(_bytes(chunk)), str(chunk.file))
    if not isinstance(data, torch.Tensor) or tuple(data.shape) != chunk.shape:
        raise BadCheckpoint(f"{key} in {chunk.file} is no chunk of shape {chunk.shape}, as it should be")
    return data.detach().contiguous()


def _by_layer(theirs: str, shape: Shape) -> dict[str, Shape]:
    """Return name and shape of a tensor of theirs as we have it: one for each layer."""
    layered = _LAYERS.fullmatch(theirs)
    if layered is None:
        return {theirs: shape}
    return {f"{layered[1]}.{row}.{layered[2]}": shape[1:] for row in range(shape[0])}


def _chunks_of(folder: Path) -> tuple[dict[str, tuple[str, Shape, list[_Chunk]]], dict[str, _Chunk]]:
    """Return dtype, shape and chunks of every tensor in the folder, and where its objects lie."""
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
    objects: dict[str, _Chunk] = {}
    for index, place in metadata.storage_data.items():
        file = folder / Path(place.relative_path).name
        if index.fqn not in found:
            objects[index.fqn] = _Chunk((), (), file, place.offset, place.length)
        else:
            offset = tuple(index.offset) if index.offset is not None else (0,) * len(found[index.fqn][1])
            chunk = _Chunk(offset, sizes[index.fqn, offset], file, place.offset, place.length)
            found[index.fqn][2].append(chunk)
    return found, objects


def _arguments(common: Mapping[str, Any]) -> dict[str, Any]:
    args = common.get("args")
    found = dict(vars(args)) if hasattr(args, "__dict__") else dict(args) if isinstance(args, Mapping) else {}
    if "swiglu" in found:
        found["gated_linear_unit"] = found["swiglu"]
    if found.get("group_query_attention") is False:
        found["num_query_groups"] = found.get("num_attention_heads")
    return found


def _meta(
    common: Mapping[str, Any], optimizer: Any, folder: Path, step: int | None, consumed_samples: int | None
) -> Meta:
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
    for group in _groups(optimizer):
        if "wd_mult" in group:
            name = megatron.group_name(group)
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
    elif isinstance(tree, list):
        for value in tree:
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


