"""Relays what ranked workers print to the terminal, whole line by whole line.

Workers write into files of the run folder, so they never wait for a terminal; one thread follows the files.
A slow, full or closed terminal holds up that thread and nothing else.

What has a prefix is shown line by line, a carriage return counting as the end of one (a progress bar's, say).
What has none comes from the only worker there is and is shown byte for byte, as soon as it is there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

MAX_PIECE_BYTES = 1024 * 1024
"""a longer line is shown in pieces"""
READ_BYTES = 256 * 1024

Mark = tuple[int, int]
"""bytes of a worker's stdout and stderr that are not shown"""
START: Mark = (0, 0)
NAMES = ("stdout", "stderr")


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Lines that are also written to a file, if a word is in them."""

    file: BinaryIO
    words: tuple[bytes, ...]


@dataclass(kw_only=True)
class Followed:
    """One file being followed."""

    path: Path
    sink: BinaryIO | None
    """none for a file that only the filters look at"""
    prefix: bytes
    copied: bool
    """whether the filters look at it"""
    offset: int = 0
    rest: bytes = b""
    ended: bool = True
    """whether what was shown byte for byte has come to the end of a line"""
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
    _copies: dict[str, Copies] = field(default_factory=dict)
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

    def copy(self, name: str, path: Path, words: Sequence[str]) -> None:
        """Write teed lines of a stream that have one of these words also to a file. Raises ``OSError``."""
        if words:
            copies = Copies(file=path.open("wb", buffering=0), words=tuple(word.encode() for word in words))
            with self._lock:
                old = self._copies.get(name)
                self._copies[name] = copies
            if old is not None:
                old.file.close()

    def follow(
        self,
        worker: str,
        folder: Path,
        prefix: str,
        since: Mark,
        *,
        shown: frozenset[str] = frozenset(NAMES),
        teed: frozenset[str] = frozenset(),
        tee_prefix: str = "",
    ) -> None:
        """Show a worker's lines since a mark, or with another prefix if it is shown already."""
        with self._lock:
            for name, sink, offset in (("stdout", self.stdout, since[0]), ("stderr", self.stderr, since[1])):
                path = folder / f"{name}.log"
                if name not in shown:
                    continue
                header = (tee_prefix if name in teed else prefix).encode()
                known = self._followed.get((worker, name))
                if known is not None:
                    known.prefix, known.until = header, None
                    continue
                self._followed[worker, name] = Followed(
                    path=path, sink=sink, prefix=header, copied=name in teed, offset=offset
                )

    def leave(self, worker: str) -> None:
        """Show what a worker has written so far, and then no more of it."""
        with self._lock:
            for name in NAMES:
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
                busy |= self._copy(key[1], file, ending=ending)
                if file.until is not None and file.offset >= file.until:
                    self._show(key[1], file, b"", flush_rest=True)
                    with self._lock:
                        if file.until is not None:
                            self._followed.pop(key, None)
            if ending and not busy:
                for (_, name), file in files:
                    self._show(name, file, b"", flush_rest=True)
                return
            if not busy:
                self._wake.wait(self.interval_s)

    def _copy(self, name: str, file: Followed, *, ending: bool) -> bool:
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
            self._show(name, file, data, flush_rest=False)
        return len(data) == READ_BYTES or (ending and bool(data))

    def _show(self, name: str, file: Followed, data: bytes, *, flush_rest: bool) -> None:
        if not file.prefix and not file.copied and not file.rest:
            if data:
                file.ended = data.endswith(b"\n")
            elif flush_rest and not file.ended:
                data, file.ended = b"\n", True
            self._write(file, data)
            return
        *lines, rest = as_lines(file.rest + data, last=flush_rest)
        while len(rest) > MAX_PIECE_BYTES:
            lines.append(rest[:MAX_PIECE_BYTES])
            rest = rest[MAX_PIECE_BYTES:]
        if flush_rest and rest:
            lines.append(rest)
            rest = b""
        file.rest = rest
        copies = self._copies.get(name) if file.copied else None
        if copies is not None:
            chosen = [line for line in lines if any(word in line for word in copies.words)]
            try:
                copies.file.write(b"".join(file.prefix + line + b"\n" for line in chosen))
            except OSError as error:
                self._complain(copies.file, f"filtered_{name}.log cannot be written ({error})")
        self._write(file, b"".join(file.prefix + line + b"\n" for line in lines))

    def _write(self, file: Followed, data: bytes) -> None:
        if not data or file.sink is None or id(file.sink) in self._closed:
            return
        try:
            file.sink.write(data)
            file.sink.flush()
        except (OSError, ValueError) as error:
            name = "stdout" if file.sink is self.stdout else "stderr"
            where = file.path.parent.parent
            self._complain(file.sink, f"{name} is closed ({error}); the job goes on, its logs are in {where}")

    def _complain(self, sink: BinaryIO, sentence: str) -> None:
        if id(sink) not in self._closed:
            self._closed.add(id(sink))
            self.trouble(sentence)


def as_lines(data: bytes, *, last: bool) -> list[bytes]:
    """Split into lines; the last item is what has no end yet. A lone carriage return ends a line too."""
    if b"\r" not in data:
        return data.split(b"\n")
    held = b"\r" if data.endswith(b"\r") and not last else b""  # a newline may follow
    body = data.removesuffix(held) if held else data
    parts = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    parts[-1] += held
    return parts


def size_of(path: Path) -> int:
    """Bytes in a file; 0 if there is none."""
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0
