"""``liverun run``: the agent of a node, from its first line to the sweep that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import shutil
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.controller import Controller
from launcher.events import EventLog, rfc3339
from launcher.link import Link
from launcher.logs import Relay
from launcher.model import End, JobState, StopAsked
from launcher.options import RunOptions, count_cpus, omp_threads
from launcher.outcome import write_outcome
from launcher.pool import Pool
from launcher.process import Reaper, TemplateClient, describe_os_error, sweep
from launcher.report import failure_lines, read_error
from launcher.rundir import JobError, JobFolder, JobRecord, fresh_job_id, write_json
from launcher.status import ended_status
from launcher.store import EmbeddedStore, StoreError
from launcher.torch_events import TorchEvents, monotonic_events
from launcher.watches import Watches, with_timer_file

EXIT_HOPELESS = 93
LEAST_FREE_BYTES = 256 * 1024
"""what the journal of a job needs to begin with"""
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""handed on to ranked workers, for the script to act on"""
FINISH_GRACE_S = 5.0
"""how long standbys may take to end once the ranked workers are done"""


def say(sentence: str, log_level: int = logging.WARNING) -> None:
    """Tell the user, on stderr; news and warnings come with the job's ``log_level``, which may be above them."""
    if log_level <= logging.WARNING:
        tell(f"liverun: {sentence}\n")


