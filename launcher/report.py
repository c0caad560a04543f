"""What is said of a job that failed: host, rank, signal or code, the script's own error, the end of its stderr."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.model import End
from launcher.orders import Finish
from launcher.process import describe_exit, last_lines

NUM_LINES = 20


def read_error(path: Path | None) -> Mapping[str, Any] | None:
    """Return what a worker wrote into its error file; ``None`` if it wrote none, or nothing that can be read."""
    if path is None:
        return None
    try:
        value = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def error_text(error: Mapping[str, Any] | None) -> str:
    """Return ``ValueError: bad`` from an error file; torch has two shapes of it."""
    message = (error or {}).get("message", "")
    if isinstance(message, dict):
        message = message.get("message", "")
    lines = str(message).strip().splitlines()
    return lines[0] if lines else ""


def failure_lines(*, pid: int, stderr: Path, error: Path | None) -> list[str]:
    """Return what this host knows of a worker that failed: where it was, where its stderr is, what it said."""
    lines = [f"host {socket.gethostname()}, pid {pid}", f"its stderr is {stderr}"]
    if text := error_text(read_error(error)):
        lines.append(f"its error: {text}")
    if tail := last_lines(stderr, NUM_LINES):
        lines.append("the last lines of it:\n" + "\n".join(f"    {line}" for line in tail.splitlines()))
    return lines


def first_failure(end: End | Finish) -> list[str]:
    """Return the report on the first failure, line by line; nothing for an end without one."""
    if end.worker is None:
        return []
    where, stderr, *more = end.lines or ("host unknown", "its stderr is lost")
    how = describe_exit(end.code or 0)
    return [f"first failure: worker {end.worker}, rank {end.rank}, {how} ({where}); {stderr}", *more]
