"""liverun inside a worker: ``build``, ``join``, ``step``.

    def build(world): ...                    # model, optimizer, scheduler, as in any Megatron script
    job = liverun.join(build)
    while job.unfinished(num_steps):
        with job.step() as step:
            ...

Names are imported when first used, so that the command line can use ``liverun.layout`` without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from liverun.layout import Layout

if TYPE_CHECKING:
    from liverun.job import Job, Step, join
    from liverun.world import Stateful, Training, World

__all__ = ["Job", "Layout", "Stateful", "Step", "Training", "World", "join"]

_HOMES = {
    "Job": "liverun.job", "Step": "liverun.job", "join": "liverun.job", "Stateful": "liverun.world",
    "Training": "liverun.world", "World": "liverun.world",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'liverun' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
