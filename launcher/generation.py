"""A generation from PROPOSED to RETIRED or ABORTED: what each answer of its members leads to. Pure."""

from __future__ import annotations

from dataclasses import replace

from launcher import nodes
from launcher.model import (
    Answer,
    CloseStore,
    Commit,
    End,
    JobState,
    Kill,
    Number,
    OpenStore,
    Phase,
    Proposal,
    Retiring,
    Target,
    Wish,
    World,
    describe_world,
    short_world,
)
from launcher.target import NotYetError, RefusedError, members_of, resolve
from launcher.turn import Turn
from liverun.layout import Layout
from liverun.messages import Abort, Arm, Armed, Cancel, Check, Failed, Go, Prepare, Prepared, Switched, Where

FIRST_WORLD_TIMEOUT_S = 1800.0
ARM_TIMEOUT_S = 30.0
"""from READY, or a Cancel, to all armed"""
MAX_ARM_TRIES = 10
MAX_ARM_MARGIN = 64
"""steps ahead, at most; more would make a job of slow steps wait long for its switch"""
RETIRE_TIMEOUT_S = 60.0
ROOT_CAUSE_PATIENCE_S = 0.5
"""how long an abort waits for the end of a member: a better reason than the broken connection its peer saw"""


def begin_first(turn: Turn) -> None:
    """Propose the first world once every worker that was started with a rank has joined."""
    state = turn.state
    if not state.booted:
        return
    ranked = sorted(
        (worker for worker in state.workers.values() if worker.boot_rank is not None),
        key=lambda worker: worker.boot_rank if worker.boot_rank is not None else 0,
    )
    if len(ranked) < state.boot_size or not all(worker.joined for worker in ranked):
        return
    ranks = tuple(worker.id for worker in ranked)
    layout = state.layout_before or state.layout or ranked[0].layout or Layout()
    if (state.restarts or state.membership_restarts) and layout.misfit(len(ranks)) is not None:
        layout = layout.shrunk_to(len(ranks))  # there are fewer workers than there were
    if (reason := layout.misfit(len(ranks))) is not None:
        turn.set(phase="ending")
        turn.record("refused", reason)
        turn.do(End(outcome="failed", reason=reason))
        return
    target = Target(
        ranks=ranks, layout=layout, members=members_of(state, ranks),
        note=f"the first world: {short_world(layout, len(ranks))}",
    )  # fmt: skip
    turn.set(
        proposal=Proposal(wish=None, began=turn.now, deadline=turn.now + FIRST_WORLD_TIMEOUT_S, target=target)
    )
    turn.do(Number())


def begin(turn: Turn, wish: Wish) -> None:
    """Propose what is wished."""
    turn.set(proposal=Proposal(wish=wish, began=turn.now, deadline=turn.now + wish.timeout_s))
    aim(turn)
    if turn.state.proposal is not None and turn.state.proposal.target is None:
        turn.record("queued", turn.state.reason, wish=wish.id, cause=wish.cause)


def aim(turn: Turn) -> None:
    """Find the target of a proposal that has none yet; again whenever the pool has changed."""
    proposal = turn.state.proposal
    if proposal is None or proposal.target is not None or proposal.wish is None:
        return
    wish = proposal.wish
    try:
        target = resolve(turn.state, wish)
    except NotYetError as error:
        turn.set(reason=f"{wish.cause} {error}")
        return
    except RefusedError as error:
        refuse(turn, wish, str(error))
        return
    if target is None:
        world = turn.state.world
        assert world is not None
        reason = f"nothing to do: the world is {short_world(world.layout, len(world.ranks))} already"
        turn.set(proposal=None, reason=reason)
        fields = {"generation": world.generation}
        turn.do(Answer(wish=wish.id, ok=True, outcome="unchanged", reason=reason, fields=fields))
        return
    turn.set_proposal(target=target)
    turn.do(Number())


