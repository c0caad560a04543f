"""Workers that the kernel does not let go of: in uninterruptible sleep (state D), where no signal reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def process_state(pid: int) -> str:
    """Return the letter of proc(5), ``R``, ``S``, ``D`` …; nothing for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split(maxsplit=1)[0]  # the name before it may hold anything


class Wedged:
    """Finds workers that have been in state D at every look for at least ``limit_s``."""

    def __init__(
        self, limit_s: float, *, clock: Callable[[], float], state_of: Callable[[int], str] = process_state
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._state_of = state_of
        self._since: dict[int, float] = {}

    def look(self, pids: Mapping[str, int]) -> tuple[str, float] | None:
        """Look once at workers by id; the one that is stuck the longest, and for how many seconds."""
        now = self._clock()
        self._since = {
            pid: self._since.get(pid, now) for pid in pids.values() if self._state_of(pid).startswith("D")
        }
        stuck = {worker: now - self._since[pid] for worker, pid in pids.items() if pid in self._since}
        worker = max(stuck, key=stuck.__getitem__, default=None)
        if worker is None or stuck[worker] < self._limit_s:
            return None
        return worker, stuck[worker]
