"""``liverun run``: the agent of a node, from its first line to the sweep that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import math
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from launcher.controller import Controller
from launcher.entry import Entry, Promoted
from launcher.events import EventLog, rfc3339
from launcher.handover import load_state
from launcher.link import Link
from launcher.logs import Relay
from launcher.model import End, JobState, NodeLeaving
from launcher.node import Node
from launcher.notices import EXIT_PREEMPTED, Notice
from launcher.options import RunOptions, count_cpus, keeps_processes, omp_threads
from launcher.orders import Enter, Finish, Report, TakeOver
from launcher.outcome import write_outcome
from launcher.pool import Pool
from launcher.process import Reaper, TemplateClient, describe_os_error, sweep
from launcher.report import first_failure, read_error
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
    """Run a job, or this node's share of it, to its end; the exit code. Raises ``JobError`` if it cannot begin."""
    with contextlib.ExitStack() as left_open:
        try:
            return asyncio.run(_quietly(options, command, left_open))
        finally:
            left = sweep()
            if left:
                say(f"processes {left} could not be killed")


async def _quietly(options: RunOptions, command: Sequence[str], left_open: contextlib.ExitStack) -> int:
    """Run it, and hear no signal any more once it is over: the loop that handles them is about to go."""
    try:
        return await _run(options, command, left_open)
    finally:
        numbers = {signal.SIGCHLD, *_handled(options)}
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number in numbers:
            asyncio.get_running_loop().remove_signal_handler(number)


def _handled(options: RunOptions) -> set[signal.Signals]:
    """Return the signals that an agent acts on."""
    notice = {options.notice_signal} if options.notice_signal is not None else set()
    return {*options.signals, *FORWARDED_SIGNALS, *notice}


