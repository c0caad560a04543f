"""What a model and a batch allow: the answer to Check, before anything is built or moved."""

from __future__ import annotations

from dataclasses import dataclass

from liverun.layout import Layout
from liverun.prepare import Standing
from resharding import megatron


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a job, known from what the script passed to ``join`` and from the model it built."""

    global_batch_size: int | None = None
    micro_batch_size: int | None = None

    def refusal(self, layout: Layout, world_size: int, present: Standing | None) -> str | None:
        """Say in one sentence why the job cannot run in such a world, or return ``None`` if it can.

        ``present`` is the world the job is in, whose model's configuration is asked; none before the first.
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
        return megatron.misfit_of(present.training.model, layout.as_dict() | {"etp": layout.expert_tp})
