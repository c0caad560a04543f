"""A clean end: every rank stops before the same step, so that none is left waiting for the others. Pure.

1. Where -> every rank; the answers give a step a little ahead.
2. Arm(step) -> every rank; one that answers *late* makes it a later step, as in a resize.
3. Where again until every rank says that it is at the boundary before that step, and waits there.
4. Stop -> everyone; after a notice the ranks take a checkpoint there, where the job has a folder for them.
   A job that takes longer than its patience gets the Stop at once, wherever it is.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.model import Answer, End, Phase, Stopping
from launcher.turn import Turn
from liverun.messages import Arm, Armed, Cancel, Stop, Where

POLL_S = 0.05
MAX_MARGIN = 64


def begin(turn: Turn, reason: str, *, patience_s: float, save: bool = False, requeue: bool = False) -> None:
    """Start to stop. What is under way has been aborted; a switch under way is not waited for.

    ``requeue``: nobody wants the job to be over, it only cannot go on here.
    """
    state = turn.state
    for wish in (state.queued, state.proposal.wish if state.proposal else None):
        if wish is not None:
            turn.do(Answer(wish=wish.id, ok=False, outcome="failed", reason="the job is ending"))
    turn.set(queued=None)
    together = state.world is not None and state.proposal is None and not state.done_ranks
    save = save and state.saves and together
    deadline = turn.now + patience_s
    turn.set(
        stopping=Stopping(reason=reason, deadline=deadline, poll_at=turn.now, save=save, requeue=requeue)
    )
    if together:
        turn.set(reason=f"{reason}: the ranks stop before the same step")
        ask(turn)
    else:
        finish(turn)


def ask(turn: Turn) -> None:
    """Ask every rank where it is, and ask again a little later."""
    stopping = turn.state.stopping
    assert stopping is not None
    turn.set(stopping=replace(stopping, poll_at=turn.now + POLL_S))
    turn.send_ranks(Where())


def progressed(turn: Turn, worker: str, step: int) -> None:
    """Note where a rank is: arm once all have said, stop once all wait."""
    stopping, world = turn.state.stopping, turn.state.world
    assert stopping is not None
    assert world is not None
    stopping = replace(stopping, seen={**stopping.seen, worker: step})
    turn.set(stopping=stopping)
    if set(stopping.seen) < set(world.ranks):
        return
    if stopping.step is None:
        step = max(stopping.seen.values()) + stopping.margin
        turn.set(stopping=replace(stopping, step=step, armed=frozenset()))
        turn.send_ranks(Arm(generation=world.generation, step=step))
    elif stopping.armed >= set(world.ranks) and all(at == stopping.step for at in stopping.seen.values()):
        finish(turn, together=True)


def armed(turn: Turn, worker: str, message: Armed) -> None:
    """Note that a rank will wait, or is past the step."""
    stopping, world = turn.state.stopping, turn.state.world
    assert stopping is not None
    assert world is not None
    if message.generation != world.generation or message.step != stopping.step:
        return
    if not message.late:
        turn.set(stopping=replace(stopping, armed=stopping.armed | {worker}))
        return
    turn.send_ranks(Cancel(generation=world.generation, step=message.step))
    margin = min(stopping.margin * 2, MAX_MARGIN)
    turn.set(stopping=replace(stopping, step=None, seen={}, armed=frozenset(), margin=margin))
    ask(turn)


def settle(turn: Turn) -> None:
    """Do what has become due."""
    stopping = turn.state.stopping
    if stopping is None:
        return
    if turn.now >= stopping.deadline:
        finish(turn)
    elif turn.now >= stopping.poll_at:
        ask(turn)


def finish(turn: Turn, *, together: bool = False) -> None:
    """Tell everyone to stop now. ``together``: every rank waits before the same step."""
    stopping, world = turn.state.stopping, turn.state.world
    assert stopping is not None
    ranks = world.ranks if world is not None and together and stopping.save else ()
    proposal = turn.state.proposal
    assert proposal is None or turn.state.world is None or proposal.phase is Phase.SWITCHING
    turn.set(phase="ending", proposal=None, stopping=None)
    for worker in turn.state.workers:
        turn.send(worker, Stop(reason=stopping.reason, save=worker in ranks))
    turn.record("stopped", stopping.reason, step=stopping.step)
    turn.do(End(outcome="stopped", reason=stopping.reason, requeue=stopping.requeue))