async def _run(options: RunOptions, command: Sequence[str], left_open: contextlib.ExitStack) -> int:
    if options.meeting is None:
        entry = Entry(job=options.job or fresh_job_id(), host=options.host)
    else:
        from launcher.entering import enter

        entry = await enter(options, options.meeting, os.geteuid())
        options = dataclasses.replace(options, host=entry.host)
    try:
        folder = JobFolder.create(
            options.root, entry.job, os.geteuid(), keep=options.keep_runs, shared=options.meeting is not None
        )
    except OSError as error:
        raise unusable(error, options.root) from None
    left_open.callback(folder.close)
    while True:
        agent: Agent
        if entry.controller is None:
            agent = Leader(options, command, entry, folder)
        else:
            from launcher.member import Member

            agent = Member(options, command, entry, folder)
        done = await agent.run()
        if isinstance(done, Promoted):
            done = await Leader(options, command, done.entry, folder).take_over(agent, done.node, done.unconfirmed)
        if isinstance(done, int):
            return done
        entry = done


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
    """What every agent has: its node's parts, signals, records, and the way to the end of all that."""

    def __init__(self, options: RunOptions, command: Sequence[str], entry: Entry, folder: JobFolder) -> None:
        self._options = with_timer_file(options, folder.path)
        self._entry = entry
        self._job = entry.job
        self._folder = folder
        self._signals: asyncio.Queue[signal.Signals | Notice] = asyncio.Queue()
        self._received: list[signal.Signals] = []
        self._notice: Notice | None = None
        self._gone_at = math.inf
        """when the node is gone, by the notice; monotonic"""
        self._record = JobRecord(
            id=folder.path.name, pid=os.getpid(), uid=os.geteuid(), state="starting", started=rfc3339(time.time()),
            command=list(command), socket=str(folder.socket_path),
        )  # fmt: skip
        self._agent_name = f"{entry.host}:{self._record.pid}"
        self._written = True

    def _set_up(self) -> None:
        """Make the parts of this node. Raises ``JobError`` when the run folder is of no use."""
        options, folder = self._options, self._folder
        loop = asyncio.get_running_loop()
        reaper = Reaper()
        reaper.start()
        for number in _handled(options):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        threads = omp_threads(options.environ, options.nproc + options.standbys, count_cpus())
        forks = not options.fresh and options.mode != "program"
        shared = {name: value for name, value in options.environ.items() if not name.startswith("LIVERUN_TOKEN")}
        template_environ = {**shared, "LIVERUN_PRELOAD": options.preload or ("" if forks else "none")}
        if threads is not None:
            template_environ["OMP_NUM_THREADS"] = str(threads)  # read once, when torch is loaded
        self._template = TemplateClient(
            reaper, job=self._job, environ=template_environ, log=folder.path / "logs" / "template.log"
        )
        try:
            chatty = say if options.log_level < logging.WARNING else None
            self._events = EventLog(folder.path / "events.jsonl", time.time, trouble=say, told=chatty)
            self._folder.write_record(dataclasses.replace(self._record, state="running"))
            (folder.path / "logs" / "template.log").touch(mode=0o600)
            self._open_store()
        except (OSError, sqlite3.Error, StoreError) as error:
            told = unusable(error, folder.path)
            self._written = False  # one sentence is enough
            self._write("failed", exit_code=told.exit_code)
            raise told from None
        self._relay = Relay(sys.stdout.buffer, sys.stderr.buffer, options.monitor_interval_s, trouble=say)
        self._pool = Pool(
            options, job=self._job, folder=folder, template=self._template, reaper=reaper, threads=threads,
            tell=self._reported,
        )  # fmt: skip
        self._node = Node(
            pool=self._pool, template=self._template, reaper=reaper, relay=self._relay, report=self._reported,
            trouble=self._trouble, happened=self._events.append, say=say,
        )  # fmt: skip
        self._node.link = Link(folder.socket_path, self._node, uid=os.geteuid())
        if options.console_events:
            self._node.torch_events = monotonic_events(options, self._job, tell)
        self._threads = threads
        self._watches = Watches(
            options, pool=self._pool, say=say, fail=self._trouble, noticed=self._signals.put_nowait
        )

    async def run(self) -> int | Entry | Promoted:
        """Do this agent's part; the exit code, or how to go on when the job's controller has become another one."""
        raise NotImplementedError

    async def _take_apart(self) -> None:
        """End the workers and everything else of this node that an agent sets up; the run folder stays."""
        self._pool.end_era()
        for worker in list(self._pool.alive):
            self._pool.kill(worker)
        await self._pool.empty(10.0)
        self._node.close_stores()
        await self._node.link.close()
        self._folder.socket_path.unlink(missing_ok=True)
        await self._watches.stop()
        self._template.close()
        self._relay.finish()
        self._events.close()

    async def _begin(self, what: str) -> None:
        await self._node.link.start()
        await self._watches.start()
        self._write("running")
        level = self._options.log_level
        say(f"job {self._job}: {what}; run folder {self._folder.path}", level)
        if self._threads is not None:
            say(f"OMP_NUM_THREADS={self._threads} for each worker (cores shared out; set it to change that)", level)
        self._relay.start()

    def _open_store(self) -> None:
        """Open what the job's store needs in the run folder, where it lies there."""

    def _reported(self, report: Report) -> None:
        """Pass a report of this node on to the controller."""
        raise NotImplementedError

    def _trouble(self, reason: str) -> None:
        """Hear why this node is of no use."""
        raise NotImplementedError

    def _asked_to_end(self, number: signal.Signals) -> None:
        """Act on the first signal that means so."""
        raise NotImplementedError

    def _noticed(self, notice: Notice) -> None:
        """Act on the first notice, if nobody has asked for the end before."""
        raise NotImplementedError

    def _take_notice(self, notice: Notice) -> None:
        """Write it down at once, whatever the workers are doing, and act on it; a second one changes nothing."""
        if self._notice is not None or self._received:
            return
        self._notice = notice
        self._gone_at = time.monotonic() + notice.deadline_s
        say(f"notice: {notice.reason}; this node has {notice.deadline_s:g} s")
        self._events.write(
            "notice", self._node.generation, notice.reason,
            {"source": notice.source, "deadline_s": round(notice.deadline_s, 3)},
        )  # fmt: skip
        self._noticed(notice)

    async def _on_signals(self) -> None:
        """Act on what the handlers and sources recorded: the first ends this node's part, a second Ctrl-C at once."""
        while True:
            number = await self._signals.get()
            if number is self._options.notice_signal:
                patience_s = self._options.shutdown_timeout_s
                number = Notice(source="signal", reason=f"{number.name} means a notice", deadline_s=patience_s)
            if isinstance(number, Notice):
                self._take_notice(number)
                continue
            if number not in self._options.signals:
                for worker in self._node.ranked():
                    self._pool.signal(worker, number)
                continue
            again = number in self._received
            self._received.append(number)
            if len(self._received) == 1 and self._notice is None:
                self._asked_to_end(number)
            elif number is signal.SIGINT and again:
                say("SIGINT again: killing the workers")
                for worker in list(self._pool.alive):
                    self._pool.kill(worker)

    async def _wind_down(self, outcome: str) -> None:
        """End whatever is left: Stop was sent to workers that joined; then signals, then SIGKILL to all."""
        pool, joined = self._pool, self._node.joined
        self._node.let_go()
        grace_s = self._options.shutdown_timeout_s
        parts = (0.25, 0.25)  # of it, for Stop and for SIGTERM; half went into finding a common last step
        if self._notice is not None:
            grace_s = max(1.0, self._gone_at - time.monotonic())
            parts = (0.7, 0.2)  # a checkpoint may be written in the first
        if outcome == "finished":
            await pool.empty(min(FINISH_GRACE_S, grace_s))
        else:
            first = self._received[0] if self._received and outcome != "failed" else signal.SIGTERM
            for worker in list(pool.alive):
                if outcome == "failed" or worker not in joined:
                    pool.signal(worker, first)
            if outcome != "failed" and joined:
                if await pool.empty(grace_s * parts[0]):
                    return
                for worker in list(pool.alive):
                    pool.signal(worker, signal.SIGTERM)
                await pool.empty(grace_s * parts[1])
            else:
                await pool.empty(grace_s)
        for worker in list(pool.alive):
            pool.kill(worker)
        await pool.empty(10.0)

    def _report(self, end: End | Finish) -> int:
        """Say how it ended; the exit code."""
        if end.outcome == "finished":
            return 0
        if end.outcome in ("stopped", "left"):
            number = self._received[0] if self._received else None
            what = "stopped" if end.outcome == "stopped" else "goes on without this node"
            say(f"job {self._job} {what}: {end.reason}")
            if self._notice is not None:
                return EXIT_PREEMPTED
            if number is None:
                return EXIT_PREEMPTED if end.requeue else 0
            return 128 + number
        say(f"job {self._job} {'failed' if end.outcome == 'failed' else 'does not take this node'}: {end.reason}")
        for line in first_failure(end):
            say(line)
        return EXIT_HOPELESS if end.hopeless else 1

    async def _close(self, end: End | Finish, last: Mapping[str, object]) -> int:
        """Take this node apart; the exit code."""
        await self._node.link.close()
        await self._watches.stop()
        self._template.close()
        self._relay.finish()
        code = self._report(end)
        if self._node.torch_events is not None:
            self._report_to_torch(self._node.torch_events, end)
        write_outcome(self._options.environ, end, self._pool)
        self._pool.rendezvous.unlink(missing_ok=True)
        state_word = {"finished": "finished", "failed": "failed"}.get(end.outcome, "stopped")
        try:
            write_json(
                self._folder.path / "status.json",
                ended_status(dict(last), state=state_word, reason=end.reason, exit_code=code),
            )
        except OSError as error:
            say(f"the last status cannot be written: {describe_os_error(error)}")
        self._events.close()
        self._write(state_word, exit_code=code)
        return code

    def _report_to_torch(self, events: TorchEvents, end: End | Finish) -> None:
        """Print the events torch prints at the end: one of each worker of the last attempt, one of the agent."""
        pool = self._pool
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


