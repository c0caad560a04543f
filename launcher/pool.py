"""The worker processes of this node: forked through the template, watched, signalled, killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.destinations import Destinations
from launcher.environment import Attempt, with_local_rank, worker_environ
from launcher.options import RunOptions
from launcher.orders import WorkerExited, WorkerStarted
from launcher.process import Reaper, TemplateClient, TemplateError, describe_os_error, kill_session
from launcher.report import failure_lines
from launcher.rundir import JobFolder


@dataclass
class Process:
    """One worker process that is alive."""

    pid: int
    boot_rank: int | None
    slot: int
    """place on this node, kept for life; the lowest that no other worker has"""
    restarts: int = 0


@dataclass(frozen=True)
class Ended:
    """How a worker process came to its end, and when."""

    process: Process
    code: int
    """negative: the signal"""
    restarts: int
    """the attempt it was part of"""
    at: float
    """wall clock, for people and for torch's failures"""


class Pool:
    """Starts workers and tells of their start and end. Ids are never used twice in a job."""

    def __init__(
        self,
        options: RunOptions,
        *,
        job: str,
        folder: JobFolder,
        template: TemplateClient,
        reaper: Reaper,
        threads: int | None,
        tell: Callable[[WorkerStarted | WorkerExited], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.options = options
        self._job = job
        self._folder = folder
        self._template = template
        self._reaper = reaper
        self._threads = threads
        self.tell = tell
        self._clock = wall_clock
        self.prefix = ""
        """of worker ids: the node's, but on the first node"""
        self._ids = itertools.count()
        self._starts: dict[str, asyncio.Event] = {}
        self._slots: dict[str, int] = {}
        self._reserved: set[int] = set()
        """places of workers that are to be started with a rank"""
        self.alive: dict[str, Process] = {}
        self.ended: dict[str, Ended] = {}
        self.destinations = Destinations(options, job=job, logs=folder.path / "logs")
        self.rendezvous = folder.path / "rendezvous"
        """a file that is there once a worker has come to the present attempt's first c10d store"""
        self.changed = asyncio.Event()
        self.attempt = Attempt(host=options.host, port=0, size=options.nproc)
        self._is_over = False
        """the present attempt is being ended: nobody joins it any more"""

    @property
    def restarts(self) -> int:
        """Return the number of the present attempt, from 0."""
        return self.attempt.restarts

    def log_folder(self, worker: str) -> Path:
        """Where a worker's output lies, or links to where it lies."""
        return self._folder.log_folder(worker)

    async def begin(self, attempt: Attempt) -> None:
        """Make what a new attempt needs on disk. Raises ``TemplateError``."""
        self.attempt = attempt
        self._is_over = False
        try:
            self._reserved = set(range(self.options.nproc))
            await self.destinations.begin(self.restarts, self._template, self._environ_of_rank)
        except OSError as error:
            raise TemplateError(f"cannot make a log folder: {describe_os_error(error)}") from None

    def _environ_of_rank(self, rank: int) -> dict[str, str]:
        return worker_environ(
            self.options, job=self._job, folder=self._folder.path, socket=self._folder.socket_path,
            worker=f"{self.prefix}w{rank}", slot=rank, ranked=True, threads=self._threads,
            attempt=self.attempt, error_file=None,
        )  # fmt: skip

    def end_attempt(self) -> list[str]:
        """Return the workers there are to end. Whatever is being started will not begin."""
        self._is_over = True
        return list(self.alive)

    async def start(self, local_rank: int | None) -> str | None:
        """Fork one worker, for a rank of the first world or as a standby.

        Returns its id; ``None`` if the attempt came to its end before. Raises ``TemplateError``.
        """
        if self._is_over:
            return None
        attempt = self.attempt
        worker = f"{self.prefix}w{next(self._ids)}"
        slot = self._slot(local_rank)
        boot_rank = None if local_rank is None else self.attempt.first_rank + local_rank
        self._slots[worker] = slot
        try:
            logs = self.destinations.place(worker, slot)
        except OSError as error:
            raise TemplateError(f"cannot make log files: {describe_os_error(error)}") from None
        environ = worker_environ(
            self.options, job=self._job, folder=self._folder.path, socket=self._folder.socket_path,
            worker=worker, slot=slot, ranked=boot_rank is not None, threads=self._threads, attempt=self.attempt,
            error_file=logs.error,
        )  # fmt: skip
        self._starts[worker] = asyncio.Event()
        answer = await self._template.ask(
            {
                "op": "worker",
                "mode": self.options.mode,
                "argv": with_local_rank(self.options.argv, slot),
                "env": environ,
                "cwd": os.getcwd(),  # noqa: PTH109
                "stdout": str(logs.stdout),
                "stderr": str(logs.stderr),
                "fresh": self.options.fresh,
                "numa": None
                if self.options.numa_binding is None
                else {"mode": self.options.numa_binding, "gpu_index": slot},
            }
        )
        pid = int(answer["pid"])
        self._starts[worker].set()
        if self._is_over or attempt is not self.attempt:  # it missed the signal that all others had
            del self._slots[worker]
            os.kill(pid, signal.SIGKILL)
            self._reaper.expect(pid, lambda _: self._template.forget(pid))
            return None
        self.alive[worker] = Process(pid, boot_rank, slot, self.restarts)
        self.tell(WorkerStarted(worker=worker, pid=pid, boot_rank=boot_rank))
        self._reaper.expect(pid, lambda code: self._ended(worker, code))
        return worker

    def _slot(self, local_rank: int | None) -> int:
        """Return the place of a worker: its rank for one that starts with one, even if others have ended already."""
        if local_rank is not None:
            self._reserved.discard(local_rank)
            return local_rank
        taken = {*self._slots.values(), *self._reserved}
        return next(free for free in itertools.count() if free not in taken)

    async def expects(self, worker: str) -> bool:
        """Whether a worker of that id is alive; waits for a start that is under way."""
        if worker not in self._starts:
            return False
        await self._starts[worker].wait()
        return worker in self.alive

    def _ended(self, worker: str, code: int) -> None:
        process = self.alive.pop(worker)
        ended = self.ended[worker] = Ended(process, code, process.restarts, self._clock())
        del self._slots[worker]
        kill_session(process.pid, spare_leader=True)
        self._template.forget(process.pid)
        lines = () if code == 0 else tuple(self._report(worker, ended))
        self.tell(
            WorkerExited(worker=worker, code=code, under_way=self.rendezvous.exists(), lines=lines)
        )
        self.changed.set()

    def _report(self, worker: str, ended: Ended) -> list[str]:
        placed = self.destinations.of(worker)
        return failure_lines(pid=ended.process.pid, stderr=placed.stderr, error=placed.error)

    def signal(self, worker: str, number: signal.Signals) -> None:
        """Signal the worker process itself, not what it has started."""
        process = self.alive.get(worker)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
                os.kill(process.pid, signal.SIGCONT)  # one that is stopped could not act on it

    def kill(self, worker: str) -> None:
        """SIGKILL a worker and whatever it has started."""
        process = self.alive.get(worker)
        if process is not None:
            kill_session(process.pid)

    def of_last_attempt(self) -> list[tuple[str, Ended]]:
        """Return the workers of the present attempt that were started with a rank, in the order of their ends."""
        return [
            (worker, ended)
            for worker, ended in self.ended.items()
            if ended.process.boot_rank is not None and ended.restarts == self.restarts
        ]

    async def empty(self, timeout_s: float) -> bool:
        """Wait until no worker is alive; false when that takes longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.alive:
                    self.changed.clear()
                    await self.changed.wait()
        return not self.alive
