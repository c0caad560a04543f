"""SWITCHING, inside one worker: at the boundary, move the state and vote.

Numbered as it happens, the same on every member of the bridge:

1. Small state that is equal on all ranks (step, consumed samples, scheduler, optimizer counters, the script's own)
   is exchanged as JSON.
2. Boxes stream from the old stack into the hollow new one, through bounded staging. The old stack is only read.
3. The small state is loaded, and everyone votes. Unanimous yes is the commit; anything else leaves the old world
   exactly as it was. A member whose transfer failed does not vote: its peers may be waiting for it in theirs, so it
   gives up the bridge, which they notice at once, and without it there can be no yes.

Where the old state is not kept, gradient buffers go first; the small state is loaded, and everyone votes on it, when
the first layer has moved and was checked. From that unanimous yes on each layer of the old stack is given back once
its last reader has it. That is the point of no return: a member that has given a layer back and then cannot commit
has no world to train in, and says so. The vote at the end is taken as ever.

Where the optimizer's state is deferred it moves after all this; see ``late``.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from liverun import groups, rng, small_state
from liverun.memory import ResidentPeak
from liverun.prepare import Next, Standing
from liverun.reasons import in_short
from liverun.world import Training
from resharding import boxes, megatron, stream
from resharding.pages import PageReturner
from resharding.transport import ProcessGroupTransport


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the job is: equal on all ranks at a boundary."""

    step: int
    consumed_samples: int
    saved_step: int = -1
    """the steps done when a checkpoint was last taken or loaded; -1 for none, or where none are taken"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a switch came to. ``reason`` is empty where it was committed."""

    reason: str
    position: Position | None
    lost: bool = False
    """this rank has given back what it would need to train on in the old world"""
    transfer_s: float = 0.0
    stream_s: float = 0.0
    """the part of ``transfer_s`` in which boxes moved"""
    verify_s: float = 0.0
    """the part of ``stream_s`` that went into comparing"""
    commit_s: float = 0.0
    bytes_moved: int = 0
    bytes_local: int = 0
    peak_extra_bytes: int = 0

    @property
    def committed(self) -> bool:
        """Whether the new world is the job."""
        return not self.reason


class _No(RuntimeError):  # noqa: N818 - reads as what it is
    """The vote was not unanimous; the message says why."""


class _Giving:
    """Gives the old stack back, piece by piece."""

    def __init__(self) -> None:
        self._returner: PageReturner | None = None
        self.begun = False
        """something of the old state is gone"""

    def begin(self, source: boxes.Holding, training: Training) -> None:
        """Look where the pieces lie, and give gradient buffers back: no step will read what they hold."""
        self._returner = PageReturner(source)
        for buffer in megatron.gradient_buffers(training.model):
            self._returner.tensor(buffer)

    def piece(self, index: int) -> None:
        """Give a piece of the source back."""
        assert self._returner is not None
        self.begun = True
        self._returner.piece(index)


def switch(
    prepared: Next, present: Standing | None, position: Position | None, *, device: torch.device
) -> Outcome:
    """Move the state of ``present`` (none for a joiner) into what was prepared. Collective over the bridge."""
    started = time.perf_counter()
    giving = _Giving()
    with ResidentPeak() as peak:
        try:
            shared, report = _transfer(prepared, present, position, device, giving)
        except _No as no:
            return Outcome(reason=str(no), position=position, lost=giving.begun)
        except Exception as error:  # noqa: BLE001 - whatever failed, the old world trains on if it is there
            prepared.give_up_bridge()
            return Outcome(reason=in_short(error), position=position, lost=giving.begun)
        transferred = time.perf_counter()
        try:
            _agree(prepared, shared if prepared.choice.keeps else None, device)
        except _No as no:
            return Outcome(reason=str(no), position=position, lost=giving.begun)
    return Outcome(
        reason="",
        position=Position(**shared["position"]),
        transfer_s=transferred - started,
        stream_s=report.seconds,
        verify_s=report.verify_s,
        commit_s=time.perf_counter() - transferred,
        bytes_moved=report.bytes_moved,
        bytes_local=report.bytes_local,
        peak_extra_bytes=peak.extra_bytes + prepared.touched_bytes,
    )


def _transfer(
    prepared: Next, present: Standing | None, position: Position | None, device: torch.device, giving: _Giving
) -> tuple[dict[str, Any], stream.StreamReport]:
    """Exchange the small state and stream the boxes. The source is only read, unless it is given back."""
    shared = _exchange(prepared, present, position, device)
    for name, state in rng.capture().items() if prepared.outgoing else ():
        prepared.outgoing[name].copy_(state)
    transport = ProcessGroupTransport(prepared.bridge.default_pg, device)
    choice = prepared.choice
    if choice.keeps:
        return shared, stream.execute(
            prepared.plan, prepared.source, prepared.target, transport, choice.staging_bytes, verify=choice.verify
        )
    if present is not None:
        giving.begin(prepared.source, present.training)
    return shared, stream.execute(
        prepared.plan, prepared.source, prepared.target, transport, choice.staging_bytes, verify=choice.verify,
        keep=False, before_release=lambda: _agree(prepared, shared, device), release=giving.piece,
    )


def _agree(prepared: Next, shared: dict[str, Any] | None, device: torch.device) -> None:
    """Load the small state, if given, and vote. Raises ``_No`` unless every member says yes."""
    reason = ""
    try:
        if prepared.standing is not None and shared is not None:
            small_state.load(prepared.standing.training, shared)
    except Exception as error:  # noqa: BLE001 - a script's load_state_dict may raise anything
        reason = in_short(error)
    try:
        unanimous = groups.vote(prepared.bridge.default_pg, not reason, device)
    except RuntimeError as error:
        raise _No(reason or f"a member was lost before the vote: {in_short(error)}") from error
    if not unanimous:
        raise _No(reason or "another member voted no")


def _exchange(
    prepared: Next, present: Standing | None, position: Position | None, device: torch.device
) -> dict[str, Any]:
    """Give every member the small state of the old world; differences between ranks are an error."""
    mine: dict[str, Any] | None = None
    if present is not None:
        assert position is not None
        training = present.training
        megatron.settle(training.model)
        megatron.materialize_optimizer_state(training.optimizer)
        mine = {
            "position": asdict(position),
            **small_state.taken(training),
        }
    said = [value for value in groups.allgather_json(prepared.bridge.default_pg, mine, device) if value is not None]
    for part in ("position", "scheduler", "extra"):
        if any(value[part] != said[0][part] for value in said):
            differing = [value[part] for value in said]
            raise RuntimeError(f"{part} differs between ranks, so it cannot move: {str(differing)[:500]}")
    return {**said[0], "optimizer": megatron.merge_common_state([value["optimizer"] for value in said])}
