"""``liverun plan``: what a change of world would move and take, from the model's flags, with nothing running.

Every rank of both worlds is built as shapes only, one after the other in this process; then the plan is the one that
a change of world would make. A rank of a dense model's stage has what its data parallel peers have, but for the shard
of each buffer, so one of them is built for all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liverun import device
from liverun.description import Description, rank_of_a_world
from liverun.layout import Layout
from resharding.listing import Listing, listing_of
from resharding.plan import RankPlan, plan_all, totals_of

LOCAL_BYTES_PER_S = 4e9
"""at which a rank copies within its own memory"""


@dataclass(frozen=True, kw_only=True)
class PlannedWorld:
    """A world that is not there: a layout, dp included."""

    layout: Layout
    size: int

    @classmethod
    def parse(cls, text: str) -> PlannedWorld:
        """Read ``tp=2,pp=2,dp=4``. Raises ``ValueError`` with one sentence."""
        parts = [part.strip() for part in text.split(",")]
        dps = [part for part in parts if part.startswith("dp=")]
        rest = [part for part in parts if not part.startswith("dp=")]
        if len(dps) > 1 or not all(part[3:].isdecimal() and int(part[3:]) for part in dps):
            raise ValueError(f"layout {text!r}: write dp once, as a whole number of at least 1")
        layout = Layout.parse(",".join(rest)) if rest else Layout()
        size = layout.model_size * (int(dps[0][3:]) if dps else 1)
        if (reason := layout.misfit(size)) is not None:
            raise ValueError(reason)
        return cls(layout=layout, size=size)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON shows."""
        return {"size": self.size, "layout": {**self.layout.as_dict(), "dp": self.layout.dp(self.size)}}


def listings_of(description: Description, world: PlannedWorld) -> list[Listing]:
    """Return what every rank of a world would hold."""
    layout, size = world.layout, world.size
    if description.has_experts:
        return [_built(description, world, rank)[0] for rank in range(size)]
    replicas = layout.cp * layout.dp(size)
    firsts: dict[tuple[int, int], Listing] = {}
    found = []
    for rank in range(size):
        # Megatron's order of ranks: tensor parallel peers next to each other, stages furthest apart
        tp, replica, pp = rank % layout.tp, rank // layout.tp % replicas, rank // layout.tp // replicas
        if (tp, pp) not in firsts:
            first, follows = _built(description, world, rank)
            if not follows and replicas > 1:
                return [_built(description, world, one)[0] for one in range(size)]
            firsts[tp, pp] = first
        entries = [(block, replica if block.buckets else index) for block, index in firsts[tp, pp].entries]
        found.append(Listing(tuple(entry for entry in entries if entry[0].num_boxes(entry[1]))))
    return found


def _built(description: Description, world: PlannedWorld, rank: int) -> tuple[Listing, bool]:
    """Return what a rank holds, and whether its peers' share follows from it."""
    with rank_of_a_world(world.layout, rank, world.size):
        holding = description.build(world.layout)
    distributed = description.flags.get("use_distributed_optimizer", False)
    listing = listing_of(holding)
    loose = [
        box for block, index in listing.entries if not block.buckets for box in block.boxes(index)
        if not box.key.startswith("weight/")
    ]  # fmt: skip
    return listing, not (distributed and loose)


def report(
    description: Description, before: PlannedWorld, after: PlannedWorld, *, workers_per_node: int,
    bytes_per_s: float, staging_bytes: int,
) -> dict[str, Any]:
    """Return what the change would move and take. Raises ``ValueError`` for a layout that the model does not fit."""
    for world in (before, after):
        if (reason := description.misfit(world.layout)) is not None:
            raise ValueError(reason)
    size = max(before.size, after.size)
    old, new = (
        listings_of(description, world) + [Listing(())] * (size - world.size) for world in (before, after)
    )
    hosts = [f"n{rank // workers_per_node}" for rank in range(size)]
    plans = plan_all(old, new, hosts)
    totals = totals_of(plans, hosts)
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank,
            "node": hosts[rank],
            "bytes_before": _num_bytes(old[rank]),
            "bytes_after": _num_bytes(new[rank]),
            "bytes_sent": plan.bytes_sent,
            "bytes_received": plan.bytes_received,
            "bytes_local": plan.bytes_local,
            "seconds": _seconds(plan, bytes_per_s),
        }
        for rank, plan in enumerate(plans)
    ]
    links: dict[tuple[int, int], int] = defaultdict(int)
    for plan in plans:
        for peer, count in plan.bytes_sent_to.items():
            links[plan.rank, peer] += count
    return {
        "schema_version": 1,
        "from": before.as_dict(),
        "to": after.as_dict(),
        "ignored_flags": list(description.ignored),
        "bytes_moved": totals.bytes_moved,
        "bytes_local": totals.bytes_local,
        "bytes_between_nodes": totals.bytes_between_hosts,
        "estimate": {
            "seconds": max(rank["seconds"] for rank in ranks),
            "bytes_per_s": bytes_per_s,
            "peak_bytes_kept": max(rank["bytes_before"] + rank["bytes_after"] for rank in ranks) + staging_bytes,
            "peak_bytes_freed": max(
                max(rank["bytes_before"], rank["bytes_after"]) + layer for rank, layer in zip(
                    ranks, _largest_layers(old, new), strict=True)
            ) + staging_bytes,
        },
        "ranks": ranks,
        "links": [
            {"from": source, "to": target, "bytes": count, "between_nodes": hosts[source] != hosts[target]}
            for (source, target), count in sorted(links.items())
        ],
    }  # fmt: skip


def _num_bytes(listing: Listing) -> int:
    return sum(_by_layer(listing).values())


def _by_layer(listing: Listing) -> dict[Any, int]:
    from resharding.assign import layer_of

    found: dict[Any, int] = defaultdict(int)
    for block, index in listing.entries:
        for box in block.boxes(index):
            found[layer_of(box.key)] += box.nbytes
    return found


def _largest_layers(old: Sequence[Listing], new: Sequence[Listing]) -> list[int]:
    return [max((*_by_layer(was).values(), *_by_layer(now).values(), 0)) for was, now in zip(old, new, strict=True)]


def _seconds(plan: RankPlan, bytes_per_s: float) -> float:
    """Estimate what a rank takes: it sends and receives at once, and copies at its own pace before."""
    return max(plan.bytes_sent, plan.bytes_received) / bytes_per_s + plan.bytes_local / LOCAL_BYTES_PER_S


def main(argv: Sequence[str] | None = None) -> None:
    """Print a report as one JSON object; exit 2 with one sentence for a mistake."""
    parser = argparse.ArgumentParser(prog="liverun plan", add_help=False)
    for name in ("--from", "--to", "--model", "--workers-per-node", "--bytes-per-s", "--staging-bytes"):
        parser.add_argument(name, dest=name[2:].replace("-", "_"))
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    words = vars(parser.parse_args(argv))
    device.install()
    try:
        found = report(
            Description.of(Path(words["model"]) if words["model"] else None, words["flags"][1:]),
            PlannedWorld.parse(words["from"]), PlannedWorld.parse(words["to"]),
            workers_per_node=int(words["workers_per_node"]), bytes_per_s=float(words["bytes_per_s"]),
            staging_bytes=int(words["staging_bytes"]),
        )  # fmt: skip
    except (ValueError, AssertionError) as error:  # Megatron asserts what its configuration does not allow
        sys.stderr.write(f"liverun: {' '.join(str(error).split())}\n")
        raise SystemExit(2) from None
    json.dump(found, sys.stdout)
    sys.stdout.write("\n")
