"""The index of a checkpoint: what lies in it, and every check of it. JSON; needs no torch.

A folder holds ``index.json`` and data files. The index is ``{"index": {...}, "digest": "..."}``, the digest being
blake2b of the inner object's canonical JSON. Data files are safetensors files that any tool opens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from resharding.boxes import DTYPE_SIZES_BYTES, Box, Shape, read_shape
from resharding.checkpoint.fused import Fused, fused_of, part_key, read_fused
from resharding.listing import Tensor

FORMAT = "liverun-checkpoint"
VERSION = 1
"""of the format; one that is larger is refused"""
INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 2**30


class BadCheckpoint(ValueError):  # noqa: N818 - reads as what it is
    """A folder that is no whole checkpoint; the message names the file or the tensor and says what to do."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A whole tensor in a data file."""

    key: str
    """kind and canonical name: ``exp_avg/decoder.layers.3.mlp.linear_fc2.weight``"""
    dtype: str
    shape: Shape
    file: str
    begin: int
    """its first byte in the file"""
    digest: int | None = None
    """see ``sums``; none only while it is being written"""
    padded: bool = False
    """the first axis may end in rows that mean nothing, as many as the layout it came from asked for"""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_SIZES_BYTES[self.dtype]

    @property
    def kind(self) -> str:
        """``weight``, ``main``, ``exp_avg``, …, ``rng``."""
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.key.partition("/")[2]


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One safetensors file."""

    name: str
    nbytes: int
    header_digest: str
    """blake2b of everything before the first tensor"""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What a checkpoint says of itself besides its tensors. JSON values only."""

    step: int
    """steps that were completed"""
    consumed_samples: int
    scheduler: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"groups": {}, "grad_scaler": {}})
    """step, lr and weight decay of every parameter group, by the group's settings; the grad scaler"""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """where it came from: layout, world size, versions; nothing depends on it"""


@dataclass(frozen=True)
class Place:
    """Elements of a box, and where in one entry they lie."""

    entry: Entry
    offset: Shape
    """in the entry's tensor"""
    entry_shape: Shape
    """their extent there"""
    start: Shape
    """in the box"""
    shape: Shape
    """their extent there; axes of size 1 that the entry lacks are the only difference"""


@dataclass(frozen=True, kw_only=True)
class Index:
    """Everything about a checkpoint but the numbers in it."""

    meta: Meta
    entries: tuple[Entry, ...]
    files: tuple[DataFile, ...]
    fused: Mapping[str, Fused] = field(default_factory=dict)
    """tensors that lie here as parts, by name without kind; see ``fused``"""
    whole: tuple[Tensor, ...] = ()
    """every tensor as layouts know it, fused ones in one piece"""

    @functools.cached_property
    def by_key(self) -> dict[str, Entry]:
        """Every entry by its key."""
        return {entry.key: entry for entry in self.entries}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    def boxes(self) -> list[Box]:
        """Return one box for every whole tensor: the checkpoint as a holder of boxes."""
        return [
            Box(t.key, t.dtype, t.global_shape, (0,) * len(t.global_shape), t.global_shape, t.padded)
            for t in self.whole
        ]

    def entries_of(self, key: str) -> list[Entry]:
        """Return the entries that a whole tensor lies in, part by part."""
        spec = fused_of(key, self.fused)
        if spec is None:
            return [self.by_key[key]]
        return [entry for name, _ in spec.parts for entry in self.entries_of(part_key(key, name))]

    def first_entry(self, key: str) -> Entry:
        """Return the entry in which the first element of the whole tensor ``key`` lies."""
        while (spec := fused_of(key, self.fused)) is not None:
            key = part_key(key, spec.parts[0][0])
        return self.by_key[key]

    def places(self, key: str, offset: Shape, shape: Shape) -> Iterator[Place]:
        """Yield where the box at ``offset`` of the whole tensor ``key`` lies in files, part by part."""
        spec = fused_of(key, self.fused)
        if spec is None:
            yield Place(self.by_key[key], offset, shape, (0,) * len(shape), shape)
            return
        axis = spec.axis
        for part in spec.slices(offset, shape):
            lost = (1,) if spec.squeeze else ()
            inner = (*part.shape[:axis], *part.shape[axis + len(lost) :])
            for place in self.places(part_key(key, spec.parts[part.part][0]), part.offset, inner):
                start = (*place.start[:axis], *(0 for _ in lost), *place.start[axis:])
                size = (*place.shape[:axis], *lost, *place.shape[axis:])
                start = tuple(a + b for a, b in zip(part.start, start, strict=True))
                yield Place(place.entry, place.offset, place.entry_shape, start, size)

    def encode(self) -> bytes:
        """Return the text of ``index.json``."""
        body = {
            "format": FORMAT, "version": VERSION,
            "meta": {name: getattr(self.meta, name) for name in Meta.__dataclass_fields__},
            "files": [[file.name, file.nbytes, file.header_digest] for file in self.files],
            "tensors": [
                {
                    "key": entry.key, "dtype": entry.dtype, "shape": entry.shape, "file": entry.file,
                    "begin": entry.begin, "digest": f"{entry.digest or 0:016x}", "padded": entry.padded,
                }
                for entry in self.entries
            ],
            "fused": {name: fused.as_json() for name, fused in self.fused.items()},
            "whole": [[t.key, t.dtype, t.global_shape, t.padded] for t in self.whole],
        }  # fmt: skip
        return (json.dumps({"index": body, "digest": _digest(body)}, separators=(",", ":")) + "\n").encode()


