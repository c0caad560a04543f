"""A script has failed, and its process waits: who failed first, and what is it told? Pure.

Where processes are kept over a restart, a worker whose script has failed says Ended and waits. Its failure may only
be what it saw of another's: so for a moment nothing happens. If by then no worker and no node was lost, the first to
say so is told to leave; its exit is the failure. The others are told to unwind by the restart that follows, or to
leave as well if there is none.
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
    first = next(iter(state.failing))
    for worker, one in state.failing.items():
        if one.told and turn.now >= one.deadline:
            turn.do(Kill(worker=worker, reason="its script has failed, and it does not exit"))
            _set(turn, worker, Failing(deadline=turn.now + LEAVE_TIMEOUT_S, told=True))
        elif not one.told and (over or not _ranked(turn, worker) or (worker == first and turn.now >= one.deadline)):
            turn.send(worker, Leave())
            _set(turn, worker, Failing(deadline=turn.now + LEAVE_TIMEOUT_S, told=True))


def deadlines(state: JobState) -> list[float]:
    """When time alone changes something here."""
    return [one.deadline for number, one in enumerate(state.failing.values()) if one.told or number == 0]


def _set(turn: Turn, worker: str, one: Failing) -> None:
    turn.set(failing={**turn.state.failing, worker: one})


def _ranked(turn: Turn, worker: str) -> bool:
    world = turn.state.world
    return worker in world.ranks if world is not None else turn.state.workers[worker].boot_rank is not None
