"""From a wish to a target world: members, ranks, layout. Pure."""

from __future__ import annotations

from collections import Counter

from launcher.model import JobState, Node, Target, Wish, World, short_world
from launcher.turn import MAX_BARREN
from liverun.layout import Layout
from liverun.messages import Member


class RefusedError(Exception):
    """The wish cannot be met; one sentence."""


class NotYetError(Exception):
    """The wish can be met once more standbys have joined; says which are awaited."""


def resolve(state: JobState, wish: Wish) -> Target | None:
    """Turn a wish into a target; ``None`` when the world is what is wished already.

    Raises ``RefusedError``, or ``NotYetError`` while workers that would be needed are still starting.
    Ranks are given node by node, and on a node in the order in which they were: so with an unchanged layout and
    set of nodes survivors keep their ranks, and leavers are the highest.
    """
    world = state.world
    assert world is not None
    if wish.replace is not None:
        chosen = _replaced(state, world, wish.replace)
        rank = next(rank for rank, worker in enumerate(world.ranks) if worker not in chosen)
        extra = f"; {chosen[rank]} takes the place of {world.ranks[rank]} (rank {rank})"
        ranks = chosen
    else:
        if wish.without is not None:
            chosen = _without(state, world, wish)
        elif wish.nodes is not None or wish.joins:
            chosen = _on_nodes(state, world, wish)
        else:
            chosen = _so_many(state, world, len(world.ranks) if wish.workers is None else wish.workers)
        ranks, extra = in_place(state, chosen), ""
    layout, note = choose_layout(world, wish, len(ranks))
    if ranks == world.ranks and layout == world.layout:
        return None
    return Target(ranks=ranks, layout=layout, members=members_of(state, ranks), note=note + extra)