def _digest(body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def decode_index(text: bytes, where: str) -> Index:
    """Read ``Index.encode``; the text is not trusted. Raises ``BadCheckpoint``, naming ``where``."""
    try:
        message = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadCheckpoint(f"{where} is damaged, it is not JSON ({error}); use another checkpoint") from None
    body = message.get("index") if isinstance(message, dict) else None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BadCheckpoint(f"{where} is not the index of a liverun checkpoint; point at a folder that holds one")
    version = body.get("version")
    if type(version) is not int or version > VERSION:
        raise BadCheckpoint(
            f"{where} is of format version {version!r}, and this liverun reads versions up to {VERSION}; "
            "read it with the liverun that wrote it, or a newer one"
        )
    if message.get("digest") != _digest(body):
        raise BadCheckpoint(f"{where} is damaged, its digest does not match; use another checkpoint")
    try:
        return _index(body)
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{where} does not describe a checkpoint: {error}") from None


def _index(body: Mapping[str, Any]) -> Index:
    """Read an index whose digest is right; raises what reading raises."""
    files = tuple(DataFile(name=_file_name(n), nbytes=int(b), header_digest=str(d)) for n, b, d in body["files"])
    sizes = {file.name: file.nbytes for file in files}
    entries = []
    for row in body["tensors"]:
        entry = Entry(
            key=str(row["key"]), dtype=str(row["dtype"]), shape=read_shape(row["shape"]), file=row["file"],
            begin=int(row["begin"]), digest=int(row["digest"], 16), padded=bool(row["padded"]),
        )  # fmt: skip
        if entry.dtype not in DTYPE_SIZES_BYTES or not 0 <= entry.begin <= sizes[entry.file] - entry.nbytes:
            raise ValueError(f"{entry.key} does not lie within {entry.file}")
        entries.append(entry)
    fused = {str(name): read_fused(value) for name, value in body["fused"].items()}
    whole = tuple(Tensor(str(k), str(d), read_shape(s), bool(p)) for k, d, s, p in body["whole"])
    meta = Meta(**{name: body["meta"][name] for name in Meta.__dataclass_fields__})
    index = Index(meta=meta, entries=tuple(entries), files=files, fused=fused, whole=whole)
    wanted = {(key, dtype, shape) for key, dtype, shape, _ in tensors_of(whole, fused)}
    if wanted != {(entry.key, entry.dtype, entry.shape) for entry in entries}:
        raise ValueError("its tensors and their parts do not fit together")
    return index


def _file_name(name: object) -> str:
    if not isinstance(name, str) or PurePosixPath(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{str(name)[:80]!r} is not the name of a file in the folder")
    return name


def tensors_of(whole: Iterable[Tensor], fused: Mapping[str, Fused]) -> list[tuple[str, str, Shape, bool]]:
    """Return ``(key, dtype, shape, padded)`` of every tensor as it lies in files: fused ones part by part.

    Raises ``ValueError`` for a tensor that is not fused as ``fused`` says.
    """
    rows: list[tuple[str, str, Shape, bool]] = []
    for tensor in whole:
        rows.extend(_parts_of((tensor.key, tensor.dtype, tensor.global_shape, tensor.padded), fused))
    return rows


def _parts_of(
    row: tuple[str, str, Shape, bool], fused: Mapping[str, Fused]
) -> Iterator[tuple[str, str, Shape, bool]]:
    key, dtype, shape, padded = row
    spec = fused_of(key, fused)
    if spec is None:
        yield row
        return
    if spec.axis >= len(shape) or shape[spec.axis] != spec.rows:
        raise ValueError(f"{key} of shape {shape} is not made of {spec.rows} rows along axis {spec.axis}, as it says")
    for number, (name, _) in enumerate(spec.parts):
        if name == key.partition("/")[2]:
            raise ValueError(f"{key} is made of itself")
        yield from _parts_of((part_key(key, name), dtype, spec.shape_of(number, shape), padded), fused)
