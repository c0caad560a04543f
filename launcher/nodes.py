"""Nodes come, go, and make the job start: who is in, and what follows from it. Pure.

A script that calls ``liverun.join()`` gets a live change of world; any other is started again with the nodes there
are, as under torchrun. A node that finds no place waits as a spare.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from launcher.model import Answer, Boot, Dismiss, End, HandOver, JobState, Node, Restart, Wish
from launcher.turn import Turn

JOIN_PATIENCE_S = 10.0
"""a script that has not joined this long after its start is taken for one that never does"""
JOIN_TIMEOUT_S = 60.0
"""how long a change of world that lets a node in may prepare"""
MAX_MOVES = 3
"""tries to move the work of a node away that was told to end"""
RETRY_S = 5.0
"""until a node is asked again whose joining was aborted"""


def has_joined(state: JobState) -> bool:
    """Whether any worker has called ``liverun.join()``."""
    return any(worker.joined for worker in state.workers.values())


def may_still_join(turn: Turn) -> bool:
    """Whether it is too early to say that the script never calls ``liverun.join()``."""
    began = turn.state.began
    return began is None or turn.now < began + JOIN_PATIENCE_S


def entered(turn: Turn, node: Node) -> None:
    """Let a node in, or say why not."""
    state = turn.state
    twin = next((other for other in state.nodes.values() if node.pin is not None and other.pin == node.pin), None)
    if state.phase == "ending" or state.stopping is not None:
        turn.do(Dismiss(node=node.id, reason="the job is ending", ok=False))
        return
    if twin is not None:
        reason = f"--node-rank {node.pin} is taken by node {twin.id} ({twin.host}); give this node another"
        turn.do(Dismiss(node=node.id, reason=reason, ok=False))
        return
    turn.set(
        nodes={**state.nodes, node.id: node}, last_arrival=turn.now,
        gathering_since=turn.now if state.gathering_since is None else state.gathering_since,
    )
    if state.max_nodes > 1:
        offer = f"{node.nproc} worker{'s' * (node.nproc != 1)}"
        turn.record("node_joined", f"node {node.id} ({node.host}) is there: {offer}", node=node.id)
    _ask_again(turn)
    turn.fill_pool()


def forget(turn: Turn, node: str) -> None:
    """Take a node and its workers out of the books."""
    state = turn.state
    turn.set(
        nodes={name: other for name, other in state.nodes.items() if name != node},
        workers={name: worker for name, worker in state.workers.items() if worker.node != node},
        clearing=state.clearing - {node},
    )


def dismiss(turn: Turn, node: str) -> None:
    """Let a node go that has nothing of the job any more."""
    known = turn.state.nodes[node]
    if known.leads:
        _hand_over(turn, known)
        return
    reason = f"node {node} ({known.host}) has left: {known.leaving}"
    turn.do(Dismiss(node=node, reason=known.leaving))
    forget(turn, node)
    turn.record("node_left", reason, node=node, wish=known.leave_wish)
    if known.leave_wish is not None:
        turn.do(Answer(wish=known.leave_wish, ok=True, outcome="left", reason=reason))


def heirs(state: JobState) -> list[Node]:
    """Return the nodes that may take over the controller, the best one first."""
    return [node for node in state.in_order() if not node.leads and node.id not in state.no_heirs]


def _hand_over(turn: Turn, node: Node) -> None:
    """Let the controller's own node go: another one takes over first."""
    found = heirs(turn.state)
    if not found:
        turn.set_node(node.id, stuck=True)
        return
    turn.set(handing_over=True)
    turn.record(
        "handover", f"controller and store move from node {node.id} to node {found[0].id}", node=found[0].id,
        wish=node.leave_wish,
    )  # fmt: skip
    turn.do(HandOver(node=found[0].id, leaver=node.id, reason=node.leaving, wish=node.leave_wish))


def handover_failed(turn: Turn, node: str, reason: str) -> None:
    """Try the next node."""
    turn.set(handing_over=False, no_heirs=turn.state.no_heirs | {node})
    turn.record("aborted", f"node {node} did not take over the controller: {reason}", node=node)


def move_away(turn: Turn, node: str, timeout_s: float) -> None:
    """Begin to free a node that leaves."""
    state, known = turn.state, turn.state.nodes[node]
    if node not in state.ranked_nodes():
        target = state.proposal.target if state.proposal is not None else None
        names = {member.worker for member in target.members} if target is not None else set()
        if any(worker.node == node for worker in state.workers.values() if worker.id in names):
            return  # settled once the proposal is
        dismiss(turn, node)
    elif state.world is not None or has_joined(state) or may_still_join(turn):
        if state.queued is not None and state.queued.without is None:
            reason = f"superseded by the drain of node {node}"
            turn.do(Answer(wish=state.queued.id, ok=False, outcome="refused", reason=reason))
        wish = Wish(id=known.leave_wish or 0, without=node, timeout_s=timeout_s, cause=f"drain {node}")
        turn.set(queued=wish)
    else:
        start_again(turn, f"node {node} leaves: {known.leaving}")