def in_place(state: JobState, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Sort workers by the place of their node, then by their present rank; those without one as they were chosen."""
    old = {worker: rank for rank, worker in enumerate(state.world.ranks)} if state.world else {}
    order = {worker: (old.get(worker, len(old)), number) for number, worker in enumerate(chosen)}
    return tuple(sorted(chosen, key=lambda worker: (state.nodes[state.workers[worker].node].place, order[worker])))


def _free(state: JobState, nodes: list[Node]) -> tuple[list[str], list[str]]:
    """Return the standbys of some nodes, ready and on their way, node by node."""
    ranked = state.world.ranks if state.world else ()
    ready, pending = [], []
    for node in nodes:
        theirs = [worker for worker in state.workers.values() if worker.node == node.id and worker.id not in ranked]
        ready += [worker.id for worker in theirs if worker.state == "standby"]
        pending += [worker.id for worker in theirs if worker.state in ("starting", "leaving")]
    return ready, pending


def _usable(state: JobState) -> list[Node]:
    """Return the nodes that may have ranks: those that do, and others as long as there is room, in order."""
    ranked = state.ranked_nodes()
    there = [node for node in state.in_order() if node.id in ranked]
    room = max(0, state.max_nodes - len(there))
    return there + [node for node in state.in_order() if node.id not in ranked][:room]


def _so_many(state: JobState, world: World, size: int) -> tuple[str, ...]:
    if size < 1:
        raise RefusedError(world.layout.misfit(size) or "")
    if size <= len(world.ranks):
        return world.ranks[:size]
    usable = _usable(state)
    ready, pending = _free(state, usable)
    live = len(world.ranks) + len(ready) + len(pending)
    slots = sum(node.nproc + (node.standbys if node.barren < MAX_BARREN else 0) for node in usable)
    num_slots = max(live, slots if any(node.barren < MAX_BARREN for node in usable) else 0)
    if size > num_slots:
        raise RefusedError(
            f"{size} workers were asked for, but this job has {num_slots}"
            f" ({len(world.ranks)} ranked, {num_slots - len(world.ranks)} standbys)"
        )
    missing = size - len(world.ranks)
    if missing > len(ready):
        awaited = ", ".join(pending) or "a replacement"
        raise NotYetError(f"waits for {missing - len(ready)} more standby to join: {awaited}")
    return world.ranks + tuple(ready[:missing])


def _on_nodes(state: JobState, world: World, wish: Wish) -> tuple[str, ...]:
    """Choose all workers of so many nodes; of ``workers`` in all, if that was asked too."""
    usable = _usable(state)
    if wish.joins:
        ranked = state.ranked_nodes()
        usable = [node for node in usable if node.id in ranked or node.id in wish.joins]
    count = len(usable) if wish.nodes is None else wish.nodes
    if not 1 <= count <= len(usable):
        raise RefusedError(
            f"{count} node{'s' * (count != 1)} were asked for, but this job can have 1 to {len(usable)}"
            f" (--nnodes allows {state.max_nodes}, {len(state.in_order())} are there)"
        )
    if wish.workers is not None and wish.workers % count:
        raise RefusedError(f"{wish.workers} workers do not spread evenly over {count} nodes")
    chosen: list[str] = []
    for node in usable[:count]:
        want = node.nproc if wish.workers is None else wish.workers // count
        have = [worker for worker in world.ranks if state.workers[worker].node == node.id]
        ready, pending = _free(state, [node])
        if want > len(have) + len(ready):
            if want > len(have) + len(ready) + len(pending) and want > node.nproc + node.standbys:
                raise RefusedError(
                    f"{want} workers a node were asked for, but node {node.id} has {node.nproc + node.standbys}"
                )
            awaited = ", ".join(pending) or "a replacement"
            raise NotYetError(f"waits for a standby of node {node.id} to join: {awaited}")
        chosen += (have + ready)[:want]
    return tuple(chosen)


def _without(state: JobState, world: World, wish: Wish) -> tuple[str, ...]:
    """Choose a world that leaves a node out: as large as before where standbys elsewhere allow it."""
    stay = [worker for worker in world.ranks if state.workers[worker].node != wish.without]
    ready, _ = _free(state, [node for node in _usable(state) if node.id != wish.without])
    size = len(world.ranks) if wish.workers is None else wish.workers
    chosen = (stay + ready)[:size]
    if not chosen:
        raise RefusedError(f"no worker would be left without node {wish.without}")
    return tuple(chosen)


def choose_layout(world: World, wish: Wish, size: int) -> tuple[Layout, str]:
    """Layout for the wished size, and the sentence that says why it is this one. Raises ``RefusedError``."""
    layout = world.layout if wish.layout is None else wish.layout
    reason = layout.misfit(size)
    if reason is None:
        return (
            layout,
            f"{wish.cause}: {short_world(world.layout, len(world.ranks))} -> {short_world(layout, size)}",
        )
    if wish.layout is not None or size < 1:
        raise RefusedError(reason)
    layout = world.layout.shrunk_to(size)
    return layout, (
        f"{wish.cause}: {short_world(world.layout, len(world.ranks))} -> {short_world(layout, size)}"
        f" ({reason}, so it becomes {layout})"
    )


def _replaced(state: JobState, world: World, which: str) -> tuple[str, ...]:
    if which.isdecimal() and int(which) < len(world.ranks):
        leaver = world.ranks[int(which)]
    elif which in world.ranks:
        leaver = which
    else:
        raise RefusedError(
            f"no ranked worker {which}; there are ranks 0 to {len(world.ranks) - 1}: {', '.join(world.ranks)}"
        )
    home = state.workers[leaver].node
    nodes = sorted(_usable(state), key=lambda node: node.id != home)
    ready, pending = _free(state, nodes)
    if not ready:
        if pending:
            raise NotYetError(f"waits for a standby to join: {', '.join(pending)}")
        raise RefusedError(
            f"no standby could take the place of {leaver}; start the job with --standbys 1 or more"
        )
    return tuple(ready[0] if worker == leaver else worker for worker in world.ranks)


def members_of(state: JobState, ranks: tuple[str, ...]) -> tuple[Member, ...]:
    """Everyone who takes part: the new ranks in order, then the workers that leave."""
    old = {} if state.world is None else {worker: rank for rank, worker in enumerate(state.world.ranks)}
    where = {worker: state.workers[worker].node for worker in (*ranks, *old) if worker in state.workers}
    nodes = list(dict.fromkeys(where[worker] for worker in ranks))
    sizes = Counter(where[worker] for worker in ranks)
    seen: Counter[str] = Counter()
    members = []
    for rank, worker in enumerate(ranks):
        node = where[worker]
        members.append(
            Member(
                worker=worker, host=state.nodes[node].host, old_rank=old.get(worker), rank=rank,
                local_rank=seen[node], local_world_size=sizes[node], node_rank=nodes.index(node),
            )
        )  # fmt: skip
        seen[node] += 1
    for worker, rank in old.items():
        if worker not in ranks and worker in where:
            host = state.nodes[where[worker]].host
            members.append(
                Member(worker=worker, host=host, old_rank=rank, rank=None, local_world_size=sizes[where[worker]])
            )
    return tuple(members)
