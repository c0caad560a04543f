"""Checkpoints of whole worlds in one process, rank after rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import bed
from bed import Model, Rank, Split

from resharding.checkpoint import folder, reader, writer
from resharding.checkpoint.format import Meta
from resharding.checkpoint.model import fused_in
from resharding.checkpoint.opened import Checkpoint
from resharding.listing import listing_of

NONCE = "test"


def world(model: Model, split: Split, *, empty: bool = False) -> list[Rank]:
    """Build every rank of a world, and note what its tensors are made of."""
    return bed.world(model, split, empty=empty, inside=lambda rank: vars(rank).update(fused=fused_in(rank.chunks)))


def fused_of(ranks: Sequence[Rank]):
    found = {}
    for rank in ranks:
        for name, spec in vars(rank)["fused"].items():
            assert found.setdefault(name, spec) == spec, name
    return found


def save(root: Path, ranks: Sequence[Rank], step: int = 1, *, vocab_size: int | None = None, **options) -> Path:
    """Save a world as its ranks would, last rank first."""
    listings = [listing_of(rank.holding) for rank in ranks]
    hosts = [f"host{number // 4}" for number in range(len(ranks))]
    whole = writer.tensors_in(listings, vocab_size=vocab_size)
    plan = writer.design(whole, fused_of(ranks), **options)
    temporary = root / folder.temporary_name(step, NONCE)
    for number in reversed(range(len(ranks))):
        share = writer.share_of(number, listings, hosts, whole)
        take = writer.live_parts if number % 2 else writer.snapshot  # a last save copies nothing
        parts = list(take(share, ranks[number].holding))
        writer.write_share(temporary, plan, number, parts, {"rank": number}, one_disk=len(ranks) > 2)

    def meta_of(said):
        assert said == [{"rank": number} for number in range(len(ranks))]
        return Meta(step=step, consumed_samples=8 * step)

    return writer.commit(root, temporary, plan, num_ranks=len(ranks), meta_of=meta_of, timeout_s=0.0)


def load(path: Path, ranks: Sequence[Rank], **options) -> int:
    """Load a world as its ranks would; returns the bytes that were read."""
    with Checkpoint.open(path) as checkpoint:
        reader.check_places(checkpoint, [listing_of(rank.holding) for rank in ranks])
        total = sum(reader.read_into(checkpoint, rank.holding, **options) for rank in ranks)
        check(checkpoint, ranks)
    return total


def check(checkpoint: Checkpoint, ranks: Sequence[Rank]) -> None:
    """Compare what all ranks hold with the index."""
    listings = [listing_of(rank.holding) for rank in ranks]
    hosts = ["here"] * len(ranks)
    held = [rank.holding for rank in ranks]
    reader.check_sums(checkpoint, [reader.sums_here(checkpoint, i, listings, hosts, h) for i, h in enumerate(held)])