def refuse(turn: Turn, wish: Wish, reason: str, *, generation: int | None = None) -> None:
    """Say no to a wish; nothing has moved."""
    turn.record("refused", reason, generation=generation, cause=wish.cause)
    if turn.state.proposal is not None and turn.state.proposal.wish == wish:
        turn.set(proposal=None)
    turn.do(Answer(wish=wish.id, ok=False, outcome="refused", reason=reason))
    nodes.turned_down(turn, wish, for_good=True)


def numbered(turn: Turn, generation: int) -> None:
    """Ask a worker whether the model can be laid out so, now that the proposal has its number."""
    proposal = turn.state.proposal
    if proposal is None or proposal.target is None or proposal.generation is not None:
        return
    target = proposal.target
    patience_s = FIRST_WORLD_TIMEOUT_S if proposal.wish is None else proposal.wish.timeout_s
    turn.set_proposal(generation=generation, deadline=turn.now + patience_s)  # the store's time is not counted
    world = describe_world(target.layout, len(target.ranks))
    turn.record("proposed", target.note, generation=generation, world=world)
    if turn.state.world is None and turn.state.size_before in (0, len(target.ranks)):
        _open_store(turn)
        return
    check = Check(generation=generation, layout=target.layout, world_size=len(target.ranks))
    turn.send((turn.state.world or target).ranks[0], check)


def checked(turn: Turn, refusal: str | None) -> None:
    """Rank 0 has looked at the layout."""
    proposal = turn.state.proposal
    if proposal is None or proposal.generation is None or proposal.phase is not Phase.PROPOSED:
        return
    if refusal is not None and proposal.wish is not None:
        assert proposal.target is not None
        fewer = nodes.ask_less(proposal.wish, len(proposal.target.ranks))
        if fewer is None:
            refuse(turn, proposal.wish, refusal, generation=proposal.generation)
            return
        turn.record("refused", f"{refusal}; less is tried", generation=proposal.generation)
        turn.set(proposal=None)
        begin(turn, fewer)
    elif refusal is not None:
        _begin_smaller(turn, refusal)
    else:
        _open_store(turn)


def _begin_smaller(turn: Turn, refusal: str) -> None:
    """After a restart the workers there are make no world that the job can run in: leave the last one out."""
    proposal = turn.state.proposal
    assert proposal is not None
    target, generation = _aimed(proposal)
    if len(target.ranks) == 1:
        fail(turn, refusal)
        return
    spare = turn.state.workers[target.ranks[-1]]
    turn.record("refused", f"{refusal}; less is tried", generation=generation)
    turn.set(proposal=None)
    turn.set_worker(spare.id, boot_rank=None, state="standby")
    turn.set_node(spare.node, boot=turn.state.nodes[spare.node].boot - 1)
    begin_first(turn)


def _open_store(turn: Turn) -> None:
    proposal = turn.state.proposal
    assert proposal is not None
    target, generation = _aimed(proposal)
    turn.do(OpenStore(generation=generation, node=turn.state.workers[target.ranks[0]].node))


def store_opened(turn: Turn, host: str, port: int) -> None:
    """Let everyone prepare: the store of the new world listens."""
    proposal = turn.state.proposal
    if proposal is None or proposal.phase is not Phase.PROPOSED:
        return
    target, generation = _aimed(proposal)
    prepare = Prepare(
        generation=generation, layout=target.layout, world_size=len(target.ranks), members=target.members,
        store_host=host, store_port=port, timeout_s=max(1.0, proposal.deadline - turn.now),
    )  # fmt: skip
    turn.set_proposal(phase=Phase.PREPARING)
    turn.record(
        "preparing", f"{len(target.members)} workers prepare generation {generation}", generation=generation
    )
    for member in target.members:
        turn.send(member.worker, prepare)


def store_failed(turn: Turn, number: int, reason: str) -> None:
    """Abort what needs the c10d store that failed: a proposal whose members have not all built their groups yet."""
    proposal = turn.state.proposal
    if proposal is None or proposal.generation != number or proposal.phase not in (Phase.PROPOSED, Phase.PREPARING):
        return
    abort(turn, reason)


