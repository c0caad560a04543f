"""Give back memory that lies within a larger storage, on the CPU.

A model's parameters and an optimizer's state lie in few large buffers, so a layer has no storage of its own that
could be freed. Its pages can.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from resharding.boxes import Holding


class PageReturner:
    """Gives a holding's pages back to the operating system as soon as everything on them is released.

    What was on a released page reads as zero afterwards, and the page can be written again at any time. Only what
    lies on the CPU is given back. Pieces that are strided and lie interleaved, as the experts of a rank in one
    tensor do, go together with the last of them, if they fill the stretch they lie in.
    """

    def __init__(self, holding: Holding) -> None:
        self._views = [piece.view() for piece in holding.pieces]
        self._stretches: dict[int, _Stretch] = {}
        """by piece, of those that are not released by themselves"""
        for stretch in _stretches(self._views):
            if len(stretch.left) > 1 or not self._views[next(iter(stretch.left))].is_contiguous():
                self._stretches |= dict.fromkeys(stretch.left, stretch)
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self.num_bytes = 0
        """given back so far"""

    def piece(self, index: int) -> None:
        """Release a piece of the holding. Raises ``OSError`` if the system refuses."""
        stretch = self._stretches.get(index)
        if stretch is None:
            self.tensor(self._views[index])
            return
        stretch.left.discard(index)
        if not stretch.left and stretch.num_bytes == stretch.end - stretch.start:
            self._release(stretch.start, stretch.end)

    def tensor(self, tensor: torch.Tensor) -> None:
        """Release a contiguous tensor's elements. Raises ``OSError`` if the system refuses."""
        if tensor.device.type == "cpu" and tensor.numel():
            assert tensor.is_contiguous()
            self._release(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)

    def _release(self, start: int, end: int) -> None:
        low, high = start, end
        before, after = self._ends.pop(start, None), self._starts.pop(end, None)
        if before is not None:
            low = before
            del self._starts[before]
        if after is not None:
            high = after
            del self._ends[after]
        self._starts[low], self._ends[high] = high, low
        # pages that this completes: those within the joined stretch that it touches
        first = max(_up(low), start // mmap.PAGESIZE * mmap.PAGESIZE)
        last = min(high // mmap.PAGESIZE * mmap.PAGESIZE, _up(end))
        if first < last:
            _give_back(first, last)
            self.num_bytes += last - first


def let_go(mapped: torch.Tensor) -> None:
    """Take the storage of a tensor out of memory that is a file's, mapped for itself alone and never written to.

    It is read from the file again when it is used. Raises ``OSError`` if the system refuses.
    """
    storage = mapped.untyped_storage()
    if storage.nbytes():
        # whole pages, also those it shares with its neighbours in the file: nothing is lost
        _give_back(_up(storage.data_ptr() + 1) - mmap.PAGESIZE, _up(storage.data_ptr() + storage.nbytes()))


def _give_back(first: int, last: int) -> None:
    """Give back the pages from one address up to another."""
    if _madvise()(first, last - first, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"memory of {last - first} bytes could not be given back")


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


@dataclass
class _Stretch:
    """Memory from the first to the last byte of pieces that lie in each other."""

    start: int
    end: int
    num_bytes: int
    """of the pieces"""
    left: set[int]
    """pieces that are not released yet"""


def _stretches(views: Sequence[torch.Tensor]) -> list[_Stretch]:
    """Return the stretches of memory that tensors on the CPU take, those that overlap as one."""
    spans = []
    for index, view in enumerate(views):
        if view.numel() and view.device.type == "cpu":
            extent = 1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
            spans.append((view.data_ptr(), view.data_ptr() + extent * view.element_size(), index))
    found: list[_Stretch] = []
    for start, end, index in sorted(spans):
        if not found or start >= found[-1].end:
            found.append(_Stretch(start, end, 0, set()))
        found[-1].end = max(found[-1].end, end)
        found[-1].num_bytes += views[index].nbytes
        found[-1].left.add(index)
    return found


def is_disjoint(holding: Holding) -> bool:
    """Whether no element of a holding belongs to two pieces: only then can pieces be released one by one.

    Pieces that are strided may lie interleaved with each other; that none of their elements is another's too is
    taken from their number.
    """
    views = [piece.view() for piece in holding.pieces]
    return all(
        stretch.num_bytes <= stretch.end - stretch.start
        and (len(stretch.left) == 1 or not any(views[index].is_contiguous() for index in stretch.left))
        for stretch in _stretches(views)
    )


def _up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
