"""What the controller knows, what can happen to it, and what it can ask its shell to do. Values only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from liverun.layout import Layout
from liverun.messages import Member, Message, Switched


class Phase(enum.StrEnum):
    """Where a generation is on its way."""

    PROPOSED = "proposed"
    PREPARING = "preparing"
    READY = "ready"
    ARMED = "armed"
    SWITCHING = "switching"
    ACTIVE = "active"
    RETIRED = "retired"
    ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine's share of the job: its agent is there."""

    id: str
    host: str
    """the address that others reach its workers at"""
    nproc: int
    """ranked workers it can give"""
    standbys: int = 0
    """further workers that wait there for a rank"""
    arrived: int = 0
    """counts nodes in the order in which they came"""
    pin: int | None = None
    """its place among the nodes (``--node-rank``); nodes without one come after those, as they arrived"""
    leads: bool = False
    """the controller runs there"""
    leaving: str = ""
    """why it is to go; empty for one that stays"""
    leave_wish: int | None = None
    """the request that waits for it to be gone"""
    moves: int = 0
    """changes of world that should have freed it, and were aborted"""
    stuck: bool = False
    """it has to go, and nobody can take its work"""
    boot: int = 0
    """workers that it gives to the present attempt's first world"""
    boot_to_come: int = 0
    """workers of the first world that are not started yet"""
    forks_to_come: int = 0
    """standbys that were asked for and are not started yet"""
    barren: int = 0
    """standbys in a row that ended before they joined"""
    parked: bool = False
    """somebody asked for a world without it: it joins only when somebody asks again"""
    away: bool = False
    """its agent has no connection: it may be lost, or come back in a moment"""
    retry_at: float = 0.0
    """not asked to join the world before; infinite for one that does not fit into the present world"""

    @property
    def place(self) -> tuple[float, int]:
        """What nodes are sorted by."""
        return (float("inf") if self.pin is None else self.pin, self.arrived)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker process of the job."""

    id: str
    node: str
    pid: int
    boot_rank: int | None
    """the rank it was started with, none for one started as a standby"""
    joined: bool = False
    """it has said Hello"""
    state: str = "starting"
    """``starting``, ``standby``, ``ranked`` or ``leaving``"""
    layout: Layout | None = None
    """what its script passed to join()"""


@dataclass(frozen=True, kw_only=True)
class World:
    """The active world."""

    generation: int
    layout: Layout
    ranks: tuple[str, ...]
    """worker ids, by rank"""

    def as_dict(self) -> dict[str, Any]:
        """Return what status and events show of it."""
        return describe_world(self.layout, len(self.ranks))


def describe_world(layout: Layout, size: int) -> dict[str, Any]:
    """Size and layout, dp included."""
    axes = layout.as_dict()
    return {
        "size": size,
        "layout": {"tp": axes.pop("tp"), "pp": axes.pop("pp"), "dp": layout.dp(size), **axes},
    }


def short_world(layout: Layout, size: int) -> str:
    """``4 workers, tp=2, dp=2``."""
    named = ", ".join(f"{axis}={number}" for axis, number in layout.as_dict().items() if number != 1)
    workers = f"{size} worker" + ("s" if size != 1 else "")
    return f"{workers}, {named + ', ' if named else ''}dp={layout.dp(size)}"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What someone wants the world to be."""

    id: int
    workers: int | None = None
    layout: Layout | None = None
    replace: str | None = None
    """id or rank of a worker to put a standby in place of"""
    nodes: int | None = None
    """so many nodes, with all their workers"""
    joins: tuple[str, ...] = ()
    """nodes that wait and are to have ranks too"""
    without: str | None = None
    """id of a node that is to have no rank"""
    timeout_s: float = 60.0
    """how long preparing may take"""
    cause: str = "resize"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A world to be."""

    ranks: tuple[str, ...]
    layout: Layout
    members: tuple[Member, ...]
    note: str
    """why this target, for a person"""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A generation on its way, from PROPOSED to the commit."""

    wish: Wish | None
    """none for the first world"""
    began: float
    deadline: float
    phase: Phase = Phase.PROPOSED
    target: Target | None = None
    """none until enough standbys have joined"""
    generation: int | None = None
    prepared: frozenset[str] = frozenset()
    prepare_s: float = 0.0
    seen: Mapping[str, int] = field(default_factory=dict)
    """steps said by the old world since READY, or since the last Cancel"""
    step: int | None = None
    """the step of the Arm that is out"""
    armed: frozenset[str] = frozenset()
    margin: int = 2
    tries: int = 0
    held: bool = False
    """all have prepared, and what follows waits for the leader's lease"""
    votes: Mapping[str, Switched] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    """joiners that ended while switching"""
    failure: str = ""
    """why a member could not prepare; the abort waits a moment for the end of the peer that may have caused it"""
    retired: Mapping[str, bool] = field(default_factory=dict)
    """members that said Retired before the last vote was in; whether they leave"""


