"""The first world of a job: built in the training thread, before there is anything that could go on meanwhile."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from liverun import fence, groups, messages, rng
from liverun.layout import Layout
from liverun.limits import Limits
from liverun.prepare import Build, Standing, world_of
from liverun.world import World
from resharding import megatron


def build(
    spec: messages.Prepare, me: messages.Member, *, build_training: Build, device: torch.device, timeout: timedelta,
    store: object,
) -> Standing:
    """Build a job's first world in the calling thread. ``store`` none: torch's ``env://``."""
    assert me.rank is not None
    there = fence.new_globals(spec.generation)
    groups.open_world(
        there, layout=spec.layout, device=device, timeout=timeout, store=store, rank=me.rank, size=spec.world_size
    )
    fence.activate(there)
    world = world_of(spec, me, device, rng.Seeding(at_once=True))
    set_environment(world)
    known = fence.registered_groups()
    training = build_training(world)
    there.groups.extend(group for group in fence.registered_groups() if group not in known)
    holding = megatron.holding_of(training.model, training.optimizer)
    return Standing(world=world, globals=there, training=training, holding=holding)


def of_environment(
    build_training: Build, layout: Layout, limits: Limits, device: torch.device, timeout: timedelta
) -> Standing:
    """Build the one world of a script that runs under torchrun, or by itself."""
    for name, alone in {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(name, alone)
    size = int(os.environ["WORLD_SIZE"])
    refusal = limits.refusal(layout, size, None)
    if refusal is not None:
        raise ValueError(refusal)
    me = messages.Member(
        worker="0", host="", old_rank=None, rank=int(os.environ["RANK"]), local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]), node_rank=int(os.environ.get("GROUP_RANK", "0")),
    )
    spec = messages.Prepare(
        generation=1, layout=layout, world_size=size, members=(me,), store_host="", store_port=0,
        timeout_s=timeout.total_seconds(),
    )
    return build(spec, me, build_training=build_training, device=device, timeout=timeout, store=None)


def set_environment(world: World) -> None:
    """Keep the variables that libraries read in step with the world."""
    os.environ.update(
        RANK=str(world.rank), WORLD_SIZE=str(world.world_size), LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.local_world_size), GROUP_RANK=str(world.node_rank),
    )
