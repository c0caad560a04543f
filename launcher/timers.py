"""torch's file timers: a worker says by when it wants to be done with something, and is ended if it is not.

A script that uses ``torch.distributed.elastic.timer.FileTimerClient`` writes lines of JSON into the pipe that
``TORCHELASTIC_TIMER_FILE`` names, ``{"version", "pid", "scope_id", "expiration_time", "signal"}``: seconds of the
wall clock, which both sides of one host share, or a negative number that takes an earlier line back.

torch's launcher ends itself together with the worker. Here only the worker gets the signal, and its end is a failure
like any other: reported, and restarted if restarts are left.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_LINE_BYTES = 4096
"""what a pipe takes in one piece; torch's client writes no longer lines"""
MAX_TIMERS = 10_000
LONGEST_SLEEP_S = 1.0
"""the wall clock may be set meanwhile"""


@dataclass(frozen=True, kw_only=True)
class Timer:
    """One line of a worker."""

    pid: int
    scope: str
    expires: float
    """wall clock, seconds; negative: no timer any more"""
    signal: int
    """0 or less: nobody is to be ended"""

    @staticmethod
    def parse(line: bytes) -> Timer:
        """Read what torch's client writes. Raises ``ValueError``."""
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"{len(line)} bytes")
        values = json.loads(line)
        fields = values if isinstance(values, dict) else {}
        pid, scope, expires, number = (fields.get(k) for k in ("pid", "scope_id", "expiration_time", "signal"))
        if (
            type(pid) is not int or not 0 < pid < 2**31 or not isinstance(scope, str)
            or not isinstance(expires, int | float) or type(expires) is bool or not math.isfinite(expires)
            or type(number) is not int or (number > 0 and number not in signal.valid_signals())
        ):  # fmt: skip
            raise ValueError("a field is missing, or no value of its kind")
        return Timer(pid=pid, scope=scope, expires=float(expires), signal=number)


class FileTimers:
    """The pipe of one job, and the timers that are running. ``worker_of`` names the worker a process belongs to."""

    def __init__(
        self, path: Path, *, worker_of: Callable[[int], str | None], say: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time, kill: Callable[[int, int], None] = os.kill,
    ) -> None:  # fmt: skip
        self._path = path
        self._worker_of = worker_of
        self._say = say
        self._clock = wall_clock
        self._kill = kill
        self._timers: dict[tuple[int, str], Timer] = {}
        self._rest = b""
        self._changed = asyncio.Event()
        self._complained = False
        self._fd: int | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Make the pipe and serve it. Raises ``OSError``, also when something else lies at the path."""
        with suppress(FileNotFoundError):
            if not stat.S_ISFIFO(self._path.lstat().st_mode):
                raise FileExistsError(17, "File exists, and is no pipe", str(self._path))
            self._path.unlink()
        os.mkfifo(self._path, 0o600)
        # a writer of our own: there is never an end to read
        self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._fd, self._readable)
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Remove the pipe."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
            self._path.unlink(missing_ok=True)

    def _readable(self) -> None:
        assert self._fd is not None
        with suppress(BlockingIOError):
            self.take(os.read(self._fd, 64 * 1024))

    def take(self, data: bytes) -> None:
        """Take what workers wrote; the part of a line that is not whole yet is kept."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                self._note(Timer.parse(line))
            except (ValueError, RecursionError) as error:
                self._complain(f"a line that asks for no timer was ignored ({error})")
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b""
            self._complain("a line without an end was ignored")
        self._changed.set()

    def _note(self, timer: Timer) -> None:
        key = (timer.pid, timer.scope)
        if timer.expires < 0:
            self._timers.pop(key, None)
        elif key in self._timers or len(self._timers) < MAX_TIMERS:
            self._timers[key] = timer
        else:
            raise ValueError(f"more than {MAX_TIMERS} timers")

    def _complain(self, sentence: str) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"{self._path}: {sentence}")

    async def _watch(self) -> None:
        while True:
            self._changed.clear()
            due = self.act()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else min(max(0.0, due), LONGEST_SLEEP_S)):
                    await self._changed.wait()

    def act(self) -> float | None:
        """End whoever is late, once; seconds until the next timer is due, if there is one."""
        now = self._clock()
        late = sorted((t for t in self._timers.values() if t.expires <= now), key=lambda t: t.expires)
        for timer in late:
            if self._timers.pop((timer.pid, timer.scope), None) is not None and timer.signal > 0:
                self._end(timer)
        return min((timer.expires - now for timer in self._timers.values()), default=None)

    def _end(self, timer: Timer) -> None:
        for key in [key for key in self._timers if key[0] == timer.pid]:
            del self._timers[key]
        worker = self._worker_of(timer.pid)
        if worker is None:  # it has ended, or is somebody else's: a line can name any process
            return
        name = signal.Signals(timer.signal).name
        self._say(f"worker {worker} (pid {timer.pid}) is not done with {timer.scope!r} in its time: {name}")
        with suppress(ProcessLookupError):
            self._kill(timer.pid, timer.signal)
