"""What a script sees of the world it is in, and what it hands back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from liverun import rng
from liverun.layout import Layout


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict()`` and ``load_state_dict()``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take over a state that ``state_dict`` returned."""
        ...


@dataclass(frozen=True, kw_only=True)
class World:
    """A set of workers with ranks, a layout and process groups. One object per generation."""

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    layout: Layout
    device: torch.device
    streams: rng.Seeding = field(default_factory=rng.Seeding, repr=False, compare=False)

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.layout.dp(self.world_size)

    @property
    def dp_rank(self) -> int:
        """Rank in the data parallel group."""
        from megatron.core import parallel_state

        rank: int = parallel_state.get_data_parallel_rank()
        return rank

    def seed(self, seed: int) -> None:
        """Seed every random stream (Python, NumPy, torch, Megatron's trackers) as a Megatron script would.

        In the first world this happens at once. A later world is built beside the running one, whose streams must
        not be disturbed: there the seed is kept, and used at the commit if the layout changed. Where the layout is
        the same, the streams themselves move with the role and the seed is not used.
        """
        self.streams.ask(seed)


@dataclass(kw_only=True)
class Training:
    """What ``build`` returns: everything that moves with a change of world.

    The lists stay the same objects for the whole life of a ``Job``; a change of world replaces what is in them.
    """

    model: list[nn.Module]
    """model chunks of this rank, usually wrapped in Megatron's DDP"""
    optimizer: Any = None
    """a Megatron optimizer"""
    scheduler: Stateful | None = None
    """e.g. Megatron's OptimizerParamScheduler"""
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    """named state of the script's own, equal on all ranks; JSON values and tensors"""
    vocab_size: int | None = None
    """rows of the vocabulary that mean something; those beyond are padding, and are left out of checkpoints. They
    come back as zeros: name it only if the loss does not see them"""