def prepared(turn: Turn, worker: str, message: Prepared) -> None:
    """One member is ready."""
    proposal = turn.state.proposal
    if proposal is None or proposal.phase is not Phase.PREPARING or worker not in _names(proposal):
        return
    proposal = turn.set_proposal(
        prepared=proposal.prepared | {worker}, prepare_s=max(proposal.prepare_s, message.prepare_s)
    )
    if proposal.prepared != _names(proposal):
        return
    target, generation = _aimed(proposal)
    turn.set_proposal(phase=Phase.READY)
    turn.record("ready", f"all {len(target.members)} workers are ready", generation=generation)
    turn.set_proposal(held=True)
    go_on(turn)


def go_on(turn: Turn) -> None:
    """Do what follows READY; only while this controller leads, another world may have become active else."""
    proposal = turn.state.proposal
    if proposal is None or not proposal.held or not turn.state.leads:
        return
    turn.set_proposal(held=False)
    if turn.state.world is None:
        _go(turn, None)
    else:
        _ask_where(turn)


def progressed(turn: Turn, worker: str, step: int) -> None:
    """Note where a worker of the old world is; once all have said, arm a step that none has reached."""
    proposal, world = turn.state.proposal, turn.state.world
    if proposal is None or world is None or proposal.phase is not Phase.READY or proposal.step is not None:
        return
    proposal = turn.set_proposal(seen={**proposal.seen, worker: step})
    if set(proposal.seen) >= set(world.ranks):
        step = max(proposal.seen.values()) + proposal.margin
        turn.set_proposal(step=step, armed=frozenset(), tries=proposal.tries + 1)
        turn.send_ranks(Arm(generation=proposal.generation or 0, step=step))


def armed(turn: Turn, worker: str, message: Armed) -> None:
    """Note that a worker will wait at the boundary, or is past it."""
    proposal, world = turn.state.proposal, turn.state.world
    if (
        proposal is None
        or world is None
        or proposal.phase is not Phase.READY
        or proposal.step != message.step
    ):
        return
    if message.late:
        _cancel(
            turn,
            f"{turn.name(worker)} was at step {message.at_step}, past the boundary before {message.step}",
        )
        return
    if not turn.state.leads:
        _cancel(turn, "the leader's lease is over")
        return
    proposal = turn.set_proposal(armed=proposal.armed | {worker})
    if proposal.armed >= set(world.ranks):
        turn.set_proposal(phase=Phase.ARMED)
        reason = f"all workers stop at the boundary before step {message.step}"
        turn.record("armed", reason, generation=proposal.generation, step=message.step)
        _go(turn, message.step)


def _ask_where(turn: Turn) -> None:
    turn.set_proposal(seen={}, step=None, armed=frozenset(), deadline=turn.now + ARM_TIMEOUT_S)
    turn.send_ranks(Where())


def _cancel(turn: Turn, why: str) -> None:
    proposal = turn.state.proposal
    assert proposal is not None
    assert proposal.step is not None
    turn.send_ranks(Cancel(generation=proposal.generation or 0, step=proposal.step))
    turn.record(
        "cancelled", f"{why}; a later step is tried", generation=proposal.generation, step=proposal.step
    )
    turn.set_proposal(step=None)
    if proposal.tries >= MAX_ARM_TRIES:
        abort(turn, f"no step could be agreed on in {proposal.tries} tries: {why}")
        return
    turn.set_proposal(margin=min(proposal.margin * 2, MAX_ARM_MARGIN), held=True)
    go_on(turn)


def _go(turn: Turn, step: int | None) -> None:
    proposal = turn.state.proposal
    assert proposal is not None
    target, generation = _aimed(proposal)
    turn.set_proposal(phase=Phase.SWITCHING, step=step)
    turn.record("switching", "the new world takes over", generation=generation)
    for member in target.members:
        turn.send(member.worker, Go(generation=generation, step=step))


