"""A checkpoint that someone asks for: every rank takes it at the boundary before the same step. Pure.

1. Where -> every rank; the answers give a step a little ahead.
2. Arm(-r, step) -> every rank, r being the request; one that answers *late* makes it a later step, as in a resize.
3. Go(-r) once all are armed: each copies its share at that boundary and trains on.
4. Saved from rank 0 once the checkpoint exists, or from any rank that could not do its part.

Until then no change of world begins: it would want the same boundaries.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.model import Answer, Record, Saving
from launcher.turn import Turn
from liverun.messages import Arm, Armed, Cancel, Go, Saved, Where

POLL_S = 0.05
MAX_MARGIN = 64


def begin(turn: Turn, request: int, timeout_s: float) -> None:
    """Note the wish; it begins when no change of world is under way."""
    state = turn.state
    why = ""
    if state.phase == "ending" or state.done_ranks or state.stopping is not None:
        why = "the job is ending"
    elif not state.saves:
        why = "the job has no folder for checkpoints; start it with --checkpoint-dir"
    elif state.world is None:
        why = "there is no world yet to take a checkpoint of"
    elif state.saving is not None:
        why = "another checkpoint is being taken"
    if why:
        turn.do(Answer(wish=request, ok=False, outcome="refused", reason=why))
        return
    turn.set(saving=Saving(request=request, deadline=turn.now + timeout_s, poll_at=turn.now))


def settle(turn: Turn) -> bool:
    """Do what has become due; true while no change of world may begin or go on."""
    saving = turn.state.saving
    if saving is None:
        return False
    if turn.now >= saving.deadline:
        give_up(turn, f"no checkpoint within the time given; {_whereabouts(saving)}")
        return False
    if not saving.begun:
        if turn.state.proposal is not None or turn.state.retiring is not None:
            return False
        turn.set(saving=replace(saving, begun=True))
    if turn.now >= saving.poll_at and not saving.going:
        _ask(turn)
    return True


def _whereabouts(saving: Saving) -> str:
    if not saving.begun:
        return "a change of world is under way"
    return "it is still being written" if saving.going else "the ranks did not come to a common step"


def _ask(turn: Turn) -> None:
    saving = turn.state.saving
    assert saving is not None
    turn.set(saving=replace(saving, poll_at=turn.now + POLL_S))
    turn.send_ranks(Where())


def progressed(turn: Turn, worker: str, step: int) -> None:
    """Note where a rank is; once all have said, arm a step that none has reached."""
    saving, world = turn.state.saving, turn.state.world
    if saving is None or world is None or not saving.begun or saving.step is not None:
        return
    saving = replace(saving, seen={**saving.seen, worker: step})
    turn.set(saving=saving)
    if set(saving.seen) >= set(world.ranks):
        step = max(saving.seen.values()) + saving.margin
        turn.set(saving=replace(saving, step=step, armed=frozenset()))
        turn.send_ranks(Arm(generation=-saving.request, step=step))


def armed(turn: Turn, worker: str, message: Armed) -> None:
    """Note that a rank will wait, or is past the step; once all will, let them take it."""
    saving, world = turn.state.saving, turn.state.world
    if saving is None or world is None or message.generation != -saving.request or message.step != saving.step:
        return
    if message.late:
        turn.send_ranks(Cancel(generation=-saving.request, step=message.step))
        margin = min(saving.margin * 2, MAX_MARGIN)
        turn.set(saving=replace(saving, step=None, seen={}, armed=frozenset(), margin=margin, poll_at=turn.now))
        return
    saving = replace(saving, armed=saving.armed | {worker})
    turn.set(saving=saving)
    if saving.armed >= set(world.ranks) and not saving.going:
        turn.set(saving=replace(saving, going=True))
        turn.send_ranks(Go(generation=-saving.request, step=saving.step))


def saved(turn: Turn, worker: str, message: Saved) -> None:
    """Record a checkpoint, asked for or due, and answer who asked."""
    saving = turn.state.saving
    generation = turn.state.world.generation if turn.state.world else 0
    fields = {"step": message.step, "path": message.path, "pause_s": message.pause_s, "write_s": message.write_s}
    if message.ok:
        reason = f"checkpoint of step {message.step}: {message.path}"
        turn.set(last_checkpoint=fields)
        turn.do(Record(kind="checkpoint", generation=generation, reason=reason, fields=fields))
    else:
        reason = f"no checkpoint of step {message.step}: {message.reason}"
        turn.do(Record(kind="checkpoint_failed", generation=generation, reason=reason, fields={"worker": worker}))
    if saving is not None and message.request == saving.request:
        outcome = "saved" if message.ok else "failed"
        turn.do(Answer(wish=saving.request, ok=message.ok, outcome=outcome, reason=reason, fields=fields))
        _disarm(turn, saving)
        turn.set(saving=None)


def give_up(turn: Turn, reason: str) -> None:
    """Forget the wish, for a reason."""
    saving = turn.state.saving
    if saving is not None:
        turn.do(Answer(wish=saving.request, ok=False, outcome="failed", reason=reason))
        _disarm(turn, saving)
        turn.set(saving=None)


def _disarm(turn: Turn, saving: Saving) -> None:
    if turn.state.world is not None and saving.step is not None and not saving.going:
        turn.send_ranks(Cancel(generation=-saving.request, step=saving.step))
