"""``decide(now, state, event)``: the one place where it is decided what becomes of a job's world. Pure.

``PROPOSED -> PREPARING -> READY -> ARMED -> SWITCHING -> ACTIVE -> RETIRED``, and ``ABORTED`` from every
state up to the vote in SWITCHING. The phases live in :mod:`launcher.generation`, the choice of a target in
:mod:`launcher.target`; here is what workers, people and the clock bring about.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import assert_never

from launcher import failing, generation, nodes, saving, stopping
from launcher.model import (
    Answer,
    Committed,
    Decision,
    End,
    Event,
    Exited,
    HandoverFailed,
    JobState,
    Node,
    NodeAway,
    NodeCleared,
    NodeEntered,
    NodeLeaving,
    NodeLost,
    Numbered,
    NumberFailed,
    Phase,
    Said,
    SaveAsked,
    Started,
    StopAsked,
    StoreFailed,
    StoreOpened,
    Tick,
    Wish,
    Wished,
    Worker,
)
from launcher.nodes import JOIN_PATIENCE_S, has_joined, may_still_join
from launcher.process import describe_exit
from launcher.turn import MAX_BARREN, Turn
from liverun.messages import (
    Armed,
    Checked,
    Ended,
    Failed,
    Hello,
    Message,
    Prepared,
    Progress,
    Retired,
    Saved,
    Stop,
    Switched,
)

MAX_FRUITLESS = 3
"""attempts in a row that may end without progress, before the job is given up though restarts are left"""
NEVER_JOINS = "this script does not call liverun.join(), so its world cannot change while it runs"


def decide(now: float, state: JobState, event: Event) -> Decision:
    """Return the next state, what to do, and why. ``now`` is monotonic, in seconds."""
    turn = Turn(now, state)
    match event:
        case NodeEntered():
            nodes.entered(turn, event.node)
        case NodeLost():
            if event.node in state.nodes:
                _node_lost(turn, event.node, event.reason)
        case NodeAway():
            if event.node in state.nodes:
                turn.set_node(event.node, away=event.away)
        case NodeLeaving():
            if event.node in state.nodes:
                _node_leaving(turn, event)
        case HandoverFailed():
            nodes.handover_failed(turn, event.node, event.reason)
        case NodeCleared():
            nodes.cleared(turn, event.node, event.kept)
        case Started():
            if event.node in state.nodes:
                _started(turn, event)
        case Said():
            # a checkpoint taken at the last step is there once the job is ending, and a script may still fail
            late = isinstance(event.message, Saved | Ended)
            if event.worker in state.workers and (state.phase != "ending" or late):
                _said(turn, event.worker, event.message)
        case Exited():
            if event.worker in state.workers:
                _exited(turn, event)
        case Wished():
            _wished(turn, event.wish)
        case Numbered():
            generation.numbered(turn, event.generation)
        case NumberFailed():
            if turn.state.proposal is not None and turn.state.proposal.generation is None:
                generation.abort(turn, event.reason)
        case StoreOpened():
            if _current(turn, event.generation):
                generation.store_opened(turn, event.host, event.port)
        case StoreFailed():
            generation.store_failed(turn, event.generation, event.reason)
        case Committed():
            if _current(turn, event.generation):
                generation.committed(turn, won=event.won)
        case StopAsked():
            _stop(turn, event.reason)
        case SaveAsked():
            saving.begin(turn, event.request, event.timeout_s)
        case Tick():
            pass
        case _:
            assert_never(event)
    _settle(turn)
    return turn.decision()


def next_deadline(state: JobState) -> float | None:
    """When a Tick is due at the latest."""
    if state.phase == "ending":
        return None
    times = failing.deadlines(state)
    if state.stopping is not None:
        times += [state.stopping.deadline, state.stopping.poll_at]
    if state.saving is not None:
        times += [state.saving.deadline, *([] if state.saving.going else [state.saving.poll_at])]
    if (
        state.proposal is not None
        and state.proposal.phase is not Phase.SWITCHING
        and not generation.waits_for_store(state.proposal)
    ):
        times.append(state.proposal.deadline)
    if state.retiring is not None:
        times.append(state.retiring.deadline)
    if state.queued is not None and state.began is not None and not has_joined(state):
        times.append(state.began + JOIN_PATIENCE_S)
    times += nodes.deadlines(state)
    return min(times, default=None)


def _settle(turn: Turn) -> None:
    """Do what has become due, whatever the event was."""
    failing.settle(turn)
    if turn.state.phase == "ending" or turn.state.handing_over:
        return
    state = turn.state
    if state.stopping is not None:
        stopping.settle(turn)
        return
    if saving.settle(turn):
        return
    if state.world is None and state.done_ranks and has_joined(state):
        generation.fail(
            turn, "a worker ended before the first world was built; the others wait in liverun.join()"
        )
        return
    if state.queued is not None and not has_joined(state) and not may_still_join(turn):
        turn.set(queued=None)
        if state.queued.without is None:
            generation.refuse(turn, state.queued, NEVER_JOINS)  # a drain makes it start again instead
    nodes.settle(turn)
    if stuck := next((node for node in turn.state.nodes.values() if node.stuck), None):
        turn.set_node(stuck.id, stuck=False)
        _stop(turn, f"node {stuck.id} leaves ({stuck.leaving}), and nobody can take its work", requeue=True)
    if turn.state.phase == "ending" or turn.state.stopping is not None:
        return
    generation.late(turn)
    generation.go_on(turn)
    generation.close_retired(turn)
    generation.aim(turn)
    if turn.state.phase != "ending" and turn.state.proposal is None and turn.state.retiring is None:
        if turn.state.world is None:
            generation.begin_first(turn)
        elif turn.state.queued is not None:
            wish = turn.state.queued
            turn.set(queued=None)
            if turn.state.done_ranks:
                generation.refuse(turn, wish, "the job is ending")
            else:
                generation.begin(turn, wish)


def _current(turn: Turn, number: int) -> bool:
    """Whether a message is about the generation that is on its way; older ones are fenced off."""
    return turn.state.proposal is not None and turn.state.proposal.generation == number


def _said(turn: Turn, worker: str, message: Message) -> None:
    if isinstance(message, Hello):
        _hello(turn, worker, message)
    elif isinstance(message, Progress):
        world = turn.state.world
        if world is not None and message.generation == world.generation and worker in world.ranks:
            turn.set(steps={**turn.state.steps, worker: message.step})
            if turn.state.began_at is None:
                turn.set(began_at=message.step)
            if worker == world.ranks[0]:
                turn.set(report=message.report)
            if turn.state.stopping is not None:
                stopping.progressed(turn, worker, message.step)
            elif turn.state.saving is not None and turn.state.saving.begun:
                saving.progressed(turn, worker, message.step)
            else:
                generation.progressed(turn, worker, message.step)
    elif isinstance(message, Ended):
        failing.ended(turn, worker)
    elif isinstance(message, Saved):
        saving.saved(turn, worker, message)
    elif isinstance(message, Armed) and message.generation < 0:
        saving.armed(turn, worker, message)
    elif isinstance(message, Armed) and turn.state.stopping is not None:
        stopping.armed(turn, worker, message)
    elif isinstance(message, Retired):
        generation.retired(turn, worker, generation=message.generation, leaves=message.leaves)
    elif isinstance(message, Checked | Prepared | Failed | Armed | Switched) and _current(
        turn, message.generation
    ):
        if isinstance(message, Checked):
            generation.checked(turn, message.refusal)
        elif isinstance(message, Prepared):
            generation.prepared(turn, worker, message)
        elif isinstance(message, Failed):
            generation.failed(turn, worker, message)
        elif isinstance(message, Armed):
            generation.armed(turn, worker, message)
        else:
            generation.switched(turn, worker, message)


def _hello(turn: Turn, worker: str, message: Hello) -> None:
    known = turn.state.workers[worker]
    state = "standby" if known.boot_rank is None else known.state
    turn.set_worker(worker, joined=True, layout=message.layout, state=state)
    if known.boot_rank is None:
        turn.set_node(known.node, barren=0)
    elif not turn.state.standbys_started:
        turn.set(standbys_started=True)
        turn.fill_pool()


def _wished(turn: Turn, wish: Wish) -> None:
    state = turn.state
    if state.phase == "ending" or state.done_ranks or state.stopping is not None:
        generation.refuse(turn, wish, "the job is ending")
        return
    if not has_joined(state) and not may_still_join(turn):
        generation.refuse(turn, wish, NEVER_JOINS)
        return
    if state.queued is not None and state.queued.without is not None and wish.without is None:
        generation.refuse(turn, wish, f"{state.queued.cause} comes first; ask again after it")
        return
    if state.queued is not None:
        reason = f"superseded by a later request ({wish.cause})"
        turn.do(Answer(wish=state.queued.id, ok=False, outcome="refused", reason=reason))
    turn.set(queued=wish)
    if state.proposal is not None or state.retiring is not None or state.world is None:
        number = state.proposal.generation if state.proposal else None
        what = f"generation {number} is settled" if number else "the world before it is settled"
        if state.world is None:
            what = "the first world is active" if has_joined(state) else "a worker has called liverun.join()"
        turn.record("queued", f"{wish.cause} waits until {what}", wish=wish.id, cause=wish.cause)


def _started(turn: Turn, event: Started) -> None:
    state, node = turn.state, turn.state.nodes[event.node]
    worker = Worker(id=event.worker, node=event.node, pid=event.pid, boot_rank=event.boot_rank)
    turn.set(
        workers={**state.workers, event.worker: worker}, began=turn.now if state.began is None else state.began
    )
    if event.boot_rank is None:
        turn.set_node(node.id, forks_to_come=max(0, node.forks_to_come - 1))
    else:
        turn.set_node(node.id, boot_to_come=max(0, node.boot_to_come - 1))


def _exited(turn: Turn, event: Exited) -> None:
    state, worker, code = turn.state, event.worker, event.code
    world, proposal = state.world, state.proposal
    rank = None
    if world is not None and worker in world.ranks:
        rank = world.ranks.index(worker)
    elif world is None:
        rank = state.workers[worker].boot_rank
    turn.set(failing={name: one for name, one in state.failing.items() if name != worker})
    if state.phase == "ending":
        turn.drop_worker(worker)
    elif state.stopping is not None:
        turn.drop_worker(worker)
        if rank is not None:
            stopping.finish(turn)
    elif rank is not None and code == 0:
        _rank_done(turn, worker)
    elif rank is not None:
        where = f" (rank {rank})"
        reason = generation.why_lost(state) or f"worker {worker}{where} failed: {describe_exit(code)}"
        turn.record("worker_failed", reason, worker=worker, rank=rank, exit_code=code)
        _rank_failed(turn, event, rank, reason)
    else:
        name, how = turn.name(worker), describe_exit(code)
        known = turn.drop_worker(worker)
        _not_waiting(turn, worker)
        takes_part = proposal is not None and proposal.target is not None and worker in proposal.target.ranks
        if takes_part and proposal is not None and proposal.phase is Phase.SWITCHING:
            turn.set_proposal(lost=proposal.lost | {worker})
            generation.count_votes(turn)
        elif takes_part:
            generation.abort(turn, f"{name} ended while preparing: {how}")
        elif known.state != "leaving" or code != 0:
            turn.record("worker_failed", f"standby {worker} ended: {how}", worker=worker, exit_code=code)
        node = turn.state.nodes[known.node]
        turn.set_node(node.id, barren=0 if known.joined else node.barren + 1)
        if turn.state.nodes[node.id].barren >= MAX_BARREN:
            on = f" on node {node.id}" if len(turn.state.nodes) > 1 else ""
            reason = f"{MAX_BARREN} standbys in a row ended before they joined{on}; no more are started"
            turn.record("worker_failed", reason)
        turn.fill_pool()


def _not_waiting(turn: Turn, worker: str) -> None:
    retiring = turn.state.retiring
    if retiring is not None:
        turn.set(retiring=replace(retiring, waiting=retiring.waiting - {worker}))


def _rank_done(turn: Turn, worker: str) -> None:
    state = turn.state
    if (
        state.proposal is not None
        and state.proposal.phase is Phase.SWITCHING
        and worker not in state.proposal.votes
    ):
        # it ended its loop before it could say so
        reason = "the script ended before the change"
        vote = Switched(generation=state.proposal.generation or 0, ok=False, reason=reason)
        turn.set_proposal(votes={**state.proposal.votes, worker: vote})
        generation.count_votes(turn)
    saving.give_up(turn, "the job is ending")
    turn.set(done_ranks={**turn.state.done_ranks, worker: state.workers[worker].node})
    if state.proposal is not None and state.proposal.phase is not Phase.SWITCHING:
        generation.abort(turn, "the job is ending")
    if state.queued is not None:
        wish = state.queued
        turn.set(queued=None)
        generation.refuse(turn, wish, "the job is ending")
    turn.drop_worker(worker)
    _not_waiting(turn, worker)
    world, done = turn.state.world, turn.state.done_ranks
    all_done = set(world.ranks) <= set(done) if world is not None else len(done) >= state.boot_size
    if turn.state.phase != "ending" and all_done:
        turn.set(phase="ending")
        for other in turn.state.workers:
            turn.send(other, Stop(reason="the job is done"))
        num = len(turn.state.done_ranks)
        turn.record("finished", f"all {num} workers are done" if num > 1 else "the worker is done")
        turn.do(End(outcome="finished", reason=turn.state.reason))


def _rank_failed(turn: Turn, event: Exited, rank: int | None, reason: str) -> None:
    """End the job, or start its workers again: a ranked worker is gone."""
    state = turn.state
    proposal = state.proposal
    for wish in (proposal.wish if proposal else None, state.queued):
        if wish is not None:
            turn.do(Answer(wish=wish.id, ok=False, outcome="failed", reason=reason))
    saving.give_up(turn, reason)
    if event.worker in state.workers:
        turn.drop_worker(event.worker)
    before = nodes.shares(state)
    lived = state.began is not None and turn.now >= state.began + JOIN_PATIENCE_S
    joins = state.standbys_started
    # a job that never ran would fail the same way again (a typo, a missing module): no retry before the first
    # step. A script that joins has run when it has had a world; another one when it came to its c10d store,
    # or has lived long enough
    has_run = state.has_run or (state.world is not None if joins else event.under_way or lived)
    best_step = max(state.steps.values(), default=0)
    progress = best_step > state.best_step if joins else lived
    fruitless = 0 if progress else state.fruitless + 1
    left = state.restarts < state.max_restarts
    hopeless = left and has_run and fruitless >= MAX_FRUITLESS
    if left and not has_run:
        reason += "; not restarted, since the job never got as far as its first step"
    elif hopeless:
        reason += f"; not restarted, since {fruitless} tries in a row made no progress"
    elif left:
        reason += f"; restart {state.restarts + 1} of {state.max_restarts}"
        turn.set(
            restarts=state.restarts + 1, has_run=has_run, fruitless=fruitless,
            best_step=max(state.best_step, best_step),
        )  # fmt: skip
        # one that made no step may have failed of what its processes brought along
        trained = state.began_at is not None and best_step > state.began_at
        nodes.start_again(turn, reason, keep=state.keeps and trained, before=before)
        return
    turn.set(phase="ending", proposal=None, queued=None)
    turn.do(
        End(
            outcome="failed", reason=reason, worker=event.worker or None, rank=rank, code=event.code,
            lines=event.lines, hopeless=hopeless,
        )
    )  # fmt: skip


def _node_lost(turn: Turn, node: str, reason: str) -> None:
    """Go on without a node whose agent is gone, and all its workers with it."""
    state = turn.state
    told = f"node {node} ({state.nodes[node].host}) is lost: {reason}"
    turn.record("node_lost", told, node=node)
    if (wish := state.nodes[node].leave_wish) is not None:
        turn.do(Answer(wish=wish, ok=False, outcome="failed", reason=told))
    ranked, world = node in state.ranked_nodes(), state.world
    for worker in [worker for worker in state.workers.values() if worker.node == node]:
        holds_rank = worker.id in world.ranks if world is not None else worker.boot_rank is not None
        if not holds_rank or state.phase == "ending" or state.stopping is not None:
            _exited(turn, Exited(worker=worker.id, code=-signal.SIGKILL))
    nodes.forget(turn, node)
    if ranked and turn.state.phase != "ending" and turn.state.stopping is None:
        _rank_failed(turn, Exited(worker="", code=-signal.SIGKILL, under_way=True), None, told)


def _can_go(state: JobState, node: Node, others: list[Node]) -> bool:
    """Whether the job can go on without a node."""
    if node.leads and (not others or not state.movable or state.world is None):
        return False
    return len(others) >= state.min_nodes or (node.id not in state.ranked_nodes() and not node.leads)


def _node_leaving(turn: Turn, event: NodeLeaving) -> None:
    """Move a node's work away, then let it go."""
    state, node = turn.state, turn.state.nodes[event.node]
    if state.phase == "ending" or state.stopping is not None or state.done_ranks:
        if event.wish is not None:
            turn.do(Answer(wish=event.wish, ok=False, outcome="refused", reason="the job is ending"))
        return
    others = [other for other in state.in_order() if other.id != node.id]
    few = f"{state.min_nodes} node{'s' * (state.min_nodes != 1)}"
    if node.leaving:
        if event.wish is not None:
            reason = f"node {node.id} is leaving already: {node.leaving}"
            turn.do(Answer(wish=event.wish, ok=False, outcome="refused", reason=reason))
    elif not _can_go(state, node, others):
        why = f"the job needs {few}" if len(others) < state.min_nodes else "the job's controller cannot move"
        if event.wish is not None:
            reason = f"node {node.id} cannot be drained: {why}"
            turn.record("refused", reason, wish=event.wish)
            turn.do(Answer(wish=event.wish, ok=False, outcome="refused", reason=reason))
        else:
            alone = len(state.nodes) == 1
            reason = event.reason if alone else f"node {node.id} leaves ({event.reason}), and {why}"
            _stop(turn, reason, patience_s=event.timeout_s, save=event.save, requeue=not alone)
    else:
        turn.set_node(node.id, leaving=event.reason, leave_wish=event.wish)
        turn.record("node_leaving", f"node {node.id} leaves: {event.reason}", node=node.id, wish=event.wish)
        nodes.move_away(turn, node.id, event.timeout_s)


def _stop(
    turn: Turn, reason: str, *, patience_s: float | None = None, save: bool = False, requeue: bool = False
) -> None:
    if turn.state.phase == "ending" or turn.state.stopping is not None:
        return
    proposal = turn.state.proposal
    saving.give_up(turn, "the job is ending")
    if proposal is not None and turn.state.world is not None and proposal.phase is not Phase.SWITCHING:
        generation.abort(turn, "the job is ending")
    if patience_s is None:
        patience_s = turn.state.stop_patience_s
    stopping.begin(turn, reason, patience_s=patience_s, save=save, requeue=requeue)
