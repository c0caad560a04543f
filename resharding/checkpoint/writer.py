"""From the holdings of all ranks to one folder: each box is written once, by one of those who hold it.

Protocol between the ranks of a world, which share nothing here but the folder:

1. Every rank computes the same layout of the files, and from everybody's listing its own share (``share_of``). The
   planner does it: files are one more rank, which holds nothing and needs everything.
2. Every rank copies its share out of the state (``snapshot``): this is all that training waits for.
3. Every rank puts the bytes where they belong in the files of the temporary folder, syncs them, and then says so in a
   small file of its own, with digests of what it wrote (``write_share``). Rank 0 also writes the headers.
4. Rank 0 waits until every rank has said so, adds the digests up, writes the index, and gives the folder its name
   (``commit``). A checkpoint exists from that rename on.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from resharding.boxes import Box, Holding, Shape
from resharding.checkpoint import folder as folders
from resharding.checkpoint.bits import bits_of_tensor, cut_of
from resharding.checkpoint.files import MAX_FILE_BYTES, Files, describe_files, lay_out
from resharding.checkpoint.format import INDEX_NAME, BadCheckpoint, Index, Meta, tensors_of
from resharding.checkpoint.fused import Fused
from resharding.checkpoint.parts import Part, Sums, add_sums, slices_of, sums_of
from resharding.listing import Listing, Tensor
from resharding.plan import Cut, plan_for

POLL_S = 0.005
_LINE_BYTES = 64
"""copies begin at multiples of this"""


@dataclass(frozen=True, kw_only=True)
class Design:
    """What a checkpoint's folder will hold; equal on all ranks."""

    index: Index
    """without digests"""
    headers: Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank writes, as cuts of its own pieces."""

    rank: int
    num_ranks: int
    cuts: tuple[Cut, ...]


def tensors_in(listings: Sequence[Listing], *, vocab_size: int | None = None) -> tuple[Tensor, ...]:
    """Return every tensor that a rank holds a box of. ``vocab_size``: rows beyond it are padding, and left out."""
    found: dict[str, Tensor] = {}
    for block in {id(block): block for listing in listings for block, _ in listing.entries}.values():
        for unit in block.units:
            for tensor in unit:
                found.setdefault(tensor.key, tensor)
    return tuple(_stripped(tensor, vocab_size) for tensor in found.values())


def _stripped(tensor: Tensor, vocab_size: int | None) -> Tensor:
    if vocab_size is None or not tensor.padded or tensor.global_shape[0] <= vocab_size:
        return tensor
    return replace(tensor, global_shape=(vocab_size, *tensor.global_shape[1:]))


def design(
    whole: Sequence[Tensor], fused: Mapping[str, Fused], *, max_file_bytes: int = MAX_FILE_BYTES
) -> Design:
    """Lay out the files for ``whole`` tensors.

    Raises ``ValueError`` for a tensor that is not fused as ``fused`` says.
    """
    used: dict[str, Fused] = {}
    left = [tensor.key.partition("/")[2] for tensor in whole]
    while left:
        name = left.pop()
        if name in fused and name not in used:
            used[name] = fused[name]
            left.extend(part for part, _ in fused[name].parts)
    entries, headers = lay_out(tensors_of(whole, used), max_file_bytes)
    index = Index(
        meta=Meta(step=0, consumed_samples=0), entries=tuple(entries), files=describe_files(entries, headers),
        fused=dict(sorted(used.items())), whole=tuple(sorted(whole, key=lambda tensor: tensor.key)),
    )  # fmt: skip
    return Design(index=index, headers=headers)


def share_of(rank: int, listings: Sequence[Listing], hosts: Sequence[str], whole: Sequence[Tensor]) -> Share:
    """Return which cuts of its pieces ``rank`` writes, or answers for, so that all write each element once.

    ``listings`` and ``hosts`` are indexed by rank. Raises ``Unplannable`` for elements of ``whole`` that no rank has.
    """
    size = len(listings)
    nothing = Listing(())
    boxes = [Box(t.key, t.dtype, t.global_shape, (0,) * len(t.global_shape), t.global_shape, t.padded) for t in whole]
    plan = plan_for(
        rank, [*listings, nothing], [nothing] * size + [Listing.explicit(boxes)], [*hosts, "files"]
    )
    return Share(rank=rank, num_ranks=size, cuts=tuple(send.cut for send in plan.sends))


def snapshot(share: Share, holding: Holding) -> list[Part]:
    """Copy a rank's share to memory of its own, which goes with the parts. Training may go on afterwards."""
    parts = []
    with torch.no_grad():
        live = [cut_of(holding.pieces[cut.piece].view(), cut) for cut in share.cuts]
        room = _Room(sum(_rounded(view.nbytes) for view in live))
        for cut, view in zip(share.cuts, live, strict=True):
            box = holding.pieces[cut.piece].box
            copy = room.empty(view)
            copy.copy_(view)
            parts.append(Part(key=box.key, offset=_global(box, cut), data=bits_of_tensor(copy)))
    return parts


class _Room:
    """Memory for copies in one piece.

    Not of huge pages: a guest may have told its host that blocks of their size are free, and to get one back takes
    ten times as long as to find small ones, which are at hand.
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        self._used = 0

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Return room for a tensor's elements, in C order."""
        found = self._bytes[self._used : self._used + like.nbytes].view(like.dtype).view(like.shape)
        self._used += _rounded(like.nbytes)
        return found


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _LINE_BYTES) * _LINE_BYTES


