"""From another holder's files to a checkpoint of ours: one piece in memory at a time, and it can be taken up again.

A ``Source`` says which whole tensors it has and yields their pieces; where it keeps a tensor in one piece, that piece
is the most that is in memory. What is done is noted in the temporary folder once it is on disk, so that a conversion
that was interrupted goes on where it was. That folder's name says from which files it is, and how they were read:
what one source had is never taken for another's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from resharding.assign import natural
from resharding.checkpoint import folder as folders
from resharding.checkpoint.files import Files
from resharding.checkpoint.format import INDEX_NAME, BadCheckpoint, Index, Meta
from resharding.checkpoint.fused import Fused
from resharding.checkpoint.parts import Part, add_sums, sums_of
from resharding.checkpoint.writer import design
from resharding.listing import Tensor

JOURNAL = ".done.jsonl"
SYNC_BYTES = 256 * 2**20
"""what is done is noted about this often"""


class Source(Protocol):
    """Another holder of whole tensors."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Every whole tensor it has."""

    @property
    def meta(self) -> Meta:
        """What it says of itself."""

    @property
    def mark(self) -> str:
        """Tells it from every other source, and from itself read in another way; see ``mark_of``."""

    @property
    def fused(self) -> Mapping[str, Fused]:
        """Which tensors are to be parted."""

    def parts(self, key: str) -> Iterator[Part]:
        """Yield a tensor's numbers, each element once. Raises ``BadCheckpoint``."""

    def complaint(self) -> str | None:
        """Say in one sentence why what was read must not be used, or ``None``."""


@dataclass
class Converted:
    """What a conversion did."""

    path: Path
    num_resumed: int
    """tensors that an earlier attempt had done"""


def convert(source: Source, root: Path, *, progress: Callable[[int], None] = lambda _: None) -> Converted:
    """Write a checkpoint with everything of ``source`` into the folder ``root``; ``progress`` is told bytes done.

    Raises ``BadCheckpoint`` for what is wrong with the source, or where ``root`` has a checkpoint of this step, and
    ``OSError``.
    """
    plan = design(source.tensors, source.fused)
    _refuse_existing(root, source.meta.step)
    temporary = root / folders.conversion_name(source.meta.step, _fingerprint(plan.index, source.mark))
    temporary.mkdir(parents=True, exist_ok=True)
    with _journal(temporary / JOURNAL) as journal:
        done = _read_journal(journal)
        num_resumed = len(done)
        with Files(temporary, writing=True) as files:
            if not done:
                sizes = {file.name: file.nbytes for file in plan.index.files}
                for name, header in plan.headers.items():
                    files.create(name, header, sizes[name])
            _convert(source, plan.index, files, journal, done=done, progress=progress)
        totals = add_sums(list(done.values()))
        entries = tuple(replace(entry, digest=totals[entry.key][0]) for entry in plan.index.entries)
        index = replace(plan.index, entries=entries, meta=source.meta)
        folders.write_synced(temporary / INDEX_NAME, index.encode())
        _refuse_existing(root, source.meta.step)
        (temporary / JOURNAL).unlink()
        path = folders.publish(root, temporary, source.meta.step)
    return Converted(path=path, num_resumed=num_resumed)


def _convert(
    source: Source,
    index: Index,
    files: Files,
    journal: IO[str],
    *,
    done: dict[str, dict[str, tuple[int, int]]],
    progress: Callable[[int], None],
) -> None:
    """Write every tensor that is not ``done``, and add it there. Raises ``BadCheckpoint`` and ``OSError``."""
    pending: list[str] = []
    filled = 0
    for tensor in sorted(index.whole, key=lambda tensor: natural(tensor.key)):
        nbytes = sum(entry.nbytes for entry in index.entries_of(tensor.key))
        if tensor.key not in done:
            found = sums_of(index, source.parts(tensor.key), sink=files.write)
            _check_whole(index, tensor.key, found)
            if (reason := source.complaint()) is not None:
                shutil.rmtree(Path(journal.name).parent)
                raise BadCheckpoint(reason)
            done[tensor.key] = found
            pending.append(json.dumps([tensor.key, found]))
            filled += nbytes
            if filled >= SYNC_BYTES:
                _note(files, journal, pending)
                filled = 0
        progress(nbytes)
    _note(files, journal, pending)


def _refuse_existing(root: Path, step: int) -> None:
    path = dict(folders.complete_in(root)).get(step)
    if path is not None:
        raise BadCheckpoint(f"{path} exists; name another folder, or remove it")


def _note(files: Files, journal: IO[str], pending: list[str]) -> None:
    files.sync()
    journal.writelines(f"{line}\n" for line in pending)
    journal.flush()
    pending.clear()


@contextlib.contextmanager
def _journal(path: Path) -> Iterator[IO[str]]:
    """Open the journal for this process alone. Raises ``BadCheckpoint`` where another one has it."""
    with path.open("a+") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadCheckpoint(f"another process converts into {path.parent}; wait until it has ended") from None
        yield journal


def _read_journal(journal: IO[str]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the sums of every tensor that is done; a line that was being written counts for nothing, and goes."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    journal.seek(0)
    lines = journal.read().splitlines(keepends=True)
    for line in lines:
        if line.endswith("\n"):
            key, sums = json.loads(line)
            found[key] = {entry: (row[0], row[1]) for entry, row in sums.items()}
    journal.truncate(sum(len(line.encode()) for line in lines if line.endswith("\n")))
    return found


def _check_whole(index: Index, key: str, found: Mapping[str, tuple[int, int]]) -> None:
    for entry in index.entries_of(key):
        nbytes = found.get(entry.key, (0, 0))[1]
        if nbytes != entry.nbytes:
            raise BadCheckpoint(f"{entry.key} has {entry.nbytes} bytes, and the source has {nbytes} of them")


def _fingerprint(index: Index, mark: str) -> str:
    text = json.dumps([mark, *([entry.key, entry.dtype, entry.shape, entry.file] for entry in index.entries)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def mark_of(folder: Path, **told: Any) -> str:
    """Return a word for a source's files, by their place, size and time of change, and for what was told of them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    rows = [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    text = json.dumps([str(folder.resolve()), rows, told], sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stripped_part(part: Part, shape: Sequence[int]) -> Part:
    """Return what of a part lies within a tensor of ``shape``: padding at the end of the first axis goes."""
    if not part.data.ndim:
        return part
    keep = max(0, min(part.data.shape[0], shape[0] - part.offset[0]))
    return replace(part, data=part.data[:keep])
