"""``events.jsonl``: what happened to a job's world, one JSON object a line."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def rfc3339(seconds: float) -> str:
    """Write a wall-clock time in UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class EventLog:
    """Appends events; a reader sees whole lines only."""

    def __init__(
        self, path: Path, wall_clock: Callable[[], float], trouble: Callable[[str], None] = lambda _: None,
        told: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """``trouble`` hears when the file takes no more, ``told`` of every event."""
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._clock = wall_clock
        self._trouble = trouble
        self._told = told
        self._broken = False
        self._is_cut = False
        """the file ends in the middle of a line"""

    def write(self, kind: str, generation: int, reason: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Append one event; the object written."""
        event = {
            "time": rfc3339(self._clock()),
            "generation": generation,
            "kind": kind,
            "reason": reason,
            **fields,
        }
        self.append(event)
        return event

    def append(self, event: Mapping[str, Any]) -> None:
        """Append an event as it is."""
        if self._told is not None:
            self._told(f"{event.get('kind')}: {event.get('reason')}")
        line = (b"\n" if self._is_cut else b"") + json.dumps(event).encode() + b"\n"
        try:
            written = self._file.write(line)
            trouble = "" if written == len(line) else os.strerror(errno.ENOSPC)
            self._is_cut = written != len(line)
        except OSError as error:  # a full disk must not end the job
            trouble = error.strerror or str(error)
        if trouble and not self._broken:
            self._trouble(f"{self._path} cannot be written ({trouble}); events are lost until it can")
        self._broken = bool(trouble)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(
    path: Path, *, since: int, follow: bool, ended: Callable[[], bool], poll_s: float = 0.1
) -> Iterator[dict[str, Any]]:
    """Events of generation ``since`` and later; with ``follow`` also those to come, until the job ends."""
    rest = b""
    with path.open("rb") as file:
        while True:
            over = not follow or ended()  # asked before reading: what is written before the end is shown
            data = file.read()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:  # cut by a full disk
                    continue
                if event["generation"] >= since:
                    yield event
            if over:
                return
            if not data:
                time.sleep(poll_s)
