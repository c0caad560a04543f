"""Relays what ranked workers print to the terminal, whole line by whole line.

Workers write into files of the run folder, so they never wait for a terminal; one thread follows the files.
A slow, full or closed terminal holds up that thread and nothing else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

MAX_PIECE_BYTES = 64 * 1024
"""a longer line is shown in pieces"""
READ_BYTES = 256 * 1024


Mark = tuple[int, int]
"""bytes of a worker's stdout and stderr that are not shown"""
START: Mark = (0, 0)


@dataclass
class Followed:
    """One file being followed."""

    path: Path
    sink: BinaryIO
    prefix: bytes
    offset: int = 0
    rest: bytes = b""
    until: int | None = None
    """stop after this many bytes: the worker has no rank any more"""


@dataclass
class Relay:
    """Follows the logs of ranked workers until :meth:`finish`."""

    stdout: BinaryIO
    stderr: BinaryIO
    interval_s: float = 0.05
    trouble: Callable[[str], None] = lambda _: None
    """called once when the terminal takes no more"""
    _followed: dict[tuple[str, str], Followed] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _ending: bool = False
    _closed: set[int] = field(default_factory=set)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="log relay", daemon=True)
        self._thread.start()

    @staticmethod
    def mark(folder: Path) -> Mark:
        """How much a worker has written by now."""
        return size_of(folder / "stdout.log"), size_of(folder / "stderr.log")

    def follow(self, worker: str, folder: Path, prefix: str, since: Mark) -> None:
        """Show a worker's lines since a mark, or with another prefix if it is shown already."""
        with self._lock:
            for name, sink, offset in (("stdout", self.stdout, since[0]), ("stderr", self.stderr, since[1])):
                path = folder / f"{name}.log"
                known = self._followed.get((worker, name))
                if known is not None:
                    known.prefix, known.until = prefix.encode(), None
                    continue
                self._followed[worker, name] = Followed(path, sink, prefix.encode(), offset)

    def leave(self, worker: str) -> None:
        """Show what a worker has written so far, and then no more of it."""
        with self._lock:
            for name in ("stdout", "stderr"):
                known = self._followed.get((worker, name))
                if known is not None:
                    known.until = size_of(known.path)

    def finish(self, timeout_s: float = 5.0) -> None:
        """Show the rest of everything, then stop; after ``timeout_s`` even if the terminal is stuck."""
        self._ending = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            ending = self._ending
            with self._lock:
                files = list(self._followed.items())
            busy = False
            for key, file in files:
                busy |= self._copy(file, ending=ending)
                if file.until is not None and file.offset >= file.until:
                    self._show(file, b"", flush_rest=True)
                    with self._lock:
                        if file.until is not None:
                            self._followed.pop(key, None)
            if ending and not busy:
                for _, file in files:
                    self._show(file, b"", flush_rest=True)
                return
            if not busy:
                self._wake.wait(self.interval_s)

    def _copy(self, file: Followed, *, ending: bool) -> bool:
        """Copy some of a file; whether there is more."""
        size = READ_BYTES if file.until is None else min(READ_BYTES, max(0, file.until - file.offset))
        try:
            with file.path.open("rb") as opened:
                opened.seek(file.offset)
                data = opened.read(size)
        except OSError:
            return False
        file.offset += len(data)
        if data:
            self._show(file, data, flush_rest=False)
        return len(data) == READ_BYTES or (ending and bool(data))

    def _show(self, file: Followed, data: bytes, *, flush_rest: bool) -> None:
        *lines, rest = (file.rest + data).split(b"\n")
        while len(rest) > MAX_PIECE_BYTES:
            lines.append(rest[:MAX_PIECE_BYTES])
            rest = rest[MAX_PIECE_BYTES:]
        if flush_rest and rest:
            lines.append(rest)
            rest = b""
        file.rest = rest
        if not lines or id(file.sink) in self._closed:
            return
        try:
            file.sink.write(b"".join(file.prefix + line + b"\n" for line in lines))
            file.sink.flush()
        except (OSError, ValueError) as error:
            self._closed.add(id(file.sink))
            name = "stdout" if file.sink is self.stdout else "stderr"
            self.trouble(
                f"{name} is closed ({error}); the job goes on, its logs are in {file.path.parent.parent}"
            )


def size_of(path: Path) -> int:
    """Bytes in a file; 0 if there is none."""
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0
