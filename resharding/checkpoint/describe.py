"""What lies in a checkpoint, for people and scripts. Needs no torch."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from resharding.assign import natural
from resharding.checkpoint.format import VERSION, Entry
from resharding.checkpoint.opened import Checkpoint

SCHEMA_VERSION = 1


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return everything but the numbers, as JSON values."""
    index = checkpoint.index
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "elements": 0, "bytes": 0})
    for entry in index.entries:
        kind = kinds[entry.kind]
        kind["tensors"] += 1
        kind["elements"] += math.prod(entry.shape)
        kind["bytes"] += entry.nbytes
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(checkpoint.folder),
        "format_version": VERSION,
        "step": index.meta.step,
        "consumed_samples": index.meta.consumed_samples,
        "origin": dict(index.meta.origin),
        "optimizer": dict(index.meta.optimizer),
        "bytes": index.nbytes,
        "kinds": dict(kinds),
        "files": [{"name": file.name, "bytes": file.nbytes} for file in index.files],
        "tensors": [
            {
                "key": entry.key, "dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.nbytes,
                "file": entry.file, "digest": f"{entry.digest or 0:016x}",
            }
            for entry in sorted(index.entries, key=lambda entry: natural(entry.key))
        ],
    }  # fmt: skip


def tree_of(entries: list[Entry]) -> dict[str, Any]:
    """Return parameters as a tree of the words of their names; a leaf is the list of its entries, kind by kind."""
    root: dict[str, Any] = {}
    for entry in sorted(entries, key=lambda entry: natural(entry.key)):
        node = root
        *above, last = entry.name.split(".")
        for word in above:
            node = node.setdefault(word, {})
        node.setdefault(f"{last}\0", []).append(entry)
    return root


def layout_words(origin: dict[str, Any]) -> str:
    """Return the layout a checkpoint came from, in a few words."""
    layout = origin.get("layout")
    if not isinstance(layout, dict):
        return str(origin.get("source", "unknown"))
    axes = ", ".join(f"{axis}={size}" for axis, size in layout.items() if size != 1) or "tp=1"
    size = origin.get("world_size")
    return f"{axes} on {size} worker{'s' * (size != 1)}"


def size_words(count: float) -> str:
    """Write bytes as people do."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