def switched(turn: Turn, worker: str, message: Switched) -> None:
    """Note a member's vote."""
    proposal = turn.state.proposal
    if proposal is None or proposal.phase is not Phase.SWITCHING or worker not in _names(proposal):
        return
    turn.set_proposal(votes={**proposal.votes, worker: message})
    count_votes(turn)


def count_votes(turn: Turn) -> None:
    """All yes: commit. All no: the old world goes on. Anything else: fail, never two worlds."""
    proposal = turn.state.proposal
    assert proposal is not None
    if not set(proposal.votes) >= _names(proposal) - proposal.lost:
        return
    if why_lost(turn.state):
        return  # a worker without a world ends, and its end is that of the job
    target, generation = _aimed(proposal)
    votes = {worker: vote for worker, vote in proposal.votes.items() if worker not in proposal.lost}
    noes = [worker for worker, vote in votes.items() if not vote.ok]
    yeses = [worker for worker, vote in votes.items() if vote.ok]
    if not yeses and turn.state.world is not None:
        # the root cause first would be better, but only the reader can tell it from what followed
        why = "; ".join(f"{turn.name(worker)}: {votes[worker].reason}" for worker in noes)
        why = why or "no worker is left to vote"
        lost = (
            f"; {', '.join(map(turn.name, sorted(proposal.lost)))} ended while switching"
            if proposal.lost
            else ""
        )
        abort(turn, f"not committed, {why}{lost}")
    elif noes or proposal.lost:
        said = f"{', '.join(yeses)} said yes, {', '.join(noes) or 'none'} said no"
        said += f", {', '.join(sorted(proposal.lost))} ended" if proposal.lost else ""
        why = "; ".join(f"{worker}: {votes[worker].reason}" for worker in noes)
        fail(turn, f"generation {generation} is split: {said}; {why}".rstrip("; "))
    else:
        world = World(generation=generation, layout=target.layout, ranks=target.ranks)
        turn.do(Commit(old=turn.state.world.generation if turn.state.world else None, world=world))


def why_lost(state: JobState) -> str:
    """Say why there is no world to go back to; empty where there is one."""
    proposal = state.proposal
    votes = proposal.votes if proposal is not None else {}
    if proposal is None or not any(vote.lost for vote in votes.values()):
        return ""
    # a member that had given nothing back only saw its peers go
    said = sorted(votes.items(), key=lambda item: (not item[1].lost, item[0]))
    why = "; ".join(f"{worker}: {vote.reason}" for worker, vote in said if not vote.ok)
    return f"generation {proposal.generation} failed when layers of the old world had been given back: {why}"


def committed(turn: Turn, *, won: bool) -> None:
    """Make the new world the job; no other is."""
    proposal = turn.state.proposal
    if proposal is None or proposal.phase is not Phase.SWITCHING:
        return
    target, generation = _aimed(proposal)
    if not won:
        fail(turn, f"generation {generation} was not recorded: another generation has become active")
        return
    old, world = turn.state.world, World(generation=generation, layout=target.layout, ranks=target.ranks)
    text = short_world(world.layout, len(world.ranks))
    step = max(vote.step for vote in proposal.votes.values())
    if old is None:
        turn.record("world", f"generation {generation}: {text}", generation=generation, world=world.as_dict())
    else:
        last = _last_resize(turn, "active", "")
        turn.set(last_resize=last)
        turn.record(
            "active", f"generation {generation}: {text}", generation=generation, fields=_but_reason(last)
        )
        assert proposal.wish is not None
        fields = {"generation": generation, "summary": text, **_but_reason(last)}
        reason = turn.state.reason
        if proposal.wish.without is None:  # a drain is done when the node has left
            turn.do(Answer(wish=proposal.wish.id, ok=True, outcome="active", reason=reason, fields=fields))
        waiting = frozenset(_names(proposal)) & frozenset(turn.state.workers)
        turn.set(
            retiring=Retiring(
                generation=old.generation, waiting=waiting, deadline=turn.now + RETIRE_TIMEOUT_S
            )
        )
    workers = {
        name: replace(worker, state="ranked")
        if name in world.ranks
        else replace(worker, state="leaving")
        if old is not None and name in old.ranks
        else worker
        for name, worker in turn.state.workers.items()
    }
    turn.set(
        world=world, proposal=None, workers=workers, phase="running", steps=dict.fromkeys(world.ranks, step)
    )
    nodes.settled(turn, proposal.wish)
    for worker, leaves in proposal.retired.items():
        retired(turn, worker, generation=generation, leaves=leaves)