@dataclass(frozen=True, kw_only=True)
class Retiring:
    """The world before the active one, until nothing of it is left."""

    generation: int
    waiting: frozenset[str]
    deadline: float


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """A job that is being brought to a common last step."""

    reason: str
    deadline: float
    save: bool = False
    """a checkpoint is taken there"""
    poll_at: float
    requeue: bool = False
    """nobody wants the job to be over, it only cannot go on"""
    margin: int = 2
    seen: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    armed: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A checkpoint that someone waits for."""

    request: int
    deadline: float
    poll_at: float
    begun: bool = False
    """no change of world is under way, and none begins"""
    margin: int = 2
    seen: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    armed: frozenset[str] = frozenset()
    going: bool = False
    """every rank takes it at ``step``"""


@dataclass(frozen=True, kw_only=True)
class Failing:
    """A worker whose script has failed, and whose process waits to be told what follows."""

    deadline: float
    """it is told to leave: until then something else may explain its failure. Once told: it is killed"""
    told: bool = False


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Everything decisions are made from."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    min_nodes: int = 1
    max_nodes: int = 1
    join_timeout_s: float = 600.0
    """how long the fewest nodes may take to come"""
    last_call_s: float = 5.0
    """how long the first world waits for more nodes once there are enough"""
    resumed: bool = False
    """an earlier controller was lost, and its nodes come to this one"""
    gathering_since: float | None = None
    """when the first node came, or the last attempt was given up"""
    last_arrival: float = 0.0
    booted: tuple[str, ...] = ()
    """nodes of the present attempt, in the order of their ranks; empty until there are enough"""
    leads: bool = True
    """the controller may act as such: the lease by which it does is not over"""
    handing_over: bool = False
    """the controller is on its way to another node; nothing begins meanwhile"""
    no_heirs: frozenset[str] = frozenset()
    """nodes that could not take over"""
    movable: bool = False
    """the store is embedded here and can move with the controller"""
    clearing: frozenset[str] = frozenset()
    """nodes that are ending the workers of an attempt before this one"""
    membership_restarts: int = 0
    """restarts because nodes came or went, of a script that never joins; not in the budget"""
    layout: Layout | None = None
    """what the launcher was told with --layout"""
    max_restarts: int = 0
    restarts: int = 0
    has_run: bool = False
    """an earlier attempt got as far as its first step"""
    best_step: int = 0
    """the furthest that an earlier attempt came"""
    keeps: bool = False
    """a restart keeps the processes that are well, where the attempt before it has trained"""
    began_at: int | None = None
    """the step at which the present attempt began; none before anybody has said"""
    failing: Mapping[str, Failing] = field(default_factory=dict)
    """workers whose scripts have failed, in that order"""
    layout_before: Layout | None = None
    """of the last world that was lost; the next attempt takes it if it fits"""
    size_before: int = 0
    """how many workers it had"""
    shares_before: Mapping[str, int] = field(default_factory=dict)
    """how many of them were on each node that is left"""
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """pids of processes that wait, on each node, to be workers of the next attempt"""
    last_restart: Mapping[str, Any] | None = None
    """what status shows of it"""
    fruitless: int = 0
    """attempts in a row that came no further than one before them"""
    began: float | None = None
    """when the first worker was started"""
    phase: str = "starting"
    """``starting``, ``running`` or ``ending``"""
    workers: Mapping[str, Worker] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    report: Mapping[str, float] = field(default_factory=dict)
    """what rank 0 last gave to step.report()"""
    world: World | None = None
    proposal: Proposal | None = None
    queued: Wish | None = None
    retiring: Retiring | None = None
    stopping: Stopping | None = None
    saves: bool = False
    """there is a folder for checkpoints"""
    saving: Saving | None = None
    last_checkpoint: Mapping[str, Any] | None = None
    stop_patience_s: float = 15.0
    """how long ranks may take to come to a common last step"""
    done_ranks: Mapping[str, str] = field(default_factory=dict)
    """ranked workers that have exited 0, and their nodes"""
    standbys_started: bool = False
    last_resize: Mapping[str, Any] | None = None
    reason: str = "the workers are starting"

    @property
    def boot_size(self) -> int:
        """Workers that the present attempt starts with."""
        return sum(self.nodes[node].boot for node in self.booted if node in self.nodes)

    def in_order(self) -> list[Node]:
        """Return the nodes that stay, in the order of their ranks."""
        return sorted((node for node in self.nodes.values() if not node.leaving), key=lambda node: node.place)

    def ranked_nodes(self) -> frozenset[str]:
        """Return the nodes that have ranked workers, or are to have them in the attempt that starts."""
        if self.world is None:
            return frozenset(self.booted)
        return frozenset(self.workers[worker].node for worker in self.world.ranks if worker in self.workers)


# --- what can happen ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Started:
    """A worker was forked."""

    worker: str
    pid: int
    boot_rank: int | None
    node: str = "n0"


@dataclass(frozen=True, kw_only=True)
class NodeEntered:
    """The agent of a node is there and offers workers."""

    node: Node


@dataclass(frozen=True, kw_only=True)
class NodeLost:
    """The agent of a node has not been heard of for too long."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeAway:
    """The connection of a node's agent has ended, or there is one again."""

    node: str
    away: bool


