"""A checkpoint into the world just entered: all ranks take the same one, or the one before it, or none does.

For each checkpoint that rank 0 sees, best first:

1. Every rank reads its boxes and its random streams. All tell each other digests of what they have, or what is wrong.
2. Where all have what the index says, every rank takes over what is no tensor, and all tell each other whether they
   could. Nothing that may fail on one rank alone comes after that.

A reason is a sentence on rank 0's stderr; nothing of a checkpoint that one rank refused stays.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from liverun import groups, rng, small_state
from liverun.prepare import Standing
from liverun.reasons import in_short
from liverun.world import World
from resharding import boxes, listing, megatron
from resharding.assign import Unplannable
from resharding.checkpoint import folder as folders
from resharding.checkpoint import reader, writer
from resharding.checkpoint.format import INDEX_NAME, BadCheckpoint, Meta
from resharding.checkpoint.opened import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What this rank knows of a world, to save from it and to load into it."""

    standing: Standing
    nonce: str
    """names this world's temporary folders"""
    hosts: tuple[str, ...]
    one_disk: bool
    """all ranks write to a disk of the one machine they are on, so locks and pages of files are shared"""
    listings: tuple[listing.Listing, ...]
    """of all ranks, random streams left out"""
    holding: boxes.Holding
    """of this rank, random streams among it"""
    streams: Mapping[str, torch.Tensor]
    """where random streams are laid out to be saved"""
    design: writer.Design
    share: writer.Share


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What a rank has read of a checkpoint."""

    checkpoint: Checkpoint
    """closed"""
    sums: Mapping[str, tuple[int, int]]
    streams: dict[str, torch.Tensor] = field(default_factory=dict)
    """none where the layout is another one"""


def load_newest(ground: Ground, root: Path, device: torch.device) -> Meta | None:
    """Load the newest checkpoint in ``root`` that all ranks can; ``None`` where there is none at all.

    Collective over the world. Raises ``SystemExit`` where none can be loaded, or where ``root`` is something else.
    """
    world, group = ground.standing.world, ground.standing.globals.default_pg
    group = torch.distributed.group.WORLD if group is None else group
    names, reasons, misuse = groups.allgather_json(group, _seen(root), device)[0]  # what rank 0 sees
    if misuse:
        raise SystemExit(f"liverun: --checkpoint-dir {misuse}")
    if world.rank == 0:  # nothing is being saved: without rank 0, no rank can get as far as a step
        folders.clear_unfinished(root)
    for reason in reasons:
        _say_once(world, f"cannot resume: {reason}")
    for name in names:
        read, reason = _tried(ground, root / name, group, device)
        if read is not None:
            meta = read.checkpoint.index.meta
            if read.streams:
                rng.restore(read.streams)
            elif world.streams.seed is not None:
                rng.seed_everything(world.streams.seed)
            _say_once(world, f"resumed from {root / name}, step {meta.step}")
            return meta
        reasons.append(reason)
        _say_once(world, f"cannot resume from {root / name}: {reason}")
    if reasons:
        raise SystemExit(
            f"liverun: none of the checkpoints in {root} can be loaded ({reasons[0]}); "
            "name another --checkpoint-dir to begin from nothing"
        )
    return None


def _seen(root: Path) -> tuple[list[str], list[str], str | None]:
    """Return the names of the checkpoints to try, best first, what is wrong with newer ones, and with ``root``."""
    found = folders.candidates(root)
    newest = max((step for step, _ in folders.complete_in(root)), default=-1)
    lost = [path for path in folders.unfinished_in(root) if path.name > folders.folder_name(newest)]
    reasons = [f"{path} has no {INDEX_NAME}; use another checkpoint" for path in lost]
    return [path.name for path in found], reasons, None if found else folders.misuse_of(root)


def _tried(ground: Ground, path: Path, group: Any, device: torch.device) -> tuple[_Read | None, str]:
    """Load one checkpoint, all ranks alike; return what this rank has read, or why it could not be loaded."""
    read, trouble = _read(ground, path)
    mine = {"trouble": trouble, "sums": read.sums if read is not None else {}}
    said = groups.allgather_json(group, mine, device)
    reason = next((each["trouble"] for each in said if each["trouble"]), "")
    if reason or read is None:
        return None, reason
    try:
        reader.check_sums(read.checkpoint, [each["sums"] for each in said])
    except BadCheckpoint as error:  # the same on every rank
        return None, str(error)
    said = groups.allgather_json(group, _take_over(ground.standing, read.checkpoint), device)
    reason = next((each for each in said if each), "")
    return (None, reason) if reason else (read, "")


def _read(ground: Ground, path: Path) -> tuple[_Read | None, str]:
    """Read this rank's boxes and random streams; return digests of its part of the state, or what went wrong."""
    standing = ground.standing
    try:
        with Checkpoint.open(path) as checkpoint:
            if (misfit := _misfit(standing, checkpoint)) is not None:
                return None, misfit
            reader.check_places(checkpoint, ground.listings)
            megatron.materialize_optimizer_state(standing.training.optimizer, empty=True)
            reader.read_into(checkpoint, standing.holding)
            sums = reader.sums_here(checkpoint, standing.world.rank, ground.listings, ground.hosts, standing.holding)
            is_same_role = _same_role(standing.world, checkpoint.index.meta.origin)
            streams = _streams(ground, checkpoint) if is_same_role else {}
    except (BadCheckpoint, Unplannable, OSError) as error:
        return None, str(error)
    return _Read(checkpoint=checkpoint, sums=sums, streams=streams), ""


