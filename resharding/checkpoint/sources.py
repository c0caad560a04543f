"""Opens whatever others wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resharding.checkpoint.deepspeed import DeepSpeedSource
from resharding.checkpoint.folder import newest_of_others
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.megatron_dist import BuffersOf, MegatronSource
from resharding.checkpoint.names import Renamed
from resharding.checkpoint.universal import UniversalSource


def open_source(
    kind: str,
    path: Path,
    *,
    patterns: Mapping[str, Any],
    model: Mapping[str, Any],
    buffers_of: BuffersOf | None = None,
    **options: Any,
) -> MegatronSource | DeepSpeedSource | UniversalSource | Renamed:
    """Open the checkpoint of a ``kind`` that ``folder.kind_of`` found. Raises ``BadCheckpoint``."""
    path = newest_of_others(path)
    if strange := sorted(set(patterns) - {"rules", "rename", "groups"}):
        raise BadCheckpoint(f"--patterns has {strange[0]!r}, which says nothing; name rules, rename or groups")
    if kind == "megatron":
        return MegatronSource(path, model=model, buffers_of=buffers_of, **options)
    if kind not in ("universal", "deepspeed"):
        raise BadCheckpoint(
            f"{path} is a checkpoint of torch.distributed.checkpoint, whose names say nothing of a model"
        )
    found: UniversalSource | DeepSpeedSource
    if kind == "universal":
        found = UniversalSource(path, model=model, patterns=patterns, **options)
    else:
        found = DeepSpeedSource(path, model=model, patterns=patterns, **options)
    if {"rename", "groups"} & set(patterns):
        return Renamed(found, spec=patterns, model=model, nbytes=found.nbytes)
    return found
