"""The bounded memory that slices pass through on their way: a ring, taken and given back in order."""

from __future__ import annotations

from collections import deque

import torch

ALIGN_BYTES = 16
"""Every part, and every slice in a message, starts at a multiple of this, so that it can be read as its own type."""


def aligned(num_bytes: int) -> int:
    """Return the next place, from ``num_bytes`` on, where any element type may lie."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Staging:
    """A buffer whose parts are taken one after the other and given back in the same order."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate ``num_bytes``, at least as many as the largest part will ask for."""
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._taken: deque[tuple[int, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return int(self._buffer.numel())

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """Return a part, 1-D uint8; ``None`` while too much is taken. It begins where any element type may lie."""
        start = self._start_of(num_bytes)
        if start is None:
            return None
        self._taken.append((start, start + num_bytes))
        return self._buffer[start : start + num_bytes]

    def give_back(self) -> None:
        """Give back the part that was taken first."""
        self._taken.popleft()

    def _start_of(self, num_bytes: int) -> int | None:
        if not self._taken:
            return 0
        first, last = self._taken[0][0], aligned(self._taken[-1][1])
        if last > first:  # what is free lies behind the last and before the first
            if last + num_bytes <= self._buffer.numel():
                return last
            last = 0
        return last if last + num_bytes <= first else None
