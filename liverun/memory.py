"""How much memory the process took at most, as the operating system saw it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

_RESET_HIGH_WATER = "5"


def status_bytes(field: str) -> int:
    """Return a field of this process such as ``VmRSS`` or ``VmHWM`` in bytes; 0 where there is none."""
    return _field_bytes(Path("/proc/self/status"), field)


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return what machine and container can still give without swapping, in bytes; 0 where nobody says."""
    of_machine = _field_bytes(Path("/proc/meminfo"), "MemAvailable")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return of_machine
    if limit == "max":
        return of_machine
    # file pages that nobody has used lately go before anything else has to
    of_container = int(limit) - used + int(stat.get("inactive_file", 0))
    return max(0, min(of_machine, of_container))


def _field_bytes(path: Path, field: str) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


class ResidentPeak:
    """Measures the growth of the resident high-water mark within a ``with`` block.

    Where the kernel does not let the mark be reset, growth is counted from the mark as it stood: a lower bound.
    """

    extra_bytes: int = 0

    def __enter__(self) -> Self:
        try:
            Path("/proc/self/clear_refs").write_text(_RESET_HIGH_WATER)
        except OSError:
            self._start_bytes = status_bytes("VmHWM")
        else:
            self._start_bytes = status_bytes("VmRSS")
        return self

    def __exit__(self, *_exc: object) -> None:
        self.extra_bytes = max(0, status_bytes("VmHWM") - self._start_bytes)
