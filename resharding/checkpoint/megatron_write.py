"""A checkpoint of ours written as Megatron's ``torch_dist`` (``fully_reshardable``), for Megatron to load.

One tensor of a layer is in memory at a time. The folder appears under its name only when it is whole.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from resharding.checkpoint import folder as folders
from resharding.checkpoint.files import bits_of
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.opened import Checkpoint
from resharding.listing import Tensor

_DATA_FILE = "__0_0.distcp"
_KINDS = {"main": "param"}
_LAYER = re.compile(r"(.*\.layers)\.(\d+)\.(.*)")


def write_megatron(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    expert_parallel: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write ``folder``, which must not exist.

    ``expert_parallel``: for a job with ep above 1, whose experts have an optimizer of their own.

    Raises ``BadCheckpoint`` for what such a folder cannot say, and ``OSError``.
    """
    if folder.exists():
        raise BadCheckpoint(f"{folder} exists; name a folder that does not")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{folders.fresh_nonce()}.tmp")
    temporary.mkdir()
    try:
        _write(checkpoint, temporary, expert_parallel=expert_parallel, progress=progress)
        folders.sync_folder(temporary)
        temporary.rename(folder)
        folders.sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write(checkpoint: Checkpoint, folder: Path, *, expert_parallel: bool, progress: Callable[[int], None]) -> None:
    stacked: dict[str, dict[int | None, Tensor]] = {}
    for theirs, row, tensor in _named(checkpoint.index.whole, expert_parallel=expert_parallel):
        stacked.setdefault(theirs, {})[row] = tensor
    about: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with (folder / _DATA_FILE).open("wb") as file:
        for theirs, rows in stacked.items():
            first = next(iter(rows.values()))
            if None not in rows and sorted(rows, key=lambda row: row or 0) != list(range(len(rows))):
                raise BadCheckpoint(f"{theirs} has layers {sorted(map(str, rows))}; Megatron wants all from 0 on")
            chunks = []
            for row, tensor in rows.items():
                if (tensor.dtype, tensor.global_shape) != (first.dtype, first.global_shape):
                    raise BadCheckpoint(f"{tensor.key} is not shaped as {first.key}, and Megatron stacks layers")
                lead = () if row is None else (row,)
                offset = (*lead, *(0 for _ in tensor.global_shape))
                size = (*(1 for _ in lead), *tensor.global_shape)
                where = MetadataIndex(theirs, torch.Size(offset))
                places[where] = _append(file, read_tensor(checkpoint, tensor).reshape(size))
                chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
                progress(int(np.prod(size)) * first_itemsize(tensor))
            shape = first.global_shape if None in rows else (len(rows), *first.global_shape)
            properties = TensorProperties(dtype=getattr(torch, first.dtype))
            about[theirs] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        for name in _extra_states(stacked):
            about[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _append(file, [None])
        _sync(file)
    with (folder / ".metadata").open("wb") as out:
        pickle.dump(Metadata(state_dict_metadata=about, storage_data=places), out)
        _sync(out)
    with (folder / "common.pt").open("wb") as out:
        torch.save(_common(checkpoint, expert_parallel=expert_parallel), out)
        _sync(out)
    backends = {
        "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
        "common_backend_version": 1,
    }  # fmt: skip
    folders.write_synced(folder / "metadata.json", json.dumps(backends).encode())


def first_itemsize(tensor: Tensor) -> int:
    """Return the bytes of an element."""
    return bits_of(tensor.dtype).itemsize


def read_tensor(checkpoint: Checkpoint, tensor: Tensor) -> torch.Tensor:
    """Read a whole tensor, fused parts put together."""
    bits = np.empty(tensor.global_shape, dtype=bits_of(tensor.dtype))
    checkpoint.read(tensor.key, (0,) * bits.ndim, bits)
    flat = torch.from_numpy(bits.reshape(-1).view(np.uint8))
    return flat.view(getattr(torch, tensor.dtype)).reshape(tensor.global_shape)


def _named(whole: Sequence[Tensor], *, expert_parallel: bool) -> Iterator[tuple[str, int | None, Tensor]]:
    """Yield their key, the layer in it, and our tensor. fp32 weights are main parameters as well."""
    trained = {tensor.key.partition("/")[2] for tensor in whole if tensor.key.startswith("exp_avg/")}
    mains = {tensor.key.partition("/")[2] for tensor in whole if tensor.key.startswith("main/")}
    for tensor in whole:
        kind, _, name = tensor.key.partition("/")
        if kind == "rng":
            continue
        layer = _LAYER.fullmatch(name)
        theirs, row = (f"{layer[1]}.{layer[3]}", int(layer[2])) if layer else (name, None)
        chain = f"chained_{int('.experts.' in name and '.shared_experts.' not in name)}." if expert_parallel else ""
        if kind == "weight":
            yield theirs, row, tensor
            if name not in trained or name in mains:
                continue
            kind = "main"
        yield f"{chain}optimizer.state.{_KINDS.get(kind, kind)}.{theirs}", row, tensor


def _extra_states(stacked: Mapping[str, Mapping[int | None, Tensor]]) -> Iterator[str]:
    """Yield the keys under which Megatron expects the extra state of linear layers, empty without FP8."""
    for theirs, rows in stacked.items():
        match = re.fullmatch(r"(?!.*optimizer\.state)(.*\.linear_[a-z0-9_]+)\.weight", theirs)
        if match is None:
            continue
        first = next(iter(rows.values()))
        spans = [] if None in rows else [len(rows)]
        if ".experts." in theirs and ".shared_experts." not in theirs:
            spans.append(first.global_shape[0])
        for place in np.ndindex(*spans):
            where, size = ".".join(map(str, place)), ".".join(map(str, spans))
            yield f"{match[1]}._extra_state/shard_{where}_{size}"


def _append(file: Any, value: Any) -> _StorageInfo:
    at = file.tell()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    file.write(buffer.getbuffer())
    return _StorageInfo(_DATA_FILE, at, file.tell() - at)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _common(checkpoint: Checkpoint, *, expert_parallel: bool) -> dict[str, Any]:
    """Return what Megatron keeps beside tensors. Raises ``BadCheckpoint`` where settings of groups are missing."""
    meta = checkpoint.index.meta
    settings = meta.optimizer.get("settings", {})
    groups = []
    for name, fields in meta.optimizer["groups"].items():
        if name not in settings:
            raise BadCheckpoint(f"{checkpoint.folder} does not have the settings of parameter group {name}")
        if "wd_mult" not in settings[name]:
            raise BadCheckpoint(
                f"{checkpoint.folder} has parameter group {name} of another framework; convert it with 'groups' in "
                "--patterns, which says how Megatron knows it"
            )
        kept = {key: value for key, value in settings[name].items() if key != "parameters"}
        restored = {key: tuple(v) if isinstance(v, list) else v for key, v in kept.items()}
        groups.append({**restored, **fields})
    state = {"param_state_sharding_type": "fully_reshardable"}
    if expert_parallel:
        dense = [group for group in groups if not group.get("is_expert_parallel")]
        own = [group for group in groups if group.get("is_expert_parallel")]
        own = own or [{**group, "is_expert_parallel": True} for group in dense]
        optimizer: Any = {i: {**state, "optimizer": {"param_groups": g}} for i, g in enumerate((dense, own))}
    else:
        plain = [group for group in groups if not group.get("is_expert_parallel")]
        optimizer = {**state, "optimizer": {"param_groups": plain}}
    return {
        "iteration": meta.step, "checkpoint_version": 3.0, "consumed_samples": meta.consumed_samples,
        "optimizer": optimizer, "opt_param_scheduler": meta.scheduler, "scheduler": meta.scheduler,
    }  # fmt: skip
