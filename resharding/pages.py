"""Give back memory that lies within a larger storage, on the CPU.

A model's parameters and an optimizer's state lie in few large buffers, so a layer has no storage of its own that
could be freed. Its pages can.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from resharding.boxes import Holding

_DONTNEED = 4
"""``MADV_DONTNEED`` of Linux"""


class PageReturner:
    """Gives pages back to the operating system as soon as everything on them is released.

    What was on a released page reads as zero afterwards, and the page can be written again at any time.
    """

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.num_bytes = 0
        """given back so far"""

    def release(self, tensor: torch.Tensor) -> None:
        """Release a CPU tensor's elements; of other tensors, and of strided ones, nothing is given back.

        Raises ``OSError`` if the system refuses.
        """
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
            return
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        low, high = start, end
        before, after = self._ends.pop(start, None), self._starts.pop(end, None)
        if before is not None:
            low = before
            del self._starts[before]
        if after is not None:
            high = after
            del self._ends[after]
        self._starts[low], self._ends[high] = high, low
        # pages that this tensor completes: those within the joined stretch that it touches
        first = max(_up(low), start // mmap.PAGESIZE * mmap.PAGESIZE)
        last = min(high // mmap.PAGESIZE * mmap.PAGESIZE, _up(end))
        if first < last:
            if self._madvise(first, last - first, _DONTNEED):
                raise OSError(ctypes.get_errno(), f"memory of {last - first} bytes could not be given back")
            self.num_bytes += last - first


def is_disjoint(holding: Holding) -> bool:
    """Whether no element of a holding belongs to two pieces: only then can pieces be released one by one.

    Pieces that are strided are never given back, and may lie interleaved with each other.
    """
    spans = []
    for piece in holding.pieces:
        view = piece.view()
        if view.numel():
            extent = 1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
            start = view.data_ptr()
            spans.append((start, start + extent * view.element_size(), view.is_contiguous()))
    ends = {True: 0, False: 0}
    for start, end, is_contiguous in sorted(spans):
        if start < (max(ends.values()) if is_contiguous else ends[True]):
            return False
        ends[is_contiguous] = max(ends[is_contiguous], end)
    return True


def _up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
