"""Data files: safetensors headers that follow from the list of tensors alone, and boxes to and from their bytes.

Many ranks write one file at once. Each computes where every tensor lies, and puts the bytes of its boxes there;
nobody waits for anybody. Needs no torch: elements are unsigned integers of their own width.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from resharding.assign import natural
from resharding.boxes import DTYPE_SIZES_BYTES, Shape
from resharding.checkpoint.format import BadCheckpoint, DataFile, Entry
from resharding.checkpoint.sums import BITS, Bits

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
"""element types under safetensors' names"""
MAX_FILE_BYTES = 4 * 2**30
"""a kind's tensors go on in a further file from here"""
STAGING_BYTES = 4 * 2**20
"""read at once where what is wanted lies in short runs"""
_LONG_RUN_BYTES = 64 * 2**10
"""runs of at least this are read one by one, straight to where they belong"""
_SHORT_ROW_BYTES = 64 * 2**10
"""parts of rows up to this long are merged into whole ones where that can be done"""
_PICKED_AT_ONCE = 64 * 2**10
"""elements"""
_HEADER_ALIGN = 8


def lay_out(
    rows: Iterable[tuple[str, str, Shape, bool]],
    max_file_bytes: int = MAX_FILE_BYTES,
    *,
    stem: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[list[Entry], dict[str, bytes]]:
    """Return where every tensor ``(key, dtype, shape, padded)`` goes, and each file's bytes before its first tensor.

    Every kind has files of its own, so that weights can be copied alone, unless all are to begin with ``stem``;
    within one, tensors come in natural order. ``metadata`` is for the tools of others.
    """
    kinds: dict[str, list[tuple[str, str, Shape, bool]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: natural(row[0])):
        kinds[stem or row[0].partition("/")[0]].append(row)
    entries: list[Entry] = []
    headers: dict[str, bytes] = {}
    for kind, members in kinds.items():
        # safetensors wants every tensor at a multiple of its element's size
        members.sort(key=lambda row: -DTYPE_SIZES_BYTES[row[1]])
        for number, group in enumerate(_groups(members, max_file_bytes), start=1):
            name = f"{kind}-{number:05d}.safetensors"
            headers[name], begins = _header(group, metadata)
            entries.extend(
                Entry(key=key, dtype=dtype, shape=shape, file=name, begin=begin, padded=padded)
                for (key, dtype, shape, padded), begin in zip(group, begins, strict=True)
            )
    return entries, headers


def _groups(
    rows: Sequence[tuple[str, str, Shape, bool]], max_file_bytes: int
) -> Iterator[list[tuple[str, str, Shape, bool]]]:
    group: list[tuple[str, str, Shape, bool]] = []
    filled = 0
    for row in rows:
        nbytes = math.prod(row[2]) * DTYPE_SIZES_BYTES[row[1]]
        if group and filled + nbytes > max_file_bytes:
            yield group
            group, filled = [], 0
        group.append(row)
        filled += nbytes
    if group:
        yield group


def _header(
    rows: Sequence[tuple[str, str, Shape, bool]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[int]]:
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at, begins = 0, []
    for key, dtype, shape, _ in rows:
        end = at + math.prod(shape) * DTYPE_SIZES_BYTES[dtype]
        table[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        begins.append(at)
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _HEADER_ALIGN) % _HEADER_ALIGN)
    header = len(text).to_bytes(_HEADER_ALIGN, "little") + text
    return header, [len(header) + begin for begin in begins]


def describe_files(entries: Sequence[Entry], headers: Mapping[str, bytes]) -> tuple[DataFile, ...]:
    """Return size and header digest of every file."""
    sizes = {name: len(header) for name, header in headers.items()}
    for entry in entries:
        sizes[entry.file] += entry.nbytes
    return tuple(
        DataFile(name=name, nbytes=sizes[name], header_digest=header_digest(header))
        for name, header in headers.items()
    )


def header_digest(header: bytes) -> str:
    """Return the digest of the bytes before a file's first tensor."""
    return hashlib.blake2b(header, digest_size=16).hexdigest()


def runs(shape: Shape, offset: Shape, size: Shape) -> tuple[int, list[int]]:
    """Return how the box ``[offset, offset + size)`` lies in a C-contiguous tensor of ``shape``.

    Gives the elements of one contiguous run, and where each begins; in C order of the box.
    """
    axis = next((i for i in reversed(range(len(shape))) if size[i] != shape[i]), 0)
    length = math.prod(size[axis:])
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum(o * s for o, s in zip(offset, strides, strict=True))
    steps = [[i * strides[a] for i in range(size[a])] for a in range(axis)]
    return length, [first + sum(parts) for parts in itertools.product(*steps)]


class Files:
    """The open data files of one folder. Close it, or use it in a ``with``."""

    def __init__(self, folder: Path, *, writing: bool = False, one_disk: bool = False) -> None:
        """Open nothing yet. ``one_disk``: it is on the disk of one machine, all writers are there, and all say so."""
        self._folder = folder
        self._flags = os.O_RDWR | os.O_CREAT if writing else os.O_RDONLY
        self._merging = one_disk
        self._open: dict[str, int] = {}
        self._unsynced: set[str] = set()
        """files written to since they were synced"""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])

    def sync(self) -> None:
        """Wait until the disk has all that was written here before this call. Raises ``OSError``.

        One thread may do so while another writes.
        """
        while self._unsynced:
            os.fsync(self._open[self._unsynced.pop()])

    def create(self, name: str, header: bytes, nbytes: int) -> None:
        """Write a file's header and reserve its space; whoever writes into it need not wait for this.

        Raises ``OSError``, also where the disk has not ``nbytes`` left.
        """
        file = self._file(name)
        self._write_at(name, memoryview(header), 0)
        with contextlib.suppress(NotImplementedError):
            try:
                os.posix_fallocate(file, 0, nbytes)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise
                os.truncate(file, nbytes)

    def write(self, entry: Entry, offset: Shape, data: Bits) -> None:
        """Put ``data``, C-contiguous, where the box at ``offset`` of the tensor belongs. Raises ``OSError``."""
        if not data.size:
            return
        width = data.itemsize
        length, starts = runs(entry.shape, offset, data.shape)
        # all who write parts of a row have to decide alike, so it is the tensor's row that counts, not the run
        short = bool(data.ndim) and length < entry.shape[-1] <= _SHORT_ROW_BYTES // width
        if short and self._merging and self._has_locks(entry.file):
            self._merge(entry, offset[-1], data.reshape(len(starts), length), starts)
            return
        flat = data.reshape(-1).data.cast("B")
        step = length * width
        for number, start in enumerate(starts):
            self._write_at(entry.file, flat[number * step : (number + 1) * step], entry.begin + start * width)

    def _has_locks(self, name: str) -> bool:
        """Tell whether the file system has locks; if it has none, it has none for the others either."""
        try:
            fcntl.lockf(self._file(name), fcntl.LOCK_EX, 1)
            fcntl.lockf(self._file(name), fcntl.LOCK_UN, 1)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._merging = False
        return self._merging

    def _merge(self, entry: Entry, column: int, lines: Bits, starts: Sequence[int]) -> None:
        """Put parts of rows into whole rows, under a lock on their bytes: one write for many short runs.

        Rows that lie behind each other are read, filled in and written back in blocks. A call to the system for every
        run would take three times as long. Others who write into these rows do the same.
        """
        file, width, row = self._file(entry.file), lines.itemsize, entry.shape[-1]
        ends = [*(np.flatnonzero(np.diff(starts) != row) + 1).tolist(), len(starts)]
        height = min(len(starts), max(1, STAGING_BYTES // (row * width)))
        staged = np.empty((height, row), dtype=lines.dtype)
        first = 0
        for end in ends:
            while first < end:
                last = min(first + height, end)
                block = staged[: last - first]
                view, at = block.reshape(-1).data.cast("B"), entry.begin + (starts[first] - column) * width
                fcntl.lockf(file, fcntl.LOCK_EX, view.nbytes, at)
                try:
                    known = _read_known(file, view, at)
                    view[known:] = bytes(view.nbytes - known)  # beyond the end of the file, as yet
                    block[:, column : column + lines.shape[1]] = lines[first:last]
                    self._write_at(entry.file, view, at)
                finally:
                    fcntl.lockf(file, fcntl.LOCK_UN, view.nbytes, at)
                first = last

    def read(self, entry: Entry, offset: Shape, out: Bits) -> None:
        """Fill ``out``, C-contiguous, with the box at ``offset``. Raises ``BadCheckpoint`` for a file cut short."""
        width = out.itemsize
        length, starts = runs(entry.shape, offset, out.shape)
        if not out.size:
            return
        file, step = self._file(entry.file), length * width
        apart = (starts[1] - starts[0]) * width if len(starts) > 1 else step
        if len(starts) == 1 or step >= _LONG_RUN_BYTES or apart > STAGING_BYTES // 4:
            flat = out.reshape(-1).data.cast("B")
            for number, start in enumerate(starts):
                self._read_at(file, flat[number * step : (number + 1) * step], entry, entry.begin + start * width)
            return
        self._read_near(entry, out.reshape(len(starts), length), starts)

    def _read_near(self, entry: Entry, out: Bits, starts: Sequence[int]) -> None:
        """Read runs that lie close together in one go, and pick them out."""
        file, width, length = self._file(entry.file), out.itemsize, out.shape[1]
        where = np.array(starts, dtype=np.int64)
        first = 0
        while first < len(starts):
            limit = starts[first] + STAGING_BYTES // width - length
            last = int(np.searchsorted(where, limit, side="right"))
            last = max(last, first + 1)
            span = starts[last - 1] + length - starts[first]
            staged = np.empty(span, dtype=out.dtype)
            self._read_at(file, staged.data.cast("B"), entry, entry.begin + starts[first] * width)
            step = max(1, _PICKED_AT_ONCE // length)
            for begin in range(first, last, step):  # an index is several times as large as what it picks out
                end = min(begin + step, last)
                index = (where[begin:end] - starts[first])[:, None] + np.arange(length)[None, :]
                np.take(staged, index, out=out[begin:end], mode="clip")  # which needs no copy of ``out``
            first = last

    def header(self, name: str, nbytes: int) -> bytes:
        """Return a file's first ``nbytes``."""
        return os.pread(self._file(name), nbytes, 0)

    def _file(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self._folder / name, self._flags, 0o644)
        return self._open[name]

    def _write_at(self, name: str, data: memoryview, at: int) -> None:
        file = self._file(name)
        while data.nbytes:
            count = os.pwrite(file, data, at)
            data, at = data[count:], at + count
        self._unsynced.add(name)  # not before: a sync may run meanwhile

    def _read_at(self, file: int, into: memoryview, entry: Entry, at: int) -> None:
        while into.nbytes:
            count = os.preadv(file, [into], at)
            if not count:
                raise BadCheckpoint(
                    f"{self._folder / entry.file} is cut short within {entry.key}; use another checkpoint"
                )
            into, at = into[count:], at + count


_NOT_THERE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""a file system that cannot reserve space"""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""a file system without locks"""


def _read_known(file: int, into: memoryview, at: int) -> int:
    """Read as far as a file goes; returns the bytes that there were."""
    done = 0
    while done < into.nbytes and (count := os.preadv(file, [into[done:]], at + done)):
        done += count
    return done


def bits_of(dtype: str) -> np.dtype[Any]:
    """Return the unsigned integer as wide as an element type."""
    return BITS[DTYPE_SIZES_BYTES[dtype]]
