"""What the controller tells the agent of a node to do, and what that agent reports. Values only.

The agent of the controller's own node gets them as objects, every other one over a sealed connection
(:mod:`launcher.hub`), in order, each exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.codec import Coded


class Order(Coded):
    """From the controller to a node."""


class Report(Coded):
    """From a node to the controller."""


@dataclass(frozen=True, kw_only=True)
class Tell(Order):
    """Pass a message on to a worker."""

    worker: str
    message: Mapping[str, Any]
    """what :meth:`liverun.messages.Message.encode` writes, as an object"""


@dataclass(frozen=True, kw_only=True)
class StartRanked(Order):
    """Start this node's workers of a first world."""

    first_rank: int
    count: int
    """workers of this node"""
    size: int
    """workers of all nodes"""
    node_rank: int
    num_nodes: int
    host: str
    port: int
    """the c10d store of that world"""
    restarts: int


@dataclass(frozen=True, kw_only=True)
class ForkStandbys(Order):
    """Start standbys."""

    count: int


@dataclass(frozen=True, kw_only=True)
class KillWorker(Order):
    """Kill a worker that hangs."""

    worker: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class OpenC10d(Order):
    """Start the c10d store of a generation here; 0 is the first world's, before it has a number."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class CloseC10d(Order):
    """End it."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class ShowRanks(Order):
    """Show on the console what these workers of the node print, and what no others do."""

    ranks: Mapping[str, int]
    size: int
    """of the world"""
    nodes: Mapping[str, Any] = field(default_factory=dict)
    """of the world: ``{"host", "agent", "peers"}`` of each, who decide together if the controller is lost"""
    generation: int = 0
    """of the world; answered by RanksShown"""


@dataclass(frozen=True, kw_only=True)
class RanksShown(Report):
    """The node knows the active world, and so who decides together."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Clear(Order):
    """End every worker; answered by Cleared."""

    reason: str
    keep: bool = False
    """workers that have joined end their scripts only, and their processes wait for StartRanked and ForkStandbys"""


@dataclass(frozen=True, kw_only=True)
class Finish(Order):
    """The job is over for this node: end what is left, then yourself."""

    outcome: str
    """``finished``, ``failed``, ``stopped``, ``left`` or ``refused``"""
    reason: str
    worker: str | None = None
    rank: int | None = None
    code: int | None = None
    lines: tuple[str, ...] = ()
    hopeless: bool = False
    requeue: bool = False
    status: Mapping[str, Any] = field(default_factory=dict)
    """the last status object of the job"""


@dataclass(frozen=True, kw_only=True)
class OpenDoors(Order):
    """Listen for a store and a controller; answered by DoorsOpen (:mod:`launcher.handover`)."""


@dataclass(frozen=True, kw_only=True)
class TakeOver(Order):
    """Be the controller, and carry the store, from here on; answered by TookOver."""

    term: int
    copy: str
    """of the store (:meth:`launcher.store.snapshot.Snapshot.dumps`)"""
    state: Mapping[str, Any]
    """of the job (:func:`launcher.handover.dump_state`)"""
    remotes: Mapping[str, str]
    """the other nodes, and the secret by which each is known again"""
    records: Mapping[str, Any]
    """what each node is called and where it answers"""
    active_revision: int
    """of ``job/active``"""


@dataclass(frozen=True, kw_only=True)
class Follow(Order):
    """Go to another controller; what was not confirmed goes there too."""

    host: str
    port: int
    term: int


@dataclass(frozen=True, kw_only=True)
class Happened(Order):
    """An event, for this node's ``events.jsonl``."""

    event: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Reply(Order):
    """A line for a command line that asked at this node's socket."""

    request: int
    line: str
    """empty: nothing more will come"""


@dataclass(frozen=True, kw_only=True)
class Enter(Report):
    """A node offers its workers; always the first."""

    host: str
    nproc: int
    standbys: int
    pin: int | None
    agent: str = ""
    """what the agent is called in the store's proofs"""
    peers: int = 0
    """port at which it can be asked whether it still sees the store (:mod:`launcher.succession`)"""


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Report):
    """A worker was started."""

    worker: str
    pid: int
    boot_rank: int | None


@dataclass(frozen=True, kw_only=True)
class WorkerSaid(Report):
    """A worker sent a message."""

    worker: str
    message: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class WorkerExited(Report):
    """A worker ended."""

    worker: str
    code: int
    under_way: bool = False
    """a worker had come to the first world's c10d store, which is on this node"""
    lines: tuple[str, ...] = ()
    """what a report says of it, if it failed"""


@dataclass(frozen=True, kw_only=True)
class UnderWay(Report):
    """A worker has come to the first world's c10d store."""

    restarts: int


@dataclass(frozen=True, kw_only=True)
class C10dOpened(Report):
    """The c10d store of a generation listens."""

    generation: int
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class C10dFailed(Report):
    """It could not be started."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class C10dLost(Report):
    """A c10d store ended by itself; 0 is the first world's, before it has a number."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Cleared(Report):
    """No worker is left here."""

    kept: tuple[int, ...] = ()
    """pids of processes that wait to be workers again"""


@dataclass(frozen=True, kw_only=True)
class DoorsOpen(Report):
    """Where a store and a controller would be here."""

    host: str
    store_port: int
    port: int


@dataclass(frozen=True, kw_only=True)
class TookOver(Report):
    """The controller is here now; or why not."""

    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Leaving(Report):
    """The node was told to end."""

    reason: str
    timeout_s: float
    save: bool = False
    """if the job has to stop for it, it takes a checkpoint first"""


@dataclass(frozen=True, kw_only=True)
class Gone(Report):
    """The node has nothing of the job any more; always the last."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Asked(Report):
    """A command line asks at this node's socket."""

    request: int
    control: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AskEnded(Report):
    """It waits no more."""

    request: int
