"""What one node does: carries out the controller's orders with its workers, and reports what becomes of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.control import Control
from launcher.environment import Attempt
from launcher.link import Link
from launcher.logs import Mark, Relay
from launcher.orders import (
    Asked,
    AskEnded,
    C10dFailed,
    C10dLost,
    C10dOpened,
    Clear,
    Cleared,
    CloseC10d,
    Finish,
    ForkStandbys,
    Happened,
    KillWorker,
    OpenC10d,
    Order,
    RanksShown,
    Reply,
    Report,
    ShowRanks,
    StartRanked,
    Tell,
    UnderWay,
    WorkerSaid,
)
from launcher.pool import Pool
from launcher.process import Reaper, TemplateClient, TemplateError, describe_exit, describe_os_error
from launcher.streams import line_prefix
from launcher.torch_events import TorchEvents
from liverun.messages import Again, Go, Hello, Leave, Message, Stop, Unwind, Unwound

UNWIND_PATIENCE_S = 5.0
"""how long a restart waits for processes that it would keep; gloo may hold one for ever"""
LOOK_S = 0.2
"""how often it is looked whether a worker has come to the first c10d store"""


class Answers(Protocol):
    """Where lines for a command line go; an ``asyncio.StreamWriter`` is one."""

    def write(self, data: bytes) -> None:
        """Send lines."""
        ...

    async def drain(self) -> None:
        """Wait until they can go."""
        ...

    def is_closing(self) -> bool:
        """Whether nobody reads any more."""
        ...


@dataclass
class C10dStore:
    """The c10d store of one generation: a child process."""

    pid: int
    host: str
    port: int


def _not_ours(order: Order) -> None:
    raise AssertionError(order)


class Node:
    """The workers, sockets, logs and c10d stores of this node."""

    def __init__(
        self, *, pool: Pool, template: TemplateClient, reaper: Reaper, relay: Relay,
        report: Callable[[Report], None], trouble: Callable[[str], None],
        happened: Callable[[Mapping[str, Any]], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """``trouble`` is told of what makes this node useless, in one sentence; ``happened``, of the job's events."""
        self.pool = pool
        self.link: Link
        self.torch_events: TorchEvents | None = None
        self.finish: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self.voters: Mapping[str, Any] = {}
        self.voters_generation = 0
        """the nodes of the active world, as the controller has said"""
        self.generation = 0
        """the highest that a worker of this node was told of"""
        self.joined: set[str] = set()
        """workers that have called ``liverun.join()``"""
        self._keeping: set[str] = set()
        """those of them whose process can run its script again"""
        pool.rerun, pool.spawn = self._rerun, self.spawn
        self.beyond: Callable[[Order], None] = _not_ours
        """hears the orders that are for the agent itself"""
        self.asks: Callable[[Control, Answers], Coroutine[None, None, None]] | None = None
        """answers the command line, on the controller's own node"""
        self._template = template
        self._reaper = reaper
        self._relay = relay
        self._report = report
        self._trouble = trouble
        self._happened = happened
        self._say = say
        self._stores: dict[int, C10dStore] = {}
        self._given_port = pool.options.port
        self._shown: set[str] = set()
        self._marks: dict[str, Mark] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests = itertools.count(1)
        self._waiting: dict[int, tuple[Answers, asyncio.Event]] = {}

    def belong_to(self, report: Callable[[Report], None], trouble: Callable[[str], None]) -> None:
        """Report to someone else from here on."""
        self._report = self.pool.tell = report
        self._trouble = trouble

    # --- what comes in from workers and the command line (launcher.link.Behind) -----------------------------

    async def expects(self, worker: str) -> bool:
        """Whether a worker of that id is alive."""
        return await self.pool.expects(worker)

    def said(self, worker: str, message: Message) -> None:
        """Hear a worker's message."""
        if isinstance(message, Hello):
            self.joined.add(worker)
            self.pool.joined(worker)
            if message.keeps:
                self._keeping.add(worker)
        elif isinstance(message, Unwound):
            self.pool.waits(worker)
            return
        self._report(WorkerSaid(worker=worker, message=json.loads(message.encode())))

    async def asked(self, request: Control, writer: Answers) -> None:
        """Have a command line answered."""
        if self.asks is not None:
            await self.asks(request, writer)
            return
        number, done = next(self._requests), asyncio.Event()
        self._waiting[number] = (writer, done)
        self._report(Asked(request=number, control=request.values()))
        try:
            await done.wait()
            await writer.drain()
        finally:
            del self._waiting[number]
            self._report(AskEnded(request=number))

    def trouble(self, sentence: str) -> None:
        """Hear that something is wrong with a peer."""
        self._say(sentence)

    # --- orders ---------------------------------------------------------------------------------------------

    def do(self, order: Order) -> None:
        """Carry out an order; what takes time goes on beside."""
        match order:
            case Tell():
                message = Message.decode(json.dumps(order.message).encode())
                self.generation = max(self.generation, getattr(message, "generation", 0))
                if isinstance(message, Go) and order.worker not in self._shown:
                    # what a joiner prints from here on belongs to its rank
                    self._marks[order.worker] = Relay.mark(self.pool.log_folder(order.worker))
                self.link.send(order.worker, message)
            case StartRanked():
                self.spawn(self._start_ranked(order, self.pool.era))
            case ForkStandbys():
                self.spawn(self._fork(order.count, self.pool.era))
            case KillWorker():
                self._say(f"killing worker {order.worker}: {order.reason}")
                self.pool.kill(order.worker)
            case OpenC10d():
                self.spawn(self._open_store(order.generation))
            case CloseC10d():
                self._close_store(order.generation)
            case ShowRanks():
                self._show_ranks(order)
            case Clear():
                self._say(order.reason)
                self.spawn(self._clear(order))
            case Finish():
                if not self.finish.done():
                    self.finish.set_result(order)
            case Reply():
                self._reply(order)
            case Happened():
                self._happened(order.event)
            case _:
                self.beyond(order)

    def spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run something beside; a failure of it is trouble for the node."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._trouble(str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}")

    def ranked(self) -> list[str]:
        """Return the workers that have, or are started with, a rank."""
        return [worker for worker in self.pool.alive if worker in self._shown]

    def stop_standbys(self, reason: str) -> None:
        """Tell every worker that has joined to end; one with a rank does at its next boundary."""
        for worker in self.joined & self.pool.alive.keys():
            self.link.send(worker, Stop(reason=reason))

    async def _start_ranked(self, order: StartRanked, era: int) -> None:
        attempt = Attempt(
            host=order.host, port=order.port, first_rank=order.first_rank, count=order.count, size=order.size,
            node_rank=order.node_rank, num_nodes=order.num_nodes, restarts=order.restarts,
        )  # fmt: skip
        await self.pool.begin(attempt)
        options, filtered = self.pool.options, self.pool.destinations.filtered
        for name, words in (("stdout", options.stdout_filters), ("stderr", options.stderr_filters)):
            if name in filtered:
                try:
                    self._relay.copy(name, filtered[name], words)
                except OSError as error:
                    self._say(f"lines are not copied: {describe_os_error(error)}")
        for local_rank in range(order.count):
            worker = await self.pool.start(local_rank, era)
            if worker is None:
                return
            rank = order.first_rank + local_rank
            self._show(worker, rank, size=order.size)
            if self.torch_events is not None:
                self.torch_events.worker("START", worker=worker, rank=rank, restarts=order.restarts)

    async def _fork(self, count: int, era: int) -> None:
        for _ in range(count):
            if self.finish.done():
                return
            await self.pool.start(None, era)

    async def _open_store(self, generation: int) -> None:
        if generation != 0 and (first := self._stores.pop(0, None)) is not None:
            self._stores[generation] = first  # the first world's store is there already
            self._report(C10dOpened(generation=generation, host=first.host, port=first.port))
            return
        port, self._given_port = (self._given_port, 0) if generation == 0 else (0, self._given_port)
        if generation == 0:
            self.pool.rendezvous.unlink(missing_ok=True)
        try:
            store = await self._new_store(port, used=self.pool.rendezvous if generation == 0 else None)
        except TemplateError as error:
            self._report(C10dFailed(generation=generation, reason=str(error)))
            return
        self._stores[generation] = store
        self._report(C10dOpened(generation=generation, host=store.host, port=store.port))
        if generation == 0:
            self.spawn(self._look(self.pool.rendezvous))

    async def _new_store(self, port: int, used: Path | None) -> C10dStore:
        host = self.pool.options.host
        answer = await self._template.ask({"op": "store", "host": host, "port": port, "used": used and str(used)})
        store = C10dStore(int(answer["pid"]), host, int(answer["port"]))
        self._reaper.expect(store.pid, lambda code: self._store_ended(store, code))
        return store

    def _store_ended(self, store: C10dStore, code: int) -> None:
        """Say that a c10d store has ended by itself, and do what can be done without harm.

        One that nobody has come to yet is replaced at its place. A generation that is being prepared on it is
        aborted. A world that is built does not need it any more: it trains on, and the next one has its own.
        """
        generation = next((number for number, known in self._stores.items() if known is store), None)
        if generation is None or self.finish.done():
            return
        reason = f"the c10d store at {store.host}:{store.port} (pid {store.pid}) ended: {describe_exit(code)}"
        del self._stores[generation]
        if generation == 0 and not self.pool.rendezvous.exists():
            reason += "; no worker had come to it, and it is replaced"
            self.spawn(self._replace_store(store.port))
        self._say(reason)
        self._report(C10dLost(generation=generation, reason=reason))

    async def _replace_store(self, port: int) -> None:
        self._stores[0] = await self._new_store(port, used=self.pool.rendezvous)

    async def _look(self, used: Path) -> None:
        """Report once a worker has come to the first world's store."""
        while not used.exists():  # noqa: ASYNC110, ASYNC240  (another process makes it)
            await asyncio.sleep(LOOK_S)
        self._report(UnderWay(restarts=self.pool.restarts))

    def _close_store(self, generation: int) -> None:
        store = self._stores.pop(generation, None)
        if store is not None:
            with suppress(ProcessLookupError):
                os.kill(store.pid, signal.SIGKILL)

    def _show_ranks(self, order: ShowRanks) -> None:
        self.voters, self.voters_generation = order.nodes, order.generation
        self._report(RanksShown(generation=order.generation))
        for worker in list(self._shown):
            if worker not in order.ranks:
                self._relay.leave(worker)
                self._shown.discard(worker)
        for worker, rank in order.ranks.items():
            self._show(worker, rank, size=order.size)

    def _show(self, worker: str, rank: int, *, size: int) -> None:
        options, placed = self.pool.options, self.pool.destinations.of(worker)
        if options.ranks is not None and rank not in options.ranks:
            self._relay.leave(worker)
            self._shown.discard(worker)
            return
        header = line_prefix(
            options.prefix_template, role=options.role, rank=rank, local_rank=placed.local_rank
        )
        prefix = "" if size == 1 and options.prefix_template is None else header
        since = self._marks.pop(worker, (placed.sizes["stdout"], placed.sizes["stderr"]))
        self._shown.add(worker)
        self._relay.follow(
            worker, self.pool.log_folder(worker), prefix, since,
            shown=placed.shown, teed=placed.teed, tee_prefix=header,
        )  # fmt: skip

    def _rerun(self, worker: str, task: Again) -> None:
        self.link.send(worker, task)

    def let_go(self) -> None:
        """Let processes end that wait for a next attempt: none will come."""
        self.pool.end_era()
        for worker, process in self.pool.alive.items():
            if process.waits:
                self.link.send(worker, Leave())

    async def _clear(self, order: Clear) -> None:
        """End the workers of an attempt; those that can run again, only as far as that.

        One of those that does not come to its end is soon asked by SIGTERM as the others are, and has their time.
        """
        pool, grace_s = self.pool, self.pool.options.shutdown_timeout_s
        patience_s = min(UNWIND_PATIENCE_S, grace_s / 2) if order.keep else 0.0
        pool.end_era()
        again = [worker for worker in pool.busy if order.keep and pool.keeps and worker in self._keeping]
        if again:
            self.close_stores()  # who waits there for a peer waits no longer
        for worker in again:
            self.link.send(worker, Unwind(reason=order.reason))
        for worker in pool.alive.keys() - set(again):
            if not order.keep or not pool.alive[worker].waits:
                pool.signal(worker, signal.SIGTERM)
        await pool.empty(patience_s, but_waiting=order.keep)
        for worker in set(again) & set(pool.busy):
            self._say(f"worker {worker} has not left its script in {patience_s:g} s; it gets a new process")
            pool.signal(worker, signal.SIGTERM)
        await pool.empty(grace_s - patience_s, but_waiting=order.keep)
        for worker in list(pool.busy) if order.keep else list(pool.alive):
            pool.kill(worker)
        await pool.empty(30.0, but_waiting=order.keep)
        for worker in list(self._shown):
            self._relay.leave(worker)
        self._shown.clear()
        self.close_stores()
        self._report(Cleared(kept=tuple(sorted(process.pid for process in pool.alive.values() if process.waits))))

    def close_stores(self) -> None:
        """End the c10d stores of this node."""
        for generation in list(self._stores):
            self._close_store(generation)

    def _reply(self, order: Reply) -> None:
        if order.request in self._waiting:
            writer, done = self._waiting[order.request]
            if order.line and not writer.is_closing():
                writer.write(order.line.encode())
            if not order.line:
                done.set()