def shares(state: JobState) -> dict[str, int]:
    """Return how many ranks each node has, or had in an attempt that came to no world of its own."""
    if state.world is None:
        return {node: state.nodes[node].boot for node in state.booted if node in state.nodes}
    where = {**{worker.id: worker.node for worker in state.workers.values()}, **state.done_ranks}
    return dict(Counter(where[worker] for worker in state.world.ranks if worker in where))


def start_again(turn: Turn, reason: str, *, keep: bool = False, before: Mapping[str, int] | None = None) -> None:
    """End every worker and go back to gathering nodes; what was learned about the script stays.

    ``keep``: processes that are well stay. ``before``: what each node gave to the world that is to come back.
    """
    state = turn.state
    turn.state = JobState(
        nodes={name: _anew(node) for name, node in state.nodes.items()},
        min_nodes=state.min_nodes, max_nodes=state.max_nodes, join_timeout_s=state.join_timeout_s,
        last_call_s=state.last_call_s, gathering_since=turn.now, last_arrival=state.last_arrival,
        clearing=frozenset(state.nodes), membership_restarts=state.membership_restarts, layout=state.layout,
        reason=reason, max_restarts=state.max_restarts, restarts=state.restarts, last_resize=state.last_resize,
        stop_patience_s=state.stop_patience_s, has_run=state.has_run, fruitless=state.fruitless,
        best_step=state.best_step, last_checkpoint=state.last_checkpoint, saves=state.saves, movable=state.movable,
        keeps=state.keeps, last_restart=state.last_restart, shares_before=before or {},
        layout_before=state.world.layout if state.world is not None else state.layout_before,
        size_before=len(state.world.ranks) if state.world is not None else state.size_before,
    )  # fmt: skip
    turn.do(Restart(reason=reason, nodes=tuple(sorted(state.nodes)), keep=keep))


def cleared(turn: Turn, node: str, kept: tuple[int, ...]) -> None:
    """Note that a node is ready for the next attempt, with these processes kept."""
    state = turn.state
    if node in state.clearing:
        turn.set(clearing=state.clearing - {node}, kept={**state.kept, node: kept})


def _tell_restart(turn: Turn) -> None:
    """Say what the attempt that starts now begins with."""
    state = turn.state
    kept = {node: list(pids) for node, pids in state.kept.items() if pids and node in state.nodes}
    pids = [str(pid) for node in sorted(kept) for pid in kept[node]]
    stay = f"process {pids[0]} stays" if len(pids) == 1 else f"processes {', '.join(pids)} stay"
    reason = f"restart {state.restarts} of {state.max_restarts}: {stay if pids else 'no process stays'}"
    turn.set(last_restart={"restart": state.restarts, "kept": kept, "reason": reason})
    turn.record("restarting", reason, restart=state.restarts, kept=kept)


def _anew(node: Node) -> Node:
    """Return a node as it is before any worker of an attempt is started."""
    return replace(node, boot=0, boot_to_come=0, forks_to_come=0, barren=0, retry_at=0.0, parked=False)


def settle(turn: Turn) -> None:
    """Do what has become due."""
    state = turn.state
    if not state.nodes or state.clearing:
        return
    if not state.booted:
        for node in [node for node in state.nodes.values() if node.leaving]:
            dismiss(turn, node.id)
        _gather(turn)
        return
    if state.world is not None:
        for node in state.nodes.values():
            if 0 < node.retry_at <= turn.now:
                turn.set_node(node.id, retry_at=0.0)
        _let_go(turn)
        _let_in(turn)
    elif not has_joined(state) and not may_still_join(turn):
        _membership(turn)


def _gather(turn: Turn) -> None:
    """Start the first world once there are enough nodes."""
    state = turn.state
    there = state.in_order()[: state.max_nodes]
    since = turn.now if state.gathering_since is None else state.gathering_since
    if len(there) < state.min_nodes:
        waits = f"{len(there)} of {state.min_nodes} nodes are there"
        if turn.now >= since + state.join_timeout_s:
            reason = f"{waits} after {state.join_timeout_s:g} s; start the others, or ask for fewer with --nnodes"
            turn.set(phase="ending")
            turn.record("refused", reason)
            turn.do(End(outcome="failed", reason=reason))
        else:
            turn.set(reason=f"waits for nodes: {waits}")
        return
    again = (state.has_run or state.restarts or state.membership_restarts) and not state.resumed
    if len(there) < state.max_nodes and not again and turn.now < state.last_arrival + state.last_call_s:
        turn.set(reason=f"waits {state.last_call_s:g} s for more nodes: {len(there)} of {state.max_nodes} are there")
        return
    told = state.last_restart["restart"] if state.last_restart is not None else 0
    if state.restarts != told and not state.resumed:
        _tell_restart(turn)
    for node in there:
        boot = min(state.shares_before.get(node.id, node.nproc), node.nproc + node.standbys)
        turn.set_node(node.id, boot=boot, boot_to_come=boot)
    turn.set(booted=tuple(node.id for node in there), began=None)
    there = [turn.state.nodes[node.id] for node in there]
    turn.do(Boot(nodes=tuple(there), restarts=state.restarts + state.membership_restarts))