def tell(text: str) -> None:
    """Write to stderr."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # a closed terminal must not end the job


def run_agent(options: RunOptions, command: Sequence[str]) -> int:
    """Run a job to its end; the exit code. Raises ``JobError`` if it cannot be started."""
    job = options.job or fresh_job_id()
    try:
        folder = JobFolder.create(options.root, job, os.geteuid(), keep=options.keep_runs)
    except OSError as error:
        raise unusable(error, options.root) from None
    try:
        return asyncio.run(Agent(options, command, job, folder).run())
    finally:
        left = sweep()
        if left:
            say(f"processes {left} could not be killed")
        folder.close()


def unusable(error: OSError | sqlite3.Error | StoreError, path: Path) -> JobError:
    """Say that a run folder cannot be used; exit code 77 where it is not allowed, else 1."""
    errno_ = error.errno if isinstance(error, OSError) else None
    what = describe_os_error(error) if isinstance(error, OSError) else f"{path}: {error}"
    with contextlib.suppress(OSError):
        if not isinstance(error, OSError) and shutil.disk_usage(path).free < LEAST_FREE_BYTES:
            what = f"{path}: {os.strerror(errno.ENOSPC)}"  # SQLite calls it an I/O error
    code = 77 if errno_ in (errno.EACCES, errno.EPERM, errno.EROFS) else 1
    return JobError(f"the run folder cannot be used: {what}; choose another place with --run-dir", code)


class Agent:
    """Puts the parts together, waits for the end, and brings it about."""

    def __init__(self, options: RunOptions, command: Sequence[str], job: str, folder: JobFolder) -> None:
        self._options = options
        self._job = job
        self._folder = folder
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._received: list[signal.Signals] = []
        self._record = JobRecord(
            id=job, pid=os.getpid(), uid=os.geteuid(), state="starting", started=rfc3339(time.time()),
            command=list(command), socket=str(folder.socket_path),
        )  # fmt: skip
        self._written = True

    async def run(self) -> int:
        """Run the job; the exit code."""
        folder = self._folder
        options = self._options = with_timer_file(self._options, folder.path)
        loop = asyncio.get_running_loop()
        reaper = Reaper()
        reaper.start()
        for number in {*options.signals, *FORWARDED_SIGNALS}:
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        threads = omp_threads(options.environ, options.nproc + options.standbys, count_cpus())
        forks = not options.fresh and options.mode != "program"
        template_environ = {**options.environ, "LIVERUN_PRELOAD": options.preload or ("" if forks else "none")}
        if threads is not None:
            template_environ["OMP_NUM_THREADS"] = str(threads)  # read once, when torch is loaded
        template = TemplateClient(
            reaper, job=self._job, environ=template_environ, log=folder.path / "logs" / "template.log"
        )
        try:
            chatty = say if options.log_level < logging.WARNING else None
            self._events = EventLog(folder.path / "events.jsonl", time.time, trouble=say, told=chatty)
            self._folder.write_record(dataclasses.replace(self._record, state="running"))
            (folder.path / "logs" / "template.log").touch(mode=0o600)
            store = EmbeddedStore(folder.path / "store.db", clock=time.monotonic)
        except (OSError, sqlite3.Error, StoreError) as error:
            told = unusable(error, folder.path)
            self._written = False  # one sentence is enough
            self._write("failed", exit_code=told.exit_code)
            raise told from None
        relay = Relay(sys.stdout.buffer, sys.stderr.buffer, options.monitor_interval_s, trouble=say)
        state = JobState(
            nproc=options.nproc, standbys=options.standbys, host=options.host, layout=options.layout,
            max_restarts=options.max_restarts, stop_patience_s=options.shutdown_timeout_s / 2,
        )  # fmt: skip
        controller = Controller(
            state, job=self._job, store=store, template=template, reaper=reaper, events=self._events,
            relay=relay,
            say=say,
        )  # fmt: skip
        controller.pool = pool = Pool(
            options, job=self._job, folder=folder, template=template, reaper=reaper, threads=threads,
            tell=controller.tell,
        )  # fmt: skip
        controller.link = link = Link(folder.socket_path, controller, uid=os.geteuid())
        if options.console_events:
            controller.torch_events = monotonic_events(options, self._job, tell)
        await link.start()
        watches = Watches(options, pool=pool, say=say, fail=controller.fail)
        await watches.start()
        self._write("running")
        count = f"{options.nproc} worker" + ("s" if options.nproc > 1 else "")
        count += (
            f", {options.standbys} standby" + ("s" if options.standbys > 1 else "")
            if options.standbys
            else ""
        )
        self._event("started", f"job {self._job}: {count}", command=list(self._record.command))
        say(f"job {self._job}: {count}; run folder {folder.path}", options.log_level)
        if threads is not None:
            sentence = f"OMP_NUM_THREADS={threads} for each worker (cores shared out; set it to change that)"
            say(sentence, options.log_level)
        relay.start()
        running = controller.spawn(controller.run())
        signals = controller.spawn(self._on_signals(controller, pool))
        starting = controller.spawn(controller.start(options.port))
        await controller.ended.wait()
        end = controller.end
        assert end is not None
        starting.cancel()
        self._write("stopping")
        await self._wind_down(end, pool, {w.id for w in controller.state.workers.values() if w.joined})
        last = controller.status()
        for task in (running, signals):
            task.cancel()
        await link.close()
        await watches.stop()
        template.close()
        relay.finish()
        code = self._report(end, pool)
        if controller.torch_events is not None:
            self._report_to_torch(controller.torch_events, end, pool)
        write_outcome(options.environ, end, pool)
        pool.rendezvous.unlink(missing_ok=True)
        store.close()
        state_word = {"finished": "finished", "failed": "failed"}.get(end.outcome, "stopped")
        try:
            write_json(
                folder.path / "status.json",
                ended_status(last, state=state_word, reason=end.reason, exit_code=code),
            )
        except OSError as error:
            say(f"the last status cannot be written: {describe_os_error(error)}")
        self._events.close()
        self._write(state_word, exit_code=code)
        return code

    async def _on_signals(self, controller: Controller, pool: Pool) -> None:
        """Act on what the handlers recorded: the first signal ends the job, a second Ctrl-C at once."""
        while True:
            number = await self._signals.get()
            if number not in self._options.signals:
                for worker in controller.ranked():
                    pool.signal(worker, number)
                continue
            again = number in self._received
            self._received.append(number)
            if len(self._received) == 1 and not controller.ended.is_set():
                say(f"{number.name}: the workers have {self._options.shutdown_timeout_s:g} s to end")
                controller.tell(StopAsked(reason=number.name))
            elif number is signal.SIGINT and again:
                say("SIGINT again: killing the workers")
                for worker in list(pool.alive):
                    pool.kill(worker)

    async def _wind_down(self, end: End, pool: Pool, joined: set[str]) -> None:
        """End whatever is left: Stop was sent to workers that joined; then signals, then SIGKILL to all."""
        grace_s = self._options.shutdown_timeout_s
        if end.outcome == "finished":
            await pool.empty(min(FINISH_GRACE_S, grace_s))
        else:
            first = self._received[0] if self._received and end.outcome == "stopped" else signal.SIGTERM
            for worker in pool.alive:
                if end.outcome == "failed" or worker not in joined:
                    pool.signal(worker, first)
            if end.outcome == "stopped" and joined:
                if await pool.empty(grace_s / 4):  # half went into finding a common last step
                    return
                for worker in list(pool.alive):
                    pool.signal(worker, signal.SIGTERM)
                await pool.empty(grace_s / 4)
            else:
                await pool.empty(grace_s)
        for worker in list(pool.alive):
            pool.kill(worker)
        await pool.empty(10.0)

    def _report(self, end: End, pool: Pool) -> int:
        """Say how it ended; the exit code."""
        if end.outcome == "finished":
            return 0
        if end.outcome == "stopped":
            number = self._received[0] if self._received else None
            say(f"job {self._job} stopped: {end.reason}")
            return 0 if number is None else 128 + number
        say(f"job {self._job} failed: {end.reason}")
        if end.worker is not None:
            placed = pool.destinations.of(end.worker)
            stderr: Path = placed.stderr
            ended = pool.ended.get(end.worker)
            for line in failure_lines(
                end, ended, host=socket.gethostname(), stderr=stderr, error=placed.error
            ):
                say(line)
        return EXIT_HOPELESS if end.hopeless else 1

    def _report_to_torch(self, events: TorchEvents, end: End, pool: Pool) -> None:
        """Print the events torch prints at the end: one of each worker of the last attempt, one of the agent."""
        for worker, ended in pool.of_last_attempt():
            by_itself = ended.code == 0 or worker == end.worker or end.outcome == "finished"
            state = ("SUCCEEDED" if ended.code == 0 else "FAILED") if by_itself else "TERMINATED"
            events.worker(
                state, worker=worker, rank=ended.process.boot_rank or 0, restarts=pool.restarts,
                pid=ended.process.pid, code=ended.code, error=read_error(pool.destinations.of(worker).error),
            )  # fmt: skip
        finished = end.outcome != "stopped"  # torch's agent has succeeded even if a worker has not
        events.agent("SUCCEEDED" if finished else "FAILED", restarts=pool.restarts, error=None)

    def _write(self, state: str, exit_code: int | None = None) -> None:
        ended = rfc3339(time.time()) if exit_code is not None else None
        self._record = dataclasses.replace(self._record, state=state, exit_code=exit_code, ended=ended)
        try:
            self._folder.write_record(self._record)
        except OSError as error:
            if self._written:
                say(f"the job's record cannot be written: {describe_os_error(error)}")
            self._written = False

    def _event(self, kind: str, reason: str, **fields: object) -> None:
        self._events.write(kind, 0, reason, fields)
