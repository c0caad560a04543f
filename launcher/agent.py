"""``liverun run``: the agent of a node, from its first line to the sweep that leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
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
from launcher.pool import Pool
from launcher.process import Reaper, TemplateClient, describe_exit, last_lines, sweep
from launcher.rundir import JobFolder, JobRecord, fresh_job_id, write_json
from launcher.status import ended_status
from launcher.store import EmbeddedStore

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""handed on to ranked workers, for the script to act on"""
FINISH_GRACE_S = 5.0
"""how long standbys may take to end once the ranked workers are done"""


def say(sentence: str) -> None:
    """Tell the user, on stderr."""
    try:
        sys.stderr.write(f"liverun: {sentence}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # a closed terminal must not end the job


def run_agent(options: RunOptions, command: Sequence[str]) -> int:
    """Run a job to its end; the exit code. Raises ``JobError`` if it cannot be started."""
    job = options.job or fresh_job_id()
    folder = JobFolder.create(options.root, job, os.geteuid())
    try:
        return asyncio.run(Agent(options, command, job, folder).run())
    finally:
        left = sweep()
        if left:
            say(f"processes {left} could not be killed")
        folder.close()


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
        self._events = EventLog(folder.path / "events.jsonl", time.time)

    async def run(self) -> int:
        """Run the job; the exit code."""
        options, folder = self._options, self._folder
        loop = asyncio.get_running_loop()
        reaper = Reaper()
        reaper.start()
        for number in (*ENDING_SIGNALS, *FORWARDED_SIGNALS):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        threads = omp_threads(options.environ, options.nproc + options.standbys, count_cpus())
        template_environ = {**options.environ, "LIVERUN_PRELOAD": options.preload}
        if threads is not None:
            template_environ["OMP_NUM_THREADS"] = str(threads)  # read once, when torch is loaded
        template = TemplateClient(
            reaper, job=self._job, environ=template_environ, log=folder.path / "logs" / "template.log"
        )
        store = EmbeddedStore(folder.path / "store.db", clock=time.monotonic)
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
        await link.start()
        self._write("running")
        count = f"{options.nproc} worker" + ("s" if options.nproc > 1 else "")
        count += (
            f", {options.standbys} standby" + ("s" if options.standbys > 1 else "")
            if options.standbys
            else ""
        )
        self._event("started", f"job {self._job}: {count}", command=list(self._record.command))
        say(f"job {self._job}: {count}; run folder {folder.path}")
        if threads is not None:
            say(f"OMP_NUM_THREADS={threads} for each worker (cores shared out; set it to change that)")
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
        template.close()
        relay.finish()
        code = self._report(end, pool)
        store.close()
        state_word = {"finished": "finished", "failed": "failed"}.get(end.outcome, "stopped")
        write_json(
            folder.path / "status.json",
            ended_status(last, state=state_word, reason=end.reason, exit_code=code),
        )
        self._events.close()
        self._write(state_word, exit_code=code)
        return code

    async def _on_signals(self, controller: Controller, pool: Pool) -> None:
        """Act on what the handlers recorded: the first signal ends the job, a second Ctrl-C at once."""
        while True:
            number = await self._signals.get()
            if number in FORWARDED_SIGNALS:
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
            path: Path = pool.log_folder(end.worker) / "stderr.log"
            tail = last_lines(path, 20)
            how = describe_exit(end.code or 0)
            say(f"first failure: worker {end.worker}, rank {end.rank}, {how}; its stderr is {path}")
            if tail:
                say("the last lines of it:")
                sys.stderr.write("".join(f"    {line}\n" for line in tail.splitlines()))
        return 1

    def _write(self, state: str, exit_code: int | None = None) -> None:
        ended = rfc3339(time.time()) if exit_code is not None else None
        self._record = dataclasses.replace(self._record, state=state, exit_code=exit_code, ended=ended)
        self._folder.write_record(self._record)

    def _event(self, kind: str, reason: str, **fields: object) -> None:
        self._events.write(kind, 0, reason, fields)