def _let_go(turn: Turn) -> None:
    """Dismiss what leaves and has no rank any more, once the world it was in is gone."""
    state = turn.state
    if state.retiring is not None or state.proposal is not None or state.saving is not None:
        return
    for node in [node for node in state.nodes.values() if node.leaving]:
        if node.id not in state.ranked_nodes():
            dismiss(turn, node.id)


def _let_in(turn: Turn) -> None:
    """Ask for a world with the nodes that wait, once their workers have joined."""
    state = turn.state
    if state.proposal is not None or state.queued is not None or state.retiring is not None or state.done_ranks:
        return
    ranked = state.ranked_nodes()
    waiting = [node for node in state.in_order() if node.id not in ranked]
    room = state.max_nodes - (len(state.in_order()) - len(waiting))
    ready = [node for node in waiting if not node.parked and _standbys(state, node.id) >= node.nproc]
    ready = ready[: max(0, room)]
    if any(turn.now >= node.retry_at for node in ready):
        names = ", ".join(node.id for node in ready)
        joins = tuple(node.id for node in ready)
        turn.set(queued=Wish(id=0, joins=joins, timeout_s=JOIN_TIMEOUT_S, cause=f"join of {names}"))


def _standbys(state: JobState, node: str) -> int:
    return sum(worker.node == node and worker.state == "standby" for worker in state.workers.values())


def turned_down(turn: Turn, wish: Wish, *, for_good: bool) -> None:
    """Note that nodes could not be let in, or one not be freed: a change of world was refused or aborted."""
    for name in wish.joins:
        if name in turn.state.nodes:
            turn.set_node(name, retry_at=math.inf if for_good else turn.now + RETRY_S)
    if wish.joins:
        return
    if wish.without is not None and wish.without in turn.state.nodes:
        node = turn.state.nodes[wish.without]
        if node.leave_wish is not None:
            turn.set_node(node.id, leaving="", leave_wish=None)  # whoever asked has his answer
        elif for_good or node.moves >= MAX_MOVES:
            turn.set_node(node.id, stuck=True)
        else:
            turn.set_node(node.id, moves=node.moves + 1)
            turn.set(queued=wish)


def ask_less(wish: Wish, size: int) -> Wish | None:
    """Return the next smaller wish for a world that the model does not fit into, if nobody asked for that size."""
    if wish.without is not None and size > 1:
        return replace(wish, workers=size - 1)
    if len(wish.joins) > 1:
        return replace(wish, joins=wish.joins[:-1])
    return None


def settled(turn: Turn, wish: Wish | None) -> None:
    """Note that the world has become another one: who did not fit may fit now, and who was left out stays out."""
    ranked = turn.state.ranked_nodes()
    by_hand = wish is not None and wish.id != 0 and wish.without is None
    for node in turn.state.nodes.values():
        out = node.id not in ranked
        turn.set_node(node.id, retry_at=0.0, parked=out and (node.parked or by_hand))


def _ask_again(turn: Turn) -> None:
    for node in turn.state.nodes.values():
        if node.retry_at:
            turn.set_node(node.id, retry_at=0.0)


def _membership_changes(state: JobState) -> bool:
    """Whether a script that never joins should be started again: the nodes it could have are others than it has."""
    wanted = {node.id for node in state.in_order()[: state.max_nodes]}
    if len(wanted) < state.min_nodes or state.done_ranks or state.world is not None or has_joined(state):
        return False
    return not set(state.booted) <= wanted or (len(state.booted) < state.max_nodes and wanted != set(state.booted))


def _membership(turn: Turn) -> None:
    state = turn.state
    if not _membership_changes(state):
        return
    wanted = {node.id for node in state.in_order()[: state.max_nodes]}
    came, went = sorted(wanted - set(state.booted)), sorted(set(state.booted) - wanted)
    turn.set(membership_restarts=state.membership_restarts + 1)
    what = " and ".join(
        f"node{'s' * (len(names) != 1)} {', '.join(names)} {verb}"
        for names, verb in ((came, "came"), (went, "left"))
        if names
    )
    start_again(turn, f"{what}: the workers start again on {len(wanted)} node{'s' * (len(wanted) != 1)}")


def deadlines(state: JobState) -> list[float]:
    """When time alone changes something here."""
    if not state.nodes or state.clearing:
        return []
    if not state.booted:
        since = state.gathering_since or 0.0
        enough = len(state.in_order()) >= state.min_nodes
        return [state.last_arrival + state.last_call_s if enough else since + state.join_timeout_s]
    times = [node.retry_at for node in state.nodes.values() if 0 < node.retry_at < math.inf]
    if state.began is not None and _membership_changes(state):
        times.append(state.began + JOIN_PATIENCE_S)
    return times