@dataclass(frozen=True, kw_only=True)
class NodeLeaving:
    """A node is to go: it was told to end, or someone drains it."""

    node: str
    reason: str
    timeout_s: float
    wish: int | None = None
    """the request to answer, for a drain that somebody waits for"""
    save: bool = False
    """if the job has to stop for it, it takes a checkpoint first"""


@dataclass(frozen=True, kw_only=True)
class HandoverFailed:
    """The node that should have taken over the controller did not."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeCleared:
    """Every worker of an earlier attempt has ended on a node."""

    node: str
    kept: tuple[int, ...] = ()
    """pids of processes that did not, and wait to be workers again"""


@dataclass(frozen=True, kw_only=True)
class Said:
    """A worker sent a message."""

    worker: str
    message: Message


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A worker ended."""

    worker: str
    code: int
    """negative: the signal"""
    under_way: bool = False
    """a worker had come to the c10d store of this attempt: a script that does not join had begun to work"""
    lines: tuple[str, ...] = ()
    """what a report says of it, if it failed: where, its error, the end of its stderr"""


@dataclass(frozen=True, kw_only=True)
class Wished:
    """Someone asks for another world."""

    wish: Wish


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """The store gave the proposal its generation."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class NumberFailed:
    """The store gave none, and waiting would not help."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class StoreOpened:
    """The c10d store of a generation listens."""

    generation: int
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class StoreFailed:
    """The c10d store of a generation could not be started."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The store has recorded a generation as active, or refused to."""

    generation: int
    won: bool


@dataclass(frozen=True, kw_only=True)
class StopAsked:
    """The job is to end: by ``liverun stop`` or by a signal."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class SaveAsked:
    """Someone asks for a checkpoint."""

    request: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed."""


Event = (
    NodeEntered | NodeAway | NodeLost | NodeLeaving | NodeCleared | HandoverFailed
    | Started | Said | Exited | Wished | Numbered | NumberFailed | StoreOpened | StoreFailed | Committed | StopAsked
    | SaveAsked | Tick
)  # fmt: skip


# --- what can be asked of the shell -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Send:
    """Send a message to a worker."""

    worker: str
    message: Message


@dataclass(frozen=True, kw_only=True)
class Number:
    """Take the next generation number; answered by Numbered."""


@dataclass(frozen=True, kw_only=True)
class OpenStore:
    """Start the c10d store of a generation; answered by StoreOpened or StoreFailed."""

    generation: int
    node: str
    """where it is to be: with rank 0 of that generation"""


@dataclass(frozen=True, kw_only=True)
class CloseStore:
    """End the c10d store of a generation."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Record the new world by compare-and-set; answered by Committed."""

    old: int | None
    world: World


@dataclass(frozen=True, kw_only=True)
class Record:
    """Append an event; also shown to whoever made the wish."""

    kind: str
    generation: int
    reason: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    wish: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The final word on a wish."""

    wish: int
    ok: bool
    outcome: str
    """``active``, ``unchanged``, ``refused``, ``aborted`` or ``failed``"""
    reason: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Boot:
    """Start the workers of the first world, the nodes' ranks one after the other."""

    nodes: tuple[Node, ...]
    """each with the number of its workers in ``boot``"""
    restarts: int


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Fork this many further standbys on a node."""

    node: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Dismiss:
    """Let a node go: its agent ends what it has, and itself."""

    node: str
    reason: str
    ok: bool = True
    """false for one that was not let in"""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill a worker that hangs."""

    worker: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """Move the controller, and the store with it, to another node; then let the present one's go."""

    node: str
    """where it is to be"""
    leaver: str
    reason: str
    wish: int | None


@dataclass(frozen=True, kw_only=True)
class Restart:
    """End every worker on these nodes; answered by one NodeCleared each."""

    reason: str
    nodes: tuple[str, ...]
    keep: bool = False
    """of workers that have joined, end the script only"""


@dataclass(frozen=True, kw_only=True)
class End:
    """The job is over: ``finished``, ``failed`` or ``stopped``. Workers that are left are to be ended."""

    outcome: str
    reason: str
    worker: str | None = None
    rank: int | None = None
    code: int | None = None
    lines: tuple[str, ...] = ()
    """what a report says of the worker that failed first"""
    hopeless: bool = False
    """another try would end the same way"""
    requeue: bool = False
    """nobody asked for the end: the job only could not go on without a node"""


Action = (
    Send | Number | OpenStore | CloseStore | Commit | Record | Answer
    | Boot | Fork | Kill | Restart | Dismiss | HandOver | End
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The next state, what to do now, and why."""

    state: JobState
    actions: tuple[Action, ...]
    reason: str
