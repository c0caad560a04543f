"""What a model and a batch allow: the answer to Check, before anything is built or moved."""

from __future__ import annotations

from dataclasses import dataclass

from liverun.layout import Layout
from liverun.prepare import Standing
from liverun.small_state import unmovable
from liverun.world import Stateful, Training
from resharding import megatron


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a job, known from what the script passed to ``join`` and from the model it built."""

    global_batch_size: int | None = None
    micro_batch_size: int | None = None

    def refusal(self, layout: Layout, world_size: int, present: Standing | None) -> str | None:
        """Say in one sentence why the job cannot run in such a world, or return ``None`` if it can.

        ``present`` is the world the job is in, whose model, optimizer and small state are asked; none before the
        first. It may train meanwhile, and other ranks are not asked.
        """
        if (reason := layout.misfit(world_size)) is not None:
            return reason
        dp = layout.dp(world_size)
        if self.global_batch_size is not None and self.micro_batch_size is not None:
            wave = self.micro_batch_size * dp
            if self.global_batch_size % wave:
                return (
                    f"global batch size {self.global_batch_size} is not a multiple of micro batch size "
                    f"{self.micro_batch_size} times dp {dp}; the batch stays constant, so ask for another dp"
                )
        if present is None:
            return None
        training = present.training
        return (
            megatron.misfit_of(training.model, layout.as_dict() | {"etp": layout.expert_tp})
            or megatron.misfit_of_optimizer(training.model, training.optimizer)
            or _misfit_of_small_state(training)
        )


def _misfit_of_small_state(training: Training) -> str | None:
    """Say in one sentence what of the scheduler and the script's own state could not travel as JSON."""
    parts: dict[str, object] = {} if training.scheduler is None else {"scheduler": training.scheduler}
    parts |= {f"extra[{name!r}]": part for name, part in training.extra.items()}
    for name, part in parts.items():
        if not isinstance(part, Stateful):
            return f"{name} is a {type(part).__name__} without state_dict() and load_state_dict(), and cannot move"
        try:
            state = part.state_dict()
        except Exception:  # noqa: BLE001, S112 - a script's own, asked beside its training; asked again at the boundary
            continue
        if (reason := unmovable(name, state)) is not None:
            return reason
    return None
