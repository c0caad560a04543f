"""The worker processes of this node: forked through the template, watched, signalled, killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.environment import Endpoint, worker_environ
from launcher.model import Exited, Started
from launcher.options import RunOptions
from launcher.process import Reaper, TemplateClient, kill_session
from launcher.rundir import JobFolder


@dataclass
class Process:
    """One worker process that is alive."""

    pid: int
    boot_rank: int | None
    slot: int
    """place on this node, kept for life; the lowest that no other worker has"""


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
        tell: Callable[[Started | Exited], None],
    ) -> None:
        self._options = options
        self._job = job
        self._folder = folder
        self._template = template
        self._reaper = reaper
        self._threads = threads
        self._tell = tell
        self._ids = itertools.count()
        self._starts: dict[str, asyncio.Event] = {}
        self._slots: dict[str, int] = {}
        self.alive: dict[str, Process] = {}
        self.changed = asyncio.Event()
        self.endpoint = Endpoint(host=options.host, port=0)
        self.restarts = 0

    def log_folder(self, worker: str) -> Path:
        """Where a worker's output lies."""
        if self._options.log_dir is None:
            return self._folder.log_folder(worker)
        folder = self._options.log_dir / self._job / worker
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    async def start(self, boot_rank: int | None) -> str:
        """Fork one worker; its id. Raises ``TemplateError``."""
        worker = f"w{next(self._ids)}"
        logs = self.log_folder(worker)
        slot = next(free for free in itertools.count() if free not in self._slots.values())
        self._slots[worker] = slot
        environ = worker_environ(
            self._options, job=self._job, folder=self._folder.path, socket=self._folder.socket_path,
            worker=worker, slot=slot, rank=boot_rank, restarts=self.restarts, threads=self._threads,
            endpoint=self.endpoint,
            error_file=logs / "error.json",
        )  # fmt: skip
        self._starts[worker] = asyncio.Event()
        answer = await self._template.ask(
            {
                "op": "worker",
                "mode": self._options.mode,
                "argv": list(self._options.argv),
                "env": environ,
                "cwd": os.getcwd(),  # noqa: PTH109
                "stdout": str(logs / "stdout.log"),
                "stderr": str(logs / "stderr.log"),
            }
        )
        pid = int(answer["pid"])
        self.alive[worker] = Process(pid, boot_rank, slot)
        self._tell(Started(worker=worker, pid=pid, boot_rank=boot_rank))
        self._starts[worker].set()
        self._reaper.expect(pid, lambda code: self._ended(worker, code))
        return worker

    async def expects(self, worker: str) -> bool:
        """Whether a worker of that id is alive; waits for a start that is under way."""
        if worker not in self._starts:
            return False
        await self._starts[worker].wait()
        return worker in self.alive

    def _ended(self, worker: str, code: int) -> None:
        process = self.alive.pop(worker)
        del self._slots[worker]
        kill_session(process.pid, spare_leader=True)
        self._tell(Exited(worker=worker, code=code))
        self.changed.set()

    def signal(self, worker: str, number: signal.Signals) -> None:
        """Signal the worker process itself, not what it has started."""
        process = self.alive.get(worker)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self, worker: str) -> None:
        """SIGKILL a worker and whatever it has started."""
        process = self.alive.get(worker)
        if process is not None:
            kill_session(process.pid)

    async def empty(self, timeout_s: float) -> bool:
        """Wait until no worker is alive; false when that takes longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.alive:
                    self.changed.clear()
                    await self.changed.wait()
        return not self.alive
