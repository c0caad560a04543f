"""A complete checkpoint, opened: what is wrong with its folder is said here, before a number is read.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from resharding.boxes import Shape
from resharding.checkpoint import folder as folders
from resharding.checkpoint.files import STAGING_BYTES, Files, bits_of, header_digest
from resharding.checkpoint.format import INDEX_NAME, MAX_INDEX_BYTES, BadCheckpoint, Entry, Index, decode_index
from resharding.checkpoint.sums import Bits, digest_of


class Checkpoint:
    """A folder whose index is sound and whose files are as long as it says. Close it, or use it in a ``with``."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        self._files = Files(folder)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a checkpoint, or the newest in a folder of them. Reads the index and the sizes of files.

        Raises ``BadCheckpoint``: for a folder that is none, an index that is damaged or too new, a file that is
        missing or has not its length.
        """
        folder = folders.resolve(path)
        where = folder / INDEX_NAME
        if where.stat().st_size > MAX_INDEX_BYTES:
            raise BadCheckpoint(f"{where} has more than {MAX_INDEX_BYTES} bytes; it is not the index of a checkpoint")
        index = decode_index(where.read_bytes(), str(where))
        for file in index.files:
            try:
                nbytes = (folder / file.name).stat().st_size
            except FileNotFoundError:
                raise BadCheckpoint(f"{folder / file.name} is missing; use another checkpoint") from None
            if nbytes != file.nbytes:
                word = "is cut short" if nbytes < file.nbytes else "is too long"
                raise BadCheckpoint(
                    f"{folder / file.name} {word}, it has {nbytes} bytes in place of {file.nbytes}; "
                    "use another checkpoint"
                )
        return cls(folder, index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its files."""
        self._files.close()

    def read(self, key: str, offset: Shape, out: Bits) -> None:
        """Fill ``out``, C-contiguous, with the box at ``offset`` of the whole tensor ``key``.

        Raises ``BadCheckpoint`` for a file that was cut short since it was opened, ``KeyError`` for an unknown key.
        """
        for place in self.index.places(key, offset, out.shape):
            inside = out[...]
            for axis, (start, size) in enumerate(zip(place.start, place.shape, strict=True)):
                inside = inside[(slice(None),) * axis + (slice(start, start + size),)]
            if inside.flags.c_contiguous:
                self._files.read(place.entry, place.offset, inside.reshape(place.entry_shape))
                continue
            staged = np.empty(place.entry_shape, dtype=out.dtype)
            self._files.read(place.entry, place.offset, staged)
            inside[...] = staged.reshape(place.shape)

    def slabs(self, entry: Entry, most_bytes: int = STAGING_BYTES) -> Iterator[tuple[Shape, Bits]]:
        """Yield an entry's numbers as ``(offset, data)`` of at most ``most_bytes``, in order."""
        dtype = bits_of(entry.dtype)
        for start, size in slabs(entry.shape, max(1, most_bytes // dtype.itemsize)):
            data = np.empty(size, dtype=dtype)
            self._files.read(entry, start, data)
            yield start, data

    def damage(self, entry: Entry) -> str | None:
        """Read a whole tensor and say in one sentence what is wrong with it, or ``None``."""
        try:
            found = sum(digest_of(data, start) for start, data in self.slabs(entry)) % 2**64
        except (BadCheckpoint, OSError) as error:
            return str(error)
        return None if found == entry.digest else damaged(self.folder, entry)

    def damaged_headers(self) -> Iterator[str]:
        """Yield a sentence for every file whose header is not what was written; only other tools read headers."""
        for file in self.index.files:
            first = min(entry.begin for entry in self.index.entries if entry.file == file.name)
            if header_digest(self._files.header(file.name, first)) != file.header_digest:
                yield f"{self.folder / file.name}: its header is damaged; other tools cannot open it"


def damaged(folder: Path, entry: Entry) -> str:
    """Say that a tensor is not what was written."""
    return f"{entry.key} in {folder / entry.file} is damaged, its digest does not match; use another checkpoint"


def slabs(shape: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a box of ``shape`` into ``(start, size)`` of at most ``most`` elements each, in C order."""
    numel = math.prod(shape)
    if numel <= most or not shape:
        yield (0,) * len(shape), shape
        return
    inner = math.prod(shape[1:])
    if inner > most:
        for row in range(shape[0]):
            for start, size in slabs(shape[1:], most):
                yield (row, *start), (1, *size)
        return
    step = max(1, most // inner)
    for row in range(0, shape[0], step):
        yield (row, *(0 for _ in shape[1:])), (min(step, shape[0] - row), *shape[1:])
