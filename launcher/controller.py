"""The shell around :func:`launcher.decide.decide`: feeds events in, one at a time, does what comes out."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, assert_never

from launcher.control import (
    Control,
    Note,
    Outcome,
    ResizeRequest,
    SaveRequest,
    StatusReply,
    StatusRequest,
    StopRequest,
)
from launcher.decide import decide, next_deadline
from launcher.environment import Endpoint
from launcher.events import EventLog
from launcher.link import Link
from launcher.logs import Mark, Relay
from launcher.model import (
    Action,
    Answer,
    CloseStore,
    Commit,
    Committed,
    End,
    Event,
    Fork,
    JobState,
    Kill,
    Number,
    Numbered,
    OpenStore,
    Record,
    Restart,
    Said,
    SaveAsked,
    Send,
    StopAsked,
    StoreFailed,
    StoreOpened,
    Tick,
    Wish,
    Wished,
)
from launcher.pool import Pool
from launcher.process import Reaper, TemplateClient, TemplateError, describe_os_error
from launcher.status import status_object
from launcher.store import Store, StoreError
from launcher.streams import line_prefix
from launcher.torch_events import TorchEvents
from liverun.layout import Layout
from liverun.messages import Go, Message


@dataclass
class WorldStore:
    """The c10d store of one generation: a child process."""

    pid: int
    host: str
    port: int


@dataclass
class Requester:
    """A command line that waits for the end of its wish."""

    writer: asyncio.StreamWriter
    asked_at: float
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Controller:
    """Holds the job's state. What must outlive it is in the store, under these keys.

    ``generation/next``        the number the next proposal gets; taken by compare-and-set, never given twice
    ``generation/<g>/world``   layout and worker ids of a generation that was committed
    ``job/active``             the generation that is the job; moved by compare-and-set only: older ones are
    fenced
    ``node/<id>``              address and agent of a node
    ``resize/last``            how the last resize went
    """

    def __init__(
        self,
        state: JobState,
        *,
        job: str,
        store: Store,
        template: TemplateClient,
        reaper: Reaper,
        events: EventLog,
        relay: Relay,
        say: Callable[[str], None],
    ) -> None:
        self.state = state
        self.job = job
        self.end: End | None = None
        self.ended = asyncio.Event()
        self._store = store
        self._template = template
        self._reaper = reaper
        self._events = events
        self._relay = relay
        self._say = say
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._stores: dict[int, WorldStore] = {}
        self._boot_store: WorldStore | None = None
        self._active_revision = 0
        self._wish_ids = itertools.count(1)
        self._requesters: dict[int, Requester] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._shown: set[str] = set()
        self._marks: dict[str, Mark] = {}
        self.torch_events: TorchEvents | None = None
        self.pool: Pool
        self.link: Link

    # --- what comes in --------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Something has happened."""
        self._queue.put_nowait(event)

    async def expects(self, worker: str) -> bool:
        """See :class:`launcher.link.Behind`."""
        return await self.pool.expects(worker)

    def said(self, worker: str, message: Message) -> None:
        """See :class:`launcher.link.Behind`."""
        self.tell(Said(worker=worker, message=message))

    def trouble(self, sentence: str) -> None:
        """See :class:`launcher.link.Behind`."""
        self._say(sentence)

    async def asked(self, request: Control, writer: asyncio.StreamWriter) -> None:
        """Answer the command line."""
        if isinstance(request, StatusRequest):
            writer.write(StatusReply(status=self.status()).encode())
            await writer.drain()
        elif isinstance(request, StopRequest):
            self.tell(StopAsked(reason="liverun stop"))
            await self.ended.wait()
            writer.write(Outcome(ok=True, outcome="stopping", reason="the workers are told to end").encode())
            await writer.drain()
            await asyncio.Event().wait()  # the connection closes with the job
        elif isinstance(request, ResizeRequest):
            await self._resize(request, writer)
        elif isinstance(request, SaveRequest):
            await self._save(request, writer)

    async def _save(self, request: SaveRequest, writer: asyncio.StreamWriter) -> None:
        if self.pool.options.checkpoint_dir is None:
            reason = "the job has no folder for checkpoints; start it with --checkpoint-dir"
            writer.write(Outcome(ok=False, outcome="refused", reason=reason).encode())
            return
        await self._until_answered(
            writer, lambda number: SaveAsked(request=number, timeout_s=request.timeout_s)
        )

    async def _until_answered(self, writer: asyncio.StreamWriter, event: Callable[[int], Event]) -> None:
        """Tell of a wish under a number of its own; returns once it is answered."""
        number = next(self._wish_ids)
        requester = Requester(writer, time.monotonic())
        self._requesters[number] = requester
        self.tell(event(number))
        try:
            await requester.done.wait()
            await writer.drain()
        finally:
            self._requesters.pop(number, None)

    async def _resize(self, request: ResizeRequest, writer: asyncio.StreamWriter) -> None:
        try:
            layout = Layout.parse(request.layout) if request.layout else None
        except ValueError as error:
            writer.write(Outcome(ok=False, outcome="refused", reason=str(error)).encode())
            return
        wish = Wish(
            id=next(self._wish_ids), workers=request.workers, layout=layout, replace=request.replace,
            timeout_s=request.timeout_s, cause=request.cause,
        )  # fmt: skip
        requester = Requester(writer, time.monotonic())
        self._requesters[wish.id] = requester
        self.tell(Wished(wish=wish))
        try:
            await requester.done.wait()
            await writer.drain()
        finally:
            self._requesters.pop(wish.id, None)

    def status(self) -> dict[str, Any]:
        """Return the status object."""
        return status_object(self.state, job=self.job, host=self.state.host, now=time.monotonic())

    def ranked(self) -> list[str]:
        """Return the ids of the workers that have a rank."""
        if self.state.world is not None:
            return list(self.state.world.ranks)
        return [worker.id for worker in self.state.workers.values() if worker.boot_rank is not None]

    # --- the loop -------------------------------------------------------------------------------------------

    async def start(self, port: int) -> None:
        """Start the first world's store and workers. Raises ``TemplateError``."""
        number = await self._store.get("generation/next")
        if number is None:
            await self._store.put("generation/next", "1")
        await self._store.put("node/n0", json.dumps({"host": self.state.host, "pid": os.getpid()}))
        await self._boot(port)

    async def _boot(self, port: int) -> None:
        self._boot_store = await self._new_store(port, used=self.pool.rendezvous)
        self.pool.endpoint = Endpoint(host=self._boot_store.host, port=self._boot_store.port)
        await self.pool.begin()
        options, filtered = self.pool.options, self.pool.destinations.filtered
        for name, words in (("stdout", options.stdout_filters), ("stderr", options.stderr_filters)):
            if name in filtered:
                try:
                    self._relay.copy(name, filtered[name], words)
                except OSError as error:
                    self._say(f"lines are not copied: {describe_os_error(error)}")
        for rank in range(self.state.nproc):
            worker = await self.pool.start(rank)
            self._show(worker, rank)
            if self.torch_events is not None:
                self.torch_events.worker("START", worker=worker, rank=rank, restarts=self.state.restarts)

    async def run(self) -> None:
        """Decide and act until the job ends; goes on recording exits after that, until cancelled."""
        while True:
            due = next_deadline(self.state)
            timeout = None if due is None else max(0.0, due - time.monotonic())
            try:
                async with asyncio.timeout(timeout):
                    event: Event = await self._queue.get()
            except TimeoutError:
                event = Tick()
            decision = decide(time.monotonic(), self.state, event)
            self.state = decision.state
            for action in decision.actions:
                await self._act(action)

    async def _act(self, action: Action) -> None:
        match action:
            case Send():
                if isinstance(action.message, Go) and action.worker not in self._shown:
                    # what a joiner prints from here on belongs to its rank
                    self._marks[action.worker] = Relay.mark(self.pool.log_folder(action.worker))
                self.link.send(action.worker, action.message)
            case Number():
                self.spawn(self._number())
            case OpenStore():
                self.spawn(self._open_store(action.generation))
            case CloseStore():
                self._close_store(action.generation)
            case Commit():
                await self._commit(action)
            case Record():
                self._record(action)
            case Answer():
                self._answer(action)
            case Fork():
                self.spawn(self._fork(action.count))
            case Kill():
                self._say(f"killing worker {action.worker}: {action.reason}")
                self.pool.kill(action.worker)
            case Restart():
                self._say(action.reason)
                self.spawn(self._restart())
            case End():
                self.end = action
                self.ended.set()
            case _:
                assert_never(action)

    def spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run something beside the loop; a failure of it ends the job and is told."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self.fail(str(error) if isinstance(error, TemplateError | StoreError) else f"{type(error).__name__}: {error}")

    def fail(self, reason: str) -> None:
        """End the job for a reason that no decision knows of; nothing is decided after that."""
        if self.end is None:
            self.end = End(outcome="failed", reason=reason)
            self.state = replace(self.state, phase="ending", reason=reason)
            generation = self.state.world.generation if self.state.world else 0
            self._events.write("worker_failed", generation, reason, {})
        self.ended.set()

    # --- what goes out --------------------------------------------------------------------------------------

    async def _number(self) -> None:
        while True:
            entry = await self._store.get("generation/next")
            assert entry is not None
            number = int(entry.value)
            taken = await self._store.compare_and_set(
                {"generation/next": entry.revision}, {"generation/next": str(number + 1)}
            )
            if taken is not None:
                self.tell(Numbered(generation=number))
                return

    async def _new_store(self, port: int = 0, used: Path | None = None) -> WorldStore:
        request = {"op": "store", "host": self.state.host, "port": port, "used": used and str(used)}
        answer = await self._template.ask(request)
        store = WorldStore(int(answer["pid"]), self.state.host, int(answer["port"]))
        self._reaper.expect(store.pid, lambda _: None)
        return store

    async def _open_store(self, generation: int) -> None:
        store, self._boot_store = self._boot_store, None
        try:
            if store is None:
                store = await self._new_store()
        except TemplateError as error:
            self.tell(StoreFailed(generation=generation, reason=str(error)))
            return
        self._stores[generation] = store
        self.tell(StoreOpened(generation=generation, host=store.host, port=store.port))

    def _close_store(self, generation: int) -> None:
        store = self._stores.pop(generation, None)
        if store is not None:
            with suppress(ProcessLookupError):
                os.kill(store.pid, signal.SIGKILL)

    async def _commit(self, action: Commit) -> None:
        world = action.world
        value = json.dumps({"layout": world.layout.as_dict(), "ranks": list(world.ranks)})
        revision = await self._store.compare_and_set(
            {"job/active": self._active_revision},
            {"job/active": str(world.generation), f"generation/{world.generation}/world": value},
        )
        if revision is not None:
            self._active_revision = revision
            old = self.state.world.ranks if self.state.world else ()
            for worker in old:
                if worker not in world.ranks:
                    self._relay.leave(worker)
                    self._shown.discard(worker)
            for rank, worker in enumerate(world.ranks):
                self._show(worker, rank, size=len(world.ranks))
        self.tell(Committed(generation=world.generation, won=revision is not None))

    def _show(self, worker: str, rank: int, *, size: int | None = None) -> None:
        alone = (size or self.state.nproc) == 1
        options, placed = self.pool.options, self.pool.destinations.of(worker)
        header = line_prefix(
            options.prefix_template, role=options.role, rank=rank, local_rank=placed.local_rank
        )
        prefix = "" if alone and options.prefix_template is None else header
        since = self._marks.pop(worker, (placed.sizes["stdout"], placed.sizes["stderr"]))
        self._shown.add(worker)
        self._relay.follow(
            worker, self.pool.log_folder(worker), prefix, since,
            shown=placed.shown, teed=placed.teed, tee_prefix=header,
        )  # fmt: skip

    def _record(self, action: Record) -> None:
        event = self._events.write(action.kind, action.generation, action.reason, action.fields)
        requester = self._requesters.get(action.wish) if action.wish is not None else None
        if requester is not None and not requester.writer.is_closing():
            elapsed_s = round(time.monotonic() - requester.asked_at, 3)
            requester.writer.write(Note(event=event, elapsed_s=elapsed_s).encode())

    def _answer(self, action: Answer) -> None:
        requester = self._requesters.get(action.wish)
        if requester is not None:
            outcome = Outcome(
                ok=action.ok, outcome=action.outcome, reason=action.reason, fields=action.fields
            )
            if not requester.writer.is_closing():
                requester.writer.write(outcome.encode())
            requester.done.set()
        if self.state.last_resize is not None:
            self.spawn(self._put_last(json.dumps(self.state.last_resize)))

    async def _put_last(self, value: str) -> None:
        await self._store.put("resize/last", value)

    async def _fork(self, count: int) -> None:
        for _ in range(count):
            if self.ended.is_set():
                return
            await self.pool.start(None)

    async def _restart(self) -> None:
        for worker in list(self.pool.alive):
            self.pool.signal(worker, signal.SIGTERM)
        await self.pool.empty(self.pool.options.shutdown_timeout_s)
        for worker in list(self.pool.alive):
            self.pool.kill(worker)
        await self.pool.empty(30.0)
        for worker in list(self._shown):
            self._relay.leave(worker)
        self._shown.clear()
        for generation in list(self._stores):
            self._close_store(generation)
        if self._boot_store is not None:
            with suppress(ProcessLookupError):
                os.kill(self._boot_store.pid, signal.SIGKILL)
        self.pool.restarts = self.state.restarts
        await self._boot(0)
