"""A script has failed, and its process waits: who failed first, and what is it told? Pure.

Where processes are kept over a restart, a worker whose script has failed says Ended and waits. Its failure may only
be what it saw of another's: so for a moment nothing happens. If by then no worker and no node was lost, the first to
say so is told to leave; its exit is the failure. The others are told to unwind by the restart that follows, or to
leave as well if there is none. While the connection of a node with ranks is broken, nobody is told: that node may
be lost.
"""

from __future__ import annotations

from launcher.model import Failing, JobState, Kill
from launcher.turn import Turn
from liverun.messages import Leave

PATIENCE_S = 0.5
"""how long the end of another worker may explain a failure"""
LEAVE_TIMEOUT_S = 10.0
"""how long a process may take to exit"""


def ended(turn: Turn, worker: str) -> None:
    """Note that the script of a worker has failed."""
    turn.set(failing={**turn.state.failing, worker: Failing(deadline=turn.now + PATIENCE_S)})


def settle(turn: Turn) -> None:
    """Tell those to leave for whom it is time, and kill those that do not."""
    state = turn.state
    if not state.failing:
        return
    over = state.phase == "ending" or state.stopping is not None
    first = None if _may_be_lost(state) else next(iter(state.failing))
    for worker, one in state.failing.items():
        if one.told and turn.now >= one.deadline:
            turn.do(Kill(worker=worker, reason="its script has failed, and it does not exit"))
            _set(turn, worker, Failing(deadline=turn.now + LEAVE_TIMEOUT_S, told=True))
        elif not one.told and (over or not _ranked(turn, worker) or (worker == first and turn.now >= one.deadline)):
            turn.send(worker, Leave())
            _set(turn, worker, Failing(deadline=turn.now + LEAVE_TIMEOUT_S, told=True))


def deadlines(state: JobState) -> list[float]:
    """When time alone changes something here."""
    first = None if _may_be_lost(state) else next(iter(state.failing), None)
    return [one.deadline for worker, one in state.failing.items() if one.told or worker == first]


def _may_be_lost(state: JobState) -> bool:
    """Whether a node with ranks may be lost: then it is soon, or is back."""
    return any(state.nodes[node].away for node in state.ranked_nodes() if node in state.nodes)


def _set(turn: Turn, worker: str, one: Failing) -> None:
    turn.set(failing={**turn.state.failing, worker: one})


def _ranked(turn: Turn, worker: str) -> bool:
    world = turn.state.world
    return worker in world.ranks if world is not None else turn.state.workers[worker].boot_rank is not None