def live_parts(share: Share, holding: Holding) -> Iterator[Part]:
    """Yield a rank's share as views of the state itself, where it lies on the CPU, else as copies.

    Whoever drops each part before the next has one copy at a time.
    """
    for cut in share.cuts:
        piece = holding.pieces[cut.piece]
        data = bits_of_tensor(cut_of(piece.view(), cut).cpu())
        yield Part(key=piece.box.key, offset=_global(piece.box, cut), data=data)


def _global(box: Box, cut: Cut) -> Shape:
    return tuple(o + s for o, s in zip(box.offset, cut.start, strict=True))


def write_share(
    temporary: Path,
    plan: Design,
    rank: int,
    parts: Sequence[Part],
    small: Mapping[str, Any],
    *,
    one_disk: bool = False,
) -> Sums:
    """Write one rank's share into the temporary folder, and say so there; ``small`` is JSON for ``commit``.

    ``one_disk``: all ranks write to a disk of their one machine, and all say so: short runs are cheaper then.

    Raises ``OSError``; the folder is then of no use.
    """
    temporary.mkdir(parents=True, exist_ok=True)
    with Files(temporary, writing=True, one_disk=one_disk) as files:
        if rank == 0:
            sizes = {file.name: file.nbytes for file in plan.index.files}
            for name, header in plan.headers.items():
                files.create(name, header, sizes[name])
        with _Syncing(files) as syncing:  # the disk works while more is written, and while digests are computed
            for group in _turned(plan.index, rank, parts):
                for part in group:
                    for entry, offset, data in slices_of(plan.index, part):
                        files.write(entry, offset, data)
                syncing.begin()
            found = sums_of(plan.index, parts)
    said = {"sums": {key: list(row) for key, row in found.items()}, "small": small}
    folders.write_whole(temporary / _said_name(rank), json.dumps(said).encode())
    return found


class _Syncing:
    """Syncs files in a thread; an executor refuses to at the interpreter's end, where the last save is written.

    Its ``with`` ends when the disk has all that was written in it, and raises what a sync raised.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="liverun-checkpoint-sync", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._turns.put(kind is None)
        self._turns.put(False)
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def begin(self) -> None:
        """Begin to sync what has been written so far."""
        self._turns.put(True)

    def _run(self) -> None:
        try:
            while self._turns.get():
                self._files.sync()
        except BaseException as error:  # noqa: BLE001 - it is raised where this thread is waited for
            self._error = error


def _turned(index: Index, rank: int, parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts of each file; ranks begin with different ones, as a file lets in one writer at a time."""
    by_file: dict[str, list[Part]] = {file.name: [] for file in index.files}
    for part in parts:
        by_file[index.first_entry(part.key).file].append(part)
    names = list(by_file)
    for number in range(len(names)):
        yield by_file[names[(rank + number) % len(names)]]


def say_failed(temporary: Path, rank: int, reason: str) -> None:
    """Let rank 0 know that a share will not come, as far as the disk allows."""
    with contextlib.suppress(OSError):
        (temporary / _failed_name(rank)).write_text(reason)


def _raise_failure(temporary: Path, num_ranks: int) -> None:
    for rank in range(num_ranks):
        path = temporary / _failed_name(rank)
        if path.exists():
            raise BadCheckpoint(f"rank {rank} could not write its share: {path.read_text() or 'see its log'}")


def _said_name(rank: int) -> str:
    return f".said-{rank}.json"


def _failed_name(rank: int) -> str:
    return f".failed-{rank}"


def commit(
    root: Path,
    temporary: Path,
    plan: Design,
    *,
    num_ranks: int,
    meta_of: Callable[[Sequence[Any]], Meta],
    timeout_s: float,
    keep_last: int | None = None,
    there: Collection[int] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Path:
    """On rank 0: wait for all ranks, write the index, and make the checkpoint exist; returns its folder.

    ``meta_of`` is given what every rank passed as ``small``, in rank order. With ``there``, the steps whose
    checkpoints were complete when the save began, ``latest`` is not taken back from a later step that was saved
    since: by the world after this one, which does not wait for it. Raises ``TimeoutError`` naming a rank
    that has not written its share, ``BadCheckpoint`` if one said that it cannot, or if shares do not make up the
    whole, and ``OSError``.
    """
    deadline = clock() + timeout_s
    said: list[Any] = []
    for rank in range(num_ranks):
        path = temporary / _said_name(rank)
        while not path.exists():
            _raise_failure(temporary, num_ranks)
            if clock() > deadline:
                raise TimeoutError(
                    f"rank {rank} has not written its share to {temporary} within {timeout_s:g} s; is that folder "
                    "the same on every node?"
                )
            time.sleep(POLL_S)  # another process, perhaps on another node: there is no event to wait for
        said.append(json.loads(path.read_bytes()))
    totals = add_sums([{key: (row[0], row[1]) for key, row in part["sums"].items()} for part in said])
    entries = []
    for entry in plan.index.entries:
        digest, nbytes = totals.get(entry.key, (0, 0))
        if nbytes != entry.nbytes:
            raise BadCheckpoint(f"{entry.key} has {entry.nbytes} bytes, and the ranks wrote {nbytes}")
        entries.append(replace(entry, digest=digest))
    meta = meta_of([part["small"] for part in said])
    index = replace(plan.index, entries=tuple(entries), meta=meta)
    folders.write_synced(temporary / INDEX_NAME, index.encode(), with_name=False)
    for rank in range(num_ranks):
        (temporary / _said_name(rank)).unlink()
    since = () if there is None else {step for step, _ in folders.complete_in(root)}.difference(there)
    path = folders.publish(root, temporary, meta.step, is_latest=all(step < meta.step for step in since))
    if keep_last is not None:
        folders.prune(root, keep_last)
    return path
