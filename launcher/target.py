"""From a wish to a target world: members, ranks, layout. Pure."""

from __future__ import annotations

from launcher.model import JobState, Target, Wish, World, short_world
from liverun.layout import Layout
from liverun.messages import Member


class RefusedError(Exception):
    """The wish cannot be met; one sentence."""


class NotYetError(Exception):
    """The wish can be met once more standbys have joined; says which are awaited."""


def resolve(state: JobState, wish: Wish) -> Target | None:
    """Turn a wish into a target; ``None`` when the world is what is wished already.

    Raises ``RefusedError``, or ``NotYetError`` while workers that would be needed are still starting.
    Survivors keep their order, so that with an unchanged layout they keep their ranks; leavers are the
    highest.
    """
    world = state.world
    assert world is not None
    size = len(world.ranks) if wish.workers is None else wish.workers
    layout, note = choose_layout(world, wish, size)
    others = [worker for worker in state.workers.values() if worker.id not in world.ranks]
    ready = [worker.id for worker in others if worker.state == "standby"]
    pending = [worker.id for worker in others if worker.state in ("starting", "leaving")]
    if wish.replace is not None:
        ranks = _replaced(world, wish.replace, ready, pending)
        rank = next(rank for rank, worker in enumerate(world.ranks) if worker not in ranks)
        note += f"; {ranks[rank]} takes the place of {world.ranks[rank]} (rank {rank})"
    elif size <= len(world.ranks):
        ranks = world.ranks[:size]
    else:
        num_live = len(world.ranks) + len(others)
        num_slots = max(num_live, state.nproc + state.standbys if state.barren < 3 else 0)
        if size > num_slots:
            raise RefusedError(
                f"{size} workers were asked for, but this job has {num_slots}"
                f" ({len(world.ranks)} ranked, {num_slots - len(world.ranks)} standbys)"
            )
        missing = size - len(world.ranks)
        if missing > len(ready):
            awaited = ", ".join(pending) or "a replacement"
            raise NotYetError(f"waits for {missing - len(ready)} more standby to join: {awaited}")
        ranks = world.ranks + tuple(ready[:missing])
    if ranks == world.ranks and layout == world.layout:
        return None
    return Target(ranks=ranks, layout=layout, members=members_of(world, ranks, state.host), note=note)


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


def _replaced(world: World, which: str, ready: list[str], pending: list[str]) -> tuple[str, ...]:
    if which.isdecimal() and int(which) < len(world.ranks):
        leaver = world.ranks[int(which)]
    elif which in world.ranks:
        leaver = which
    else:
        raise RefusedError(
            f"no ranked worker {which}; there are ranks 0 to {len(world.ranks) - 1}: {', '.join(world.ranks)}"
        )
    if not ready:
        if pending:
            raise NotYetError(f"waits for a standby to join: {', '.join(pending)}")
        raise RefusedError(
            f"no standby could take the place of {leaver}; start the job with --standbys 1 or more"
        )
    return tuple(ready[0] if worker == leaver else worker for worker in world.ranks)


def members_of(world: World | None, ranks: tuple[str, ...], host: str) -> tuple[Member, ...]:
    """Everyone who takes part: the new ranks in order, then the workers that leave."""
    old = {} if world is None else {worker: rank for rank, worker in enumerate(world.ranks)}
    size = len(ranks)
    stays = [
        Member(worker=w, host=host, old_rank=old.get(w), rank=rank, local_rank=rank, local_world_size=size)
        for rank, w in enumerate(ranks)
    ]
    leaves = [
        Member(worker=w, host=host, old_rank=rank, rank=None, local_rank=rank, local_world_size=size)
        for w, rank in old.items()
        if w not in ranks
    ]
    return tuple(stays + leaves)