def retired(turn: Turn, worker: str, *, generation: int, leaves: bool) -> None:
    """Nothing of the old world is left in a worker."""
    known, world, retiring = turn.state.workers.get(worker), turn.state.world, turn.state.retiring
    proposal = turn.state.proposal
    if proposal is not None and proposal.phase is Phase.SWITCHING and proposal.generation == generation:
        turn.set_proposal(retired={**proposal.retired, worker: leaves})  # some other vote is still out
        return
    if world is None or generation != world.generation or known is None:
        return
    if known.state == "leaving" and leaves:
        turn.set_worker(worker, state="standby")
    if retiring is not None and worker in retiring.waiting:
        turn.set(retiring=replace(retiring, waiting=retiring.waiting - {worker}))
        close_retired(turn)


def close_retired(turn: Turn) -> None:
    """Say so once the old world is gone, or has had its time."""
    retiring = turn.state.retiring
    if retiring is None or (retiring.waiting and turn.now < retiring.deadline):
        return
    reason = f"nothing of generation {retiring.generation} is left"
    if retiring.waiting:
        silent = ", ".join(map(turn.name, sorted(retiring.waiting)))
        reason = f"generation {retiring.generation} is given up; {silent} kept it over {RETIRE_TIMEOUT_S:g} s"
    turn.set(retiring=None)
    turn.record("retired", reason, generation=retiring.generation)
    turn.do(CloseStore(generation=retiring.generation))


def abort(turn: Turn, reason: str) -> None:
    """Drop the proposal; the old world trains on. Without an old world the job fails.

    Joiners that were preparing are killed and replaced: one of them may hang, and whoever waits for it in a
    collective, which gloo cannot abort, is free at once.
    """
    proposal = turn.state.proposal
    if proposal is None:
        return
    if turn.state.world is None:
        fail(turn, reason)
        return
    assert proposal.wish is not None
    generation, kill = proposal.generation, set[str]()
    if proposal.target is not None and generation is not None:
        if proposal.phase in (Phase.PREPARING, Phase.READY):
            kill = {member.worker for member in proposal.target.members if member.old_rank is None}
            kill &= set(turn.state.workers)
        if proposal.phase is Phase.READY and proposal.step is not None:
            turn.send_ranks(Cancel(generation=generation, step=proposal.step))
        if proposal.phase in (Phase.PREPARING, Phase.READY):
            for member in proposal.target.members:
                if member.worker not in kill:
                    turn.send(member.worker, Abort(generation=generation, reason=reason))
        turn.set(last_resize=_last_resize(turn, "aborted", reason))
        turn.do(CloseStore(generation=generation))
    turn.record("aborted", reason, generation=generation, cause=proposal.wish.cause)
    turn.do(Answer(wish=proposal.wish.id, ok=False, outcome="aborted", reason=reason))
    turn.set(proposal=None)
    nodes.turned_down(turn, proposal.wish, for_good=False)
    for worker in sorted(kill):
        turn.set_worker(worker, state="leaving")  # not a standby that the next proposal could count on
        turn.do(Kill(worker=worker, reason=reason))


def fail(turn: Turn, reason: str) -> None:
    """End the job without a world to go back to."""
    proposal = turn.state.proposal
    turn.set(phase="ending", proposal=None)
    turn.record("worker_failed", reason, generation=proposal.generation if proposal else None)
    if proposal is not None and proposal.wish is not None:
        turn.do(Answer(wish=proposal.wish.id, ok=False, outcome="failed", reason=reason))
    turn.do(End(outcome="failed", reason=reason))


