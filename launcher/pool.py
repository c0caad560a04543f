"""The worker processes of this node: forked through the template, watched, signalled, killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.destinations import Destinations
from launcher.environment import Attempt, with_local_rank, worker_environ
from launcher.options import RunOptions
from launcher.orders import WorkerExited, WorkerStarted
from launcher.process import Reaper, TemplateClient, TemplateError, describe_os_error, kill_session
from launcher.report import failure_lines
from launcher.rundir import JobFolder
from liverun.messages import Again


@dataclass
class Process:
    """One worker process that is alive."""

    pid: int
    boot_rank: int | None
    slot: int
    """place on this node, kept for life; the lowest that no other worker has"""
    restarts: int = 0
    """the attempt it is part of"""
    era: int = 0
    """which of the pool's eras it was started in"""
    waits: bool = False
    """its script was unwound, and it waits to be another worker"""
    fallback: dict[str, Any] | None = None
    """what the template is asked for if a kept process does not get as far as ``join()``"""


@dataclass(frozen=True)
class Ended:
    """How a worker process came to its end, and when."""

    process: Process
    code: int
    """negative: the signal"""
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
        self.rerun: Callable[[str, Again], None]
        """sends a process that waits, by the id of the worker it was, what it is to be"""
        self.spawn: Callable[[Coroutine[None, None, None]], object]
        """runs something beside; a failure of it is trouble for the node"""
        self.keeps = True
        """no kept process of this node has failed to run its script again"""
        self.era = 0
        """goes up when all workers are being ended: what was asked for before, and who was there, is of the past"""
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
        self.attempt = Attempt(host=options.host, port=0, count=options.nproc, size=options.nproc)

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
        try:
            self._reserved = set(range(attempt.count))
            await self.destinations.begin(self.restarts, self._template, self._environ_of_rank)
        except OSError as error:
            raise TemplateError(f"cannot make a log folder: {describe_os_error(error)}") from None

    def _environ_of_rank(self, rank: int) -> dict[str, str]:
        return worker_environ(
            self.options, job=self._job, folder=self._folder.path, socket=self._folder.socket_path,
            worker=f"{self.prefix}w{rank}", slot=rank, ranked=True, threads=self._threads,
            attempt=self.attempt, error_file=None,
        )  # fmt: skip

    def end_era(self) -> None:
        """From here on nobody joins the workers that are there, and none of them is replaced."""
        self.era += 1

    async def start(self, local_rank: int | None, era: int) -> str | None:
        """Start one worker, for a rank of the first world or as a standby. Raises ``TemplateError``.

        A process that waits becomes that worker; else one is forked. Returns its id; ``None`` if the ``era`` in which
        it was asked for came to its end before.
        """
        if era != self.era:
            return None
        worker = f"{self.prefix}w{next(self._ids)}"
        was, slot = self._place(local_rank)
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
        request: dict[str, Any] = {
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
        if was is None:
            is_there = await self._fork(worker, Process(0, boot_rank, slot, self.restarts, era), request)
            return worker if is_there else None
        process = Process(self.alive.pop(was).pid, boot_rank, slot, self.restarts, era, fallback=request)
        again = {name: request[name] for name in ("argv", "env", "cwd", "stdout", "stderr")}
        self.rerun(was, Again(worker=worker, **again))
        self._started(worker, process)
        return worker

    async def _fork(self, worker: str, process: Process, request: dict[str, Any]) -> bool:
        """Start a process; false if its era came to its end before it was there."""
        answer = await self._template.ask(request)
        process.pid = int(answer["pid"])
        if process.era != self.era:  # it missed the signal that all others had
            self._slots.pop(worker, None)
            self._starts[worker].set()
            os.kill(process.pid, signal.SIGKILL)
            self._reaper.expect(process.pid, lambda _: self._template.forget(process.pid))
            return False
        self._started(worker, process)
        return True

    def _started(self, worker: str, process: Process) -> None:
        self.alive[worker] = process
        self.tell(WorkerStarted(worker=worker, pid=process.pid, boot_rank=process.boot_rank))
        self._starts[worker].set()
        self._reaper.expect(process.pid, lambda code: self._ended(worker, code))

    def _place(self, local_rank: int | None) -> tuple[str | None, int]:
        """Return the process that a worker is to run in (the worker it was; none: a new one), and its place.

        One that starts with a rank has that place, even if others have ended already. It gets the process that was
        there; where that is gone, any that nobody else will have for that reason, if it does not matter where it is.
        """
        waiting = {worker: process.slot for worker, process in self.alive.items() if process.waits}
        if local_rank is not None:
            self._reserved.discard(local_rank)
            slot = local_rank
        else:
            taken = {*self._slots.values(), *self._reserved}
            free = [place for place in sorted(waiting.values()) if place not in taken]
            slot = free[0] if free else next(place for place in itertools.count() if place not in taken)
        there = [worker for worker, place in waiting.items() if place == slot]
        tied = self.options.virtual_local_rank or self.options.numa_binding is not None
        if not there and not tied:
            there = [worker for worker, place in waiting.items() if place not in self._reserved]
        return (there[-1] if there else None), slot

    def waits(self, worker: str) -> None:
        """Note that the script of a worker was unwound: nothing of what it has started is left either."""
        process = self.alive.get(worker)
        if process is not None:
            process.waits = True
            self._slots.pop(worker, None)
            kill_session(process.pid, spare_leader=True)
            self.changed.set()

    def joined(self, worker: str) -> None:
        """Note that a worker has called ``liverun.join()``."""
        process = self.alive.get(worker)
        if process is not None:
            process.fallback = None

    async def expects(self, worker: str) -> bool:
        """Whether a worker of that id is alive; waits for a start that is under way."""
        if worker not in self._starts:
            return False
        await self._starts[worker].wait()
        return worker in self.alive

    def _ended(self, worker: str, code: int) -> None:
        process = self.alive.pop(worker)
        kill_session(process.pid, spare_leader=True)
        self._template.forget(process.pid)
        if process.fallback is not None and process.era == self.era:
            # whatever the process brought along from its first life, a new one has not
            self.spawn(self._replace(worker, process))
            return
        ended = self.ended[worker] = Ended(process, code, self._clock())
        self._slots.pop(worker, None)
        lines = () if code == 0 else tuple(self._report(worker, ended))
        self.tell(
            WorkerExited(worker=worker, code=code, under_way=self.rendezvous.exists(), lines=lines)
        )
        self.changed.set()

    async def _replace(self, worker: str, process: Process) -> None:
        """Run a worker in a new process: the one that was kept for it has ended before ``liverun.join()``."""
        self.keeps = False
        request, process.fallback = process.fallback, None
        assert request is not None
        await self._fork(worker, process, request)

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
            if ended.process.boot_rank is not None and ended.process.restarts == self.restarts
        ]

    async def empty(self, timeout_s: float, *, but_waiting: bool = False) -> bool:
        """Wait until no worker is alive; false when that takes longer.

        ``but_waiting``: but for those that wait to be another one.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.busy if but_waiting else self.alive:
                    self.changed.clear()
                    await self.changed.wait()
        return not (self.busy if but_waiting else self.alive)

    @property
    def busy(self) -> list[str]:
        """Return the workers that do not wait to be another one."""
        return [worker for worker, process in self.alive.items() if not process.waits]