class Leader(Agent):
    """The agent that has the controller; of a job of one node, the only one."""

    def _open_store(self) -> None:
        self._own: EmbeddedStore | None = None
        if self._entry.restored is not None:
            self._own = EmbeddedStore.on(self._entry.restored)
        elif self._entry.store is None:
            self._own = EmbeddedStore(self._folder.path / "store.db", clock=time.monotonic)

    async def run(self) -> int | Entry:
        """Run the job; the exit code, or how to go on after another agent has brought the store back elsewhere."""
        self._set_up()
        options, meeting = self._options, self._options.meeting
        state = JobState(
            layout=options.layout, max_restarts=options.max_restarts, movable=self._own is not None,
            saves=options.checkpoint_dir is not None, keeps=keeps_processes(options),
            stop_patience_s=options.shutdown_timeout_s / 2,
        )  # fmt: skip
        if meeting is not None:
            state = dataclasses.replace(
                state, min_nodes=meeting.min_nodes, max_nodes=meeting.max_nodes,
                join_timeout_s=meeting.join_timeout_s, last_call_s=meeting.last_call_s,
            )  # fmt: skip
        count = _count(options.nproc, "worker")
        if options.standbys:
            count += f", {_count(options.standbys, 'standby')}"
        if meeting is not None:
            count += f" on this node, of {meeting.min_nodes} to {meeting.max_nodes} nodes"
        self._events.write("started", 0, f"job {self._job}: {count}", {"command": list(self._record.command)})
        self._control(state)
        await self._begin(count)
        try:
            await self._controller.start()
        except StoreError as error:
            self._controller.fail(str(error))
        pin = meeting.pin if meeting is not None else None
        offer = Enter(
            host=options.host, nproc=options.nproc, standbys=options.standbys, pin=pin, agent=self._agent_name
        )
        self._id = self._controller.enter(self._node.do, offer, leads=True)
        self._pool.prefix = "" if self._id == "n0" else f"{self._id}."
        return await self._lead()

    async def take_over(self, member: Agent, node: str, unconfirmed: list[Report]) -> int | Entry:
        """Lead a job that goes on: this agent was a member of it, and its node lives on."""
        taken = self._entry.taken
        assert taken is not None
        for name in (
            "_signals", "_received", "_notice", "_gone_at", "_record", "_written", "_template", "_events", "_relay",
            "_pool", "_node", "_threads", "_watches",
        ):  # fmt: skip
            setattr(self, name, getattr(member, name))
        self._open_store()
        self._id = node
        self._control(load_state(taken.state, leads=node, now=time.monotonic()))
        self._node.belong_to(self._reported, self._trouble)
        self._watches.fail = self._trouble
        self._controller.reach(node, self._node.do)
        assert self._own is not None
        following = await self._own.get("node/next")
        return await self._lead(taken, int(following.value) if following is not None else 0, unconfirmed)

    def _control(self, state: JobState) -> None:
        store, leading = self._own or self._entry.store, self._entry.leading
        assert store is not None
        self._controller = Controller(state, job=self._job, store=store, events=self._events, say=say)
        if leading is not None:
            self._controller.keep_leading(leading)
        self._node.asks = self._controller.asked

    async def _lead(
        self, taken: TakeOver | None = None, node_ids: int = 0, unconfirmed: Sequence[Report] = ()
    ) -> int | Entry:
        controller = self._controller
        async with self._doors():
            if taken is not None:
                controller.adopt(taken, node_ids)
                for report in unconfirmed:
                    controller.heard(self._id, report)
            running = controller.spawn(controller.run())
            signals = controller.spawn(self._on_signals())
            await controller.ended.wait()
            end = controller.end
            if end is None:
                for task in (running, signals):
                    task.cancel()
                return await self._follow()
            self._write("stopping")
            last = controller.status()
            if end.outcome == "left":
                self._node.stop_standbys(end.reason)
            else:
                controller.finish(end, last, but=self._id)
            self._node.finish.set_result(Finish(outcome=end.outcome, reason=end.reason))
            await self._wind_down(end.outcome)
            for task in (running, signals):
                task.cancel()
        code = await self._close(end, last)
        if self._own is not None:
            self._own.close()
        return code

    async def _follow(self) -> Entry:
        """Become a node of the job whose controller, or store as well, is elsewhere now."""
        from launcher.entering import enter_elsewhere

        meeting, place, entry = self._options.meeting, self._controller.superseded, self._entry
        assert meeting is not None
        assert entry.token is not None
        why = "another agent has led the job" if place is None else f"the store was brought back at {place}"
        say(f"{why} while this node was cut off: its workers end, and it comes anew")
        await self._take_apart()
        if self._own is not None:
            self._own.close()
        if place is not None:
            meeting = dataclasses.replace(meeting, host=place.host, port=place.port)
        return await enter_elsewhere(self._options, meeting, entry.name, entry.token)

    @contextlib.asynccontextmanager
    async def _doors(self) -> AsyncIterator[None]:
        """Serve store and controller to other nodes, where there may be any; the store leaves last."""
        entry, meeting = self._entry, self._options.meeting
        if meeting is None:
            yield
            return
        from launcher.doors import doors

        patience_s = self._options.shutdown_timeout_s + 5
        async with doors(
            self._controller, entry, self._own, meeting, own_name=self._agent_name, patience_s=patience_s
        ):
            yield

    def _reported(self, report: Report) -> None:
        self._controller.heard(self._id, report)

    def _trouble(self, reason: str) -> None:
        self._controller.fail(reason)

    def _asked_to_end(self, number: signal.Signals) -> None:
        if not self._controller.ended.is_set():
            say(f"{number.name}: the workers have {self._options.shutdown_timeout_s:g} s to end")
            self._controller.tell(
                NodeLeaving(node=self._id, reason=number.name, timeout_s=self._options.shutdown_timeout_s / 2)
            )

    def _noticed(self, notice: Notice) -> None:
        if not self._controller.ended.is_set():
            self._controller.tell(
                NodeLeaving(node=self._id, reason=notice.reason, timeout_s=notice.move_s, save=True)
            )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number > 1 else "")