def failed(turn: Turn, worker: str, message: Failed) -> None:
    """Abort: a member could not prepare."""
    proposal = turn.state.proposal
    if proposal is None or proposal.phase not in (Phase.PREPARING, Phase.READY) or proposal.failure:
        return
    deadline = min(proposal.deadline, turn.now + ROOT_CAUSE_PATIENCE_S)
    turn.set_proposal(failure=f"{turn.name(worker)}: {message.reason}", deadline=deadline)


def late(turn: Turn) -> None:
    """Abort a proposal whose deadline has passed."""
    proposal, world = turn.state.proposal, turn.state.world
    if proposal is None or turn.now < proposal.deadline or waits_for_store(proposal):
        return
    waited = f"in {turn.now - proposal.began:.0f} s"
    if proposal.failure:
        abort(turn, proposal.failure)
    elif proposal.held:
        abort(turn, f"the leader's lease is over, and was not renewed {waited}")
    elif proposal.phase is Phase.PREPARING:
        silent = _names(proposal) - proposal.prepared
        names = ", ".join(map(turn.name, sorted(silent)))
        abort(turn, f"{names} did not get ready {waited}")
    elif proposal.phase is Phase.PROPOSED:
        abort(
            turn,
            f"{turn.state.reason}, not {waited}"
            if proposal.target is None
            else f"no answer to Check {waited}",
        )
    elif proposal.phase is Phase.READY and world is not None:
        heard = proposal.seen if proposal.step is None else proposal.armed
        names = ", ".join(turn.name(worker) for worker in world.ranks if worker not in heard)
        abort(turn, f"{names} did not say where it is in {ARM_TIMEOUT_S:g} s")


def waits_for_store(proposal: Proposal) -> bool:
    """Whether a proposal has no number yet: a store that is away delays it, and no more."""
    return proposal.target is not None and proposal.generation is None


def _last_resize(turn: Turn, outcome: str, reason: str) -> dict[str, object]:
    proposal, old = turn.state.proposal, turn.state.world
    assert proposal is not None
    assert proposal.wish is not None
    assert old is not None
    target, generation = _aimed(proposal)
    votes = proposal.votes.values()
    # a joiner waits for the others at the boundary, and would count that as its own time
    stood = [vote for worker, vote in proposal.votes.items() if worker in old.ranks]
    world = describe_world(target.layout, len(target.ranks))
    return {
        "from": {"generation": old.generation, **old.as_dict()},
        "to": {"generation": generation, **world},
        "cause": proposal.wish.cause,
        "outcome": outcome,
        "reason": reason or target.note,
        "pause_s": max((vote.pause_s for vote in votes), default=0.0),
        "phases": {
            "prepare_s": proposal.prepare_s,
            "arm_s": max((vote.arm_s for vote in votes), default=0.0),
            "transfer_s": max((vote.transfer_s for vote in stood), default=0.0),
            "stream_s": max((vote.stream_s for vote in stood), default=0.0),
            "commit_s": max((vote.commit_s for vote in votes), default=0.0),
        },
        "bytes_moved": sum(vote.bytes_moved for vote in votes),
        "bytes_local": sum(vote.bytes_local for vote in votes),
        "peak_extra_bytes": max((vote.peak_extra_bytes for vote in votes), default=0),
        "bytes_late": sum(vote.bytes_late for vote in votes),
        "kept": all(vote.kept for vote in votes),
        "verify": {
            "mode": max((vote.verify for vote in votes), default=""),
            "seconds": max((vote.verify_s for vote in votes), default=0.0),
        },
    }


def _but_reason(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if name != "reason"}


def _aimed(proposal: Proposal) -> tuple[Target, int]:
    assert proposal.target is not None
    assert proposal.generation is not None
    return proposal.target, proposal.generation


def _names(proposal: Proposal) -> frozenset[str]:
    assert proposal.target is not None
    return frozenset(member.worker for member in proposal.target.members)