def _misfit(standing: Standing, checkpoint: Checkpoint) -> str | None:
    """Say in a sentence why what is no tensor does not fit this job, as far as that can be told, or ``None``."""
    meta, training = checkpoint.index.meta, standing.training
    said = meta.optimizer.get("groups") or {}
    if not said:
        return (
            f"{checkpoint.folder} has no parameter groups, and this job has an optimizer; convert it without "
            "--weights-only, and name the groups with --patterns"
        )
    wanted, have = megatron.group_settings(training.optimizer), megatron.with_expert_twins(said)
    missing = [name for name in wanted if name not in have]
    if missing:
        return (
            f"{checkpoint.folder} has no parameter group {missing[0]}, it has {', '.join(said)}; build the "
            "optimizer as it was, or name the groups with --patterns when converting"
        )
    differing = sorted(set(meta.extra) ^ set(training.extra))
    if differing:
        side = "is in the checkpoint and not in" if differing[0] in meta.extra else "is not in the checkpoint and in"
        return f"extra state {differing[0]!r} {side} Training(extra=...); give both the same names"
    return None


def _take_over(standing: Standing, checkpoint: Checkpoint) -> str:
    """Load what is no tensor; return what went wrong, if anything did."""
    meta = checkpoint.index.meta
    shared = {"optimizer": meta.optimizer, "scheduler": meta.scheduler, "extra": meta.extra}
    try:
        small_state.load(standing.training, shared)
    except Exception as error:  # noqa: BLE001 - a script's load_state_dict may raise anything
        return f"what is no tensor does not load, {in_short(error)}; build the job as it was saved"
    return ""


def _streams(ground: Ground, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the random streams of this rank's role. Raises ``BadCheckpoint``."""
    prefix = f"rng/{ground.standing.world.rank}/"
    found = {}
    for entry in checkpoint.index.entries:
        if entry.key.startswith(prefix):
            if (reason := checkpoint.damage(entry)) is not None:
                raise BadCheckpoint(reason)
            state = torch.empty(math.prod(entry.shape), dtype=torch.uint8)
            checkpoint.read(entry.key, (0,), state.numpy())
            found[entry.key.removeprefix(prefix)] = state
    sizes = {name: len(state) for name, state in found.items()}
    return found if sizes == {name: len(state) for name, state in ground.streams.items()} else {}


def _same_role(world: World, origin: Mapping[str, Any]) -> bool:
    return origin.get("layout") == world.layout.as_dict() and origin.get("world_size") == world.world_size


def _say_once(world: World, sentence: str) -> None:
    if world.rank == 0:
        print(f"liverun: {sentence}", file=sys.stderr, flush=True)
