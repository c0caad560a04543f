"""Opens whatever others wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resharding.checkpoint.deepspeed import DeepSpeedSource
from resharding.checkpoint.folder import newest_of_others
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.megatron_dist import BuffersOf, MegatronSource
from resharding.checkpoint.universal import UniversalSource


def open_source(
    kind: str,
    path: Path,
    *,
    patterns: Mapping[str, Any],
    model: Mapping[str, Any],
    buffers_of: BuffersOf | None = None,
    **options: Any,
) -> MegatronSource | DeepSpeedSource | UniversalSource:
    """Open the checkpoint of a ``kind`` that ``folder.kind_of`` found. Raises ``BadCheckpoint``."""
    path = newest_of_others(path)
    if kind == "megatron":
        return MegatronSource(path, model=model, buffers_of=buffers_of, **options)
    if kind == "universal":
        return UniversalSource(path, model=model, **options)
    if kind == "deepspeed":
        return DeepSpeedSource(path, model=model, patterns=patterns, **options)
    raise BadCheckpoint(f"{path} is a checkpoint of torch.distributed.checkpoint, whose names say nothing of a model")
