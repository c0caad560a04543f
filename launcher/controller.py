"""The shell around :func:`launcher.decide.decide`: feeds events in, one at a time, does what comes out."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from launcher.control import (
    Control,
    DrainRequest,
    Note,
    Outcome,
    ResizeRequest,
    SaveRequest,
    StatusReply,
    StatusRequest,
    StopRequest,
)
from launcher.decide import decide, next_deadline
from launcher.events import EventLog
from launcher.handover import dump_state
from launcher.leading import Leadership
from launcher.ledger import Ledger
from launcher.model import (
    Action,
    Answer,
    Boot,
    CloseStore,
    Commit,
    Committed,
    Dismiss,
    End,
    Event,
    Exited,
    Fork,
    HandOver,
    JobState,
    Kill,
    Node,
    NodeAway,
    NodeCleared,
    NodeEntered,
    NodeLeaving,
    NodeLost,
    Number,
    Numbered,
    NumberFailed,
    OpenStore,
    Record,
    Restart,
    Said,
    SaveAsked,
    Send,
    Started,
    StopAsked,
    StoreFailed,
    StoreOpened,
    Tick,
    Wish,
    Wished,
)
from launcher.node import Answers
from launcher.orders import (
    Asked,
    AskEnded,
    C10dFailed,
    C10dLost,
    C10dOpened,
    Clear,
    Cleared,
    CloseC10d,
    DoorsOpen,
    Enter,
    Finish,
    ForkStandbys,
    Gone,
    Happened,
    KillWorker,
    Leaving,
    OpenC10d,
    Order,
    RanksShown,
    Reply,
    Report,
    ShowRanks,
    StartRanked,
    TakeOver,
    Tell,
    TookOver,
    UnderWay,
    WorkerExited,
    WorkerSaid,
    WorkerStarted,
)
from launcher.status import status_object
from launcher.store import Store, StoreError
from launcher.store.link import Place
from liverun.layout import Layout
from liverun.messages import Message

_TIMED_OUT = Tick()


@dataclass
class Requester:
    """A command line that waits for the end of its wish."""

    writer: Answers
    asked_at: float
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Controller:
    """Holds the job's state. What must outlive it is in the store (:class:`launcher.ledger.Ledger`)."""

    def __init__(
        self, state: JobState, *, job: str, store: Store, events: EventLog, say: Callable[[str], None]
    ) -> None:
        self.state = state
        self.job = job
        self.end: End | None = None
        self.ended = asyncio.Event()
        self.superseded: Place | None = None
        """where another agent has brought the store back"""
        self._ledger = Ledger(store, events, say)
        self._events = events
        self._say = say
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self.world_changed: Callable[[int, list[str]], None] = lambda _, __: None
        """told, of each world that becomes active, what the agents of its nodes are called in the store's proofs"""
        self.world_known: Callable[[int, str], None] = lambda _, __: None
        """told which agent has heard of it"""
        self.on_hand_over: Callable[[HandOver], Coroutine[None, None, None]] | None = None
        self._answered: asyncio.Future[Report] | None = None
        self._records: dict[str, Mapping[str, Any]] = {}
        self._nodes: dict[str, Callable[[Order], None]] = {}
        self._node_ids = itertools.count()
        self._store_nodes: dict[int, str] = {}
        self._boot_store: asyncio.Future[tuple[str, int]] | None = None
        self._under_way = False
        self._wish_ids = itertools.count(1)
        self._requesters: dict[int, Requester] = {}
        self._asks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.Task[None] | None = None

    # --- what comes in --------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Something has happened."""
        self._queue.put_nowait(event)

    def enter(self, order: Callable[[Order], None], offer: Enter, *, leads: bool = False) -> str:
        """Let the agent of a node in, which ``order`` reaches; its id."""
        number = next(self._node_ids)
        self.spawn(self._ledger.put("node/next", number + 1))
        node = Node(
            id=f"n{number}", host=offer.host, nproc=offer.nproc, standbys=offer.standbys, pin=offer.pin,
            arrived=number, leads=leads,
        )  # fmt: skip
        self._nodes[node.id] = order
        self.tell(NodeEntered(node=node))
        record = {"host": node.host, "workers": node.nproc, "agent": offer.agent, "peers": offer.peers}
        self._records[node.id] = record
        self.spawn(self._ledger.put(f"node/{node.id}", record))
        return node.id

    def reach(self, node: str, order: Callable[[Order], None]) -> None:
        """Know how to reach a node that an earlier controller has let in."""
        self._nodes[node] = order

    def adopt(self, taken: TakeOver, node_ids: int) -> None:
        """Go on where the controller before this one stopped."""
        self._records = dict(taken.records)
        self._ledger.active_revision = taken.active_revision
        self._node_ids = itertools.count(node_ids)
        if self.state.world is not None:
            self._store_nodes[self.state.world.generation] = next(iter(self._nodes), "")
            self._tell_of_world(self.state.world.generation, self.state.ranked_nodes())

    def handing(self, *, without: str, to: str, copy: str, term: int, secrets: Mapping[str, str]) -> TakeOver:
        """Write down everything that another controller needs."""
        gone = (without, to)
        return TakeOver(
            term=term, copy=copy, state=dump_state(self.state, without=without),
            remotes={node: secret for node, secret in secrets.items() if node not in gone},
            records={node: record for node, record in self._records.items() if node != without},
            active_revision=self._ledger.active_revision,
        )  # fmt: skip

    async def idle(self) -> None:
        """Wait until every event that was told has been decided."""
        await self._queue.join()

    async def ask_node(self, node: str, order: Order, timeout_s: float) -> Report | None:
        """Give an order that is answered by one DoorsOpen or TookOver; ``None`` if no answer comes in time."""
        self._answered = asyncio.get_running_loop().create_future()
        self.post(node, order)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answered
        except TimeoutError:
            return None

    def left(self, action: HandOver, *, confirmed: bool) -> None:
        """Say that the controller's node has left, to whoever asked for it."""
        reason = f"node {action.leaver} has left: {action.reason}; the controller is on node {action.node}"
        if not confirmed:
            reason += ", which has not confirmed it"
        self._record(Record(kind="node_left", generation=0, reason=reason, fields={"node": action.leaver}))
        if action.wish is not None:
            self._answer(Answer(wish=action.wish, ok=True, outcome="left", reason=reason))

    def lose(self, node: str, reason: str) -> None:
        """Hear that the agent of a node is gone without a word."""
        if self._nodes.pop(node, None) is not None:
            self.tell(NodeLost(node=node, reason=reason))

    def seen(self, node: str, *, away: bool) -> None:
        """Hear that the connection of a node's agent has ended, or that there is one again."""
        self.tell(NodeAway(node=node, away=away))

    def heard(self, node: str, report: Report) -> None:
        """Hear what a node reports."""
        match report:
            case WorkerStarted():
                self.tell(Started(worker=report.worker, pid=report.pid, boot_rank=report.boot_rank, node=node))
            case WorkerSaid():
                message = Message.decode(json.dumps(report.message).encode())
                self.tell(Said(worker=report.worker, message=message))
            case WorkerExited():
                under_way = report.under_way or self._under_way
                self.tell(
                    Exited(worker=report.worker, code=report.code, under_way=under_way, lines=tuple(report.lines))
                )
            case UnderWay():
                self._under_way = True
            case C10dOpened():
                if report.generation == 0 and self._boot_store is not None and not self._boot_store.done():
                    self._boot_store.set_result((report.host, report.port))
                elif report.generation != 0:
                    self.tell(
                        StoreOpened(generation=report.generation, host=report.host, port=report.port)
                    )
            case C10dFailed():
                if report.generation == 0:
                    self.fail(f"the first world's store cannot be started on node {node}: {report.reason}")
                else:
                    self.tell(StoreFailed(generation=report.generation, reason=report.reason))
            case C10dLost():
                self._events.write("store_lost", report.generation, report.reason, {})
                if report.generation != 0:
                    self.tell(StoreFailed(generation=report.generation, reason=report.reason))
            case Cleared():
                self.tell(NodeCleared(node=node, kept=tuple(report.kept)))
            case DoorsOpen() | TookOver():
                if self._answered is not None and not self._answered.done():
                    self._answered.set_result(report)
            case RanksShown():
                if node in self._records:
                    self.world_known(report.generation, str(self._records[node]["agent"]))
            case Leaving():
                self.tell(
                    NodeLeaving(node=node, reason=report.reason, timeout_s=report.timeout_s, save=report.save)
                )
            case Gone():
                self.lose(node, report.reason)
            case Asked():
                answers = _RelayedAnswers(lambda line: self.post(node, Reply(request=report.request, line=line)))
                self._asks[node, report.request] = self.spawn(self._asked_from(report, answers))
            case AskEnded():
                task = self._asks.pop((node, report.request), None)
                if task is not None:
                    task.cancel()
            case _:
                raise AssertionError(report)

    async def _asked_from(self, report: Asked, answers: _RelayedAnswers) -> None:
        try:
            await self.asked(Control.read(dict(report.control)), answers)
        except ValueError as error:
            self._say(f"refused a request: {error}")
        answers.close()

    async def asked(self, request: Control, writer: Answers) -> None:
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
        elif isinstance(request, DrainRequest):
            await self._drain(request, writer)
        elif isinstance(request, SaveRequest):
            number = next(self._wish_ids)
            await self._request(number, SaveAsked(request=number, timeout_s=request.timeout_s), writer)

    async def _resize(self, request: ResizeRequest, writer: Answers) -> None:
        try:
            layout = Layout.parse(request.layout) if request.layout else None
        except ValueError as error:
            writer.write(Outcome(ok=False, outcome="refused", reason=str(error)).encode())
            return
        wish = Wish(
            id=next(self._wish_ids), workers=request.workers, nodes=request.nodes, layout=layout,
            replace=request.replace, timeout_s=request.timeout_s, cause=request.cause,
        )  # fmt: skip
        await self._request(wish.id, Wished(wish=wish), writer)

    async def _drain(self, request: DrainRequest, writer: Answers) -> None:
        nodes = self.state.nodes.values()
        found = [node.id for node in nodes if request.node in (node.id, node.host)]
        if len(found) != 1:
            there = ", ".join(f"{node.id} ({node.host})" for node in nodes)
            reason = f"{'several nodes are' if found else 'there is no node'} {request.node}; there are {there}"
            writer.write(Outcome(ok=False, outcome="refused", reason=reason).encode())
            return
        number = next(self._wish_ids)
        event = NodeLeaving(
            node=found[0], reason="liverun drain", timeout_s=request.deadline_s, wish=number
        )
        await self._request(number, event, writer)

    async def _request(self, number: int, event: Event, writer: Answers) -> None:
        requester = Requester(writer, time.monotonic())
        self._requesters[number] = requester
        self.tell(event)
        try:
            await requester.done.wait()
            await writer.drain()
        finally:
            self._requesters.pop(number, None)

    def status(self) -> dict[str, Any]:
        """Return the status object."""
        return status_object(self.state, job=self.job, now=time.monotonic())

    # --- the loop -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Look what an earlier controller of this job has left in the store."""
        found = await self._ledger.begin(self.job)
        self._node_ids = itertools.count(found.node_ids)
        if not found.resumed:
            return
        reason = "the controller was lost with its node"
        if found.active is None:
            self.state = replace(self.state, restarts=found.restarts, resumed=True)
        elif found.restarts >= self.state.max_restarts:
            self.fail(f"{reason}, and no restart is left (--max-restarts {self.state.max_restarts})")
            return
        else:  # its world is lost with it: one restart of the budget
            self.state = replace(self.state, restarts=found.restarts + 1, has_run=True, resumed=True)
            reason += f"; restart {found.restarts + 1} of {self.state.max_restarts} begins on this one"
            await self._ledger.put("job/restarts", found.restarts + 1)
        self._events.write("controller_lost", found.active or 0, reason, {})
        self._say(reason)

    async def run(self) -> None:
        """Decide and act until the job ends; goes on recording exits after that, until cancelled."""
        while True:
            due = next_deadline(self.state)
            timeout = None if due is None else max(0.0, due - time.monotonic())
            try:
                async with asyncio.timeout(timeout):
                    event: Event = await self._queue.get()
            except TimeoutError:
                event = _TIMED_OUT
            if self.state.leads != self._ledger.leads:
                self.state = replace(self.state, leads=self._ledger.leads)
            decision = decide(time.monotonic(), self.state, event)
            self.state = decision.state
            for action in decision.actions:
                self._act(action)
            if event is not _TIMED_OUT:
                self._queue.task_done()

    def _act(self, action: Action) -> None:
        match action:
            case Send():
                values = json.loads(action.message.encode())
                self._post_to_worker(action.worker, Tell(worker=action.worker, message=values))
            case Number():
                self.spawn(self._number())
            case OpenStore():
                self._store_nodes[action.generation] = action.node
                self.post(action.node, OpenC10d(generation=action.generation))
            case CloseStore():
                node = self._store_nodes.pop(action.generation, None)
                if node is not None:
                    self.post(node, CloseC10d(generation=action.generation))
            case Commit():
                self.spawn(self._commit(action))
            case Record():
                self._record(action)
            case Answer():
                self._answer(action)
            case Boot():
                self._under_way = False
                self.spawn(self._boot(action))
            case Fork():
                self.post(action.node, ForkStandbys(count=action.count))
            case Kill():
                self._post_to_worker(action.worker, KillWorker(worker=action.worker, reason=action.reason))
            case Restart():
                self._store_nodes.clear()
                self.spawn(self._ledger.put("job/restarts", self.state.restarts))
                for node in action.nodes:
                    self.post(node, Clear(reason=action.reason, keep=action.keep))
            case Dismiss():
                self.post(
                    action.node, Finish(outcome="left" if action.ok else "refused", reason=action.reason)
                )
                self._nodes.pop(action.node, None)
            case HandOver():
                assert self.on_hand_over is not None
                self.spawn(self.on_hand_over(action))
            case End():
                self.end = action
                self.ended.set()
            case _:
                assert_never(action)

    def post(self, node: str, order: Order) -> None:
        """Give an order to a node; to one that is gone, nothing."""
        if (take := self._nodes.get(node)) is not None:
            take(order)

    def _post_to_worker(self, worker: str, order: Order) -> None:
        known = self.state.workers.get(worker)
        if known is not None:
            self.post(known.node, order)

    def finish(self, end: End, status: Mapping[str, Any], *, but: str) -> None:
        """Tell every node but the controller's own that the job is over."""
        for node in list(self._nodes):
            if node != but:
                self.post(
                    node,
                    Finish(
                        outcome=end.outcome, reason=end.reason, worker=end.worker, rank=end.rank, code=end.code,
                        lines=end.lines, hopeless=end.hopeless, requeue=end.requeue, status=status,
                    ),
                )  # fmt: skip

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
        self.fail(str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}")

    def lead_by(self, leading: Leadership) -> None:
        """Act by this from now on."""
        self._ledger.leading = leading

    def keep_leading(self, leading: Leadership) -> None:
        """Act by this, in a store elsewhere, until another agent has the job, or :meth:`resign`."""
        self.lead_by(leading)
        self._keeping = self.spawn(self._keep(leading))

    async def _keep(self, leading: Leadership) -> None:
        await leading.keep(self._ledger.unchanged, lambda: self.tell(Tick()))
        if self.end is None:
            self.give_way(None)

    async def resign(self) -> None:
        """Give back what :meth:`keep_leading` kept, and the job's id if the job is over."""
        if self._keeping is not None and self._ledger.leading is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            await self._ledger.leading.resign(over=self.end is not None)

    def give_way(self, place: Place | None) -> None:
        """Be the controller no more: another one acts for the job, at a store elsewhere or the same.

        ``ended`` is set without an end then.
        """
        self.superseded = place
        self._ledger.over = True
        self.ended.set()

    def leave(self, action: HandOver) -> None:
        """End this agent's part of a job that goes on elsewhere."""
        self.end = End(outcome="left", reason=action.reason)
        self.ended.set()

    def fail(self, reason: str) -> None:
        """End the job for a reason that no decision knows of; nothing is decided after that."""
        if self.end is None:
            self.end = End(outcome="failed", reason=reason)
            self.state = replace(self.state, phase="ending", reason=reason)
            generation = self.state.world.generation if self.state.world else 0
            self._events.write("worker_failed", generation, reason, {})
        self.ended.set()

    # --- what goes out --------------------------------------------------------------------------------------

    async def _boot(self, action: Boot) -> None:
        self._boot_store = asyncio.get_running_loop().create_future()
        self.post(action.nodes[0].id, OpenC10d(generation=0))
        host, port = await self._boot_store
        await self._ledger.leading_again()
        rank, size = 0, sum(node.boot for node in action.nodes)
        for number, node in enumerate(action.nodes):
            order = StartRanked(
                first_rank=rank, count=node.boot, size=size, node_rank=number, num_nodes=len(action.nodes),
                host=host, port=port, restarts=action.restarts,
            )  # fmt: skip
            self.post(node.id, order)
            rank += node.boot

    async def _number(self) -> None:
        try:
            self.tell(Numbered(generation=await self._ledger.next_generation()))
        except StoreError as error:
            self.tell(NumberFailed(reason=str(error)))

    async def _commit(self, action: Commit) -> None:
        world = action.world
        nodes = {worker: self.state.workers[worker].node for worker in world.ranks if worker in self.state.workers}
        won = await self._ledger.activate(world, nodes)
        if won:
            self._tell_of_world(world.generation, nodes.values())
            for node in self._nodes:
                theirs = {worker: rank for rank, worker in enumerate(world.ranks) if nodes.get(worker) == node}
                voters = {name: self._records[name] for name in set(nodes.values()) if name in self._records}
                self.post(
                    node,
                    ShowRanks(ranks=theirs, size=len(world.ranks), nodes=voters, generation=world.generation),
                )
        self.tell(Committed(generation=world.generation, won=won))

    def _tell_of_world(self, generation: int, nodes: Iterable[str]) -> None:
        self.world_changed(generation, [str(self._records[node]["agent"]) for node in sorted(set(nodes))])

    def _record(self, action: Record) -> None:
        event = self._events.write(action.kind, action.generation, action.reason, action.fields)
        for node in self.state.nodes.values():
            if not node.leads:
                self.post(node.id, Happened(event=event))
        if action.kind in ("node_joined", "node_left", "node_lost", "node_leaving"):
            self._say(action.reason)
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
            self.spawn(self._ledger.put("resize/last", self.state.last_resize))


class _RelayedAnswers:
    """Lines for a command line that asked at another node's socket."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._closed = False

    def write(self, data: bytes) -> None:
        self._send(data.decode())

    async def drain(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._send("")
