"""Every kind of model: saved under each layout of a drawn set, loaded under each other one, every element checked.

    pytest tests/resharding/test_checkpoint_layouts.py                    # the same sets every time
    pytest tests/resharding/test_checkpoint_layouts.py -m long            # larger ones, drawn anew
    pytest tests/resharding/test_checkpoint_layouts.py -m long --pairs-seed 17
"""

from __future__ import annotations

import filecmp
import itertools
import random
from pathlib import Path

import bed
import ckpt
import pytest
import torch
from bed import Split
from test_families import MODELS, canonical, splits

from resharding.boxes import Box
from resharding.checkpoint import reader
from resharding.checkpoint.opened import Checkpoint


def features(split: Split) -> set[str]:
    """Name what is split, one by one and in pairs; a family's set has as many of these as fit into it."""
    names = ("tp", "pp", "vpp", "dp", "cp", "ep", "first", "sequence_parallel")
    own = [name for name in names if int(getattr(split, name)) > (0 if name in ("first", "sequence_parallel") else 1)]
    own += ["etp"] if split.etp not in (0, split.tp) else []
    return {" x ".join(some) for count in (1, 2) for some in itertools.combinations(own, count)}


def drawn(name: str, seed: int, num: int, most_ranks: int) -> list[Split]:
    """Draw layouts of a family: each time a few, and of these the one that has most of what those before it have not."""
    pool = [split for split in splits(name)[0] if split.size <= most_ranks]
    dice = random.Random(f"{name}/{seed}")
    found: list[Split] = []
    while len(found) < num:
        seen = set().union(*map(features, found))
        some = dice.sample([split for split in pool if split not in found], 8)
        found.append(max(some, key=lambda split: (len(features(split) - seen), -split.size)))
    return found


def all_pairs(name: str, layouts: list[Split], folder: Path) -> None:
    """Save under each layout, and load each under every other one. Padding is left out, and comes back as zeros."""
    model = MODELS[name]
    worlds = [ckpt.world(model, layout) for layout in layouts]
    rows = {box.key: model.vocab for world in worlds for rank in world for box in rank.holding.boxes if box.padded}
    saved = []
    for layout, world in zip(layouts, worlds, strict=True):
        for rank in world:
            bed.fill(rank.holding)
        saved.append(ckpt.save(folder / str(layout), world, max_file_bytes=40_000, vocab_size=model.vocab))
    truth = _without_padding(canonical(worlds[0]), model.vocab)
    names = sorted(file.name for file in saved[0].iterdir())
    for path in saved:  # which know nothing of their layout
        assert sorted(file.name for file in path.iterdir()) == names
        assert filecmp.cmpfiles(saved[0], path, names, shallow=False)[0] == names, path
    for source, target in itertools.permutations(range(len(layouts)), 2):
        for rank in worlds[target]:
            bed.poison(rank.holding)
        with Checkpoint.open(saved[source]) as checkpoint:
            read = sum(reader.read_into(checkpoint, rank.holding, staging_bytes=4096) for rank in worlds[target])
        about = f"{layouts[source]} -> {layouts[target]}"
        assert [f"{about}: {line}" for rank in worlds[target] for line in bed.wrong(rank.holding, rows)] == []
        # its boxes, and nothing else
        assert read == sum(_wanted(box, rows) for rank in worlds[target] for box in rank.holding.boxes), about
    for layout, world in zip(layouts, worlds, strict=True):
        now = _without_padding(canonical(world), model.vocab)
        assert now.keys() == truth.keys()
        assert [f"{layout}: {key}" for key in now if not torch.equal(now[key], truth[key])] == []


def _wanted(box: Box, rows: dict[str, int]) -> int:
    """Return the bytes of a box that are no padding."""
    if not box.padded:
        return box.nbytes
    inside = max(0, min(box.shape[0], rows[box.key] - box.offset[0]))
    return box.nbytes // box.shape[0] * inside


def _without_padding(state: dict[str, torch.Tensor], vocab: int) -> dict[str, torch.Tensor]:
    padded = ("word_embeddings", "output_layer")
    return {key: one[:vocab] if any(name in key for name in padded) else one for key, one in state.items()}


NUM, MOST = 3, 8


@pytest.mark.parametrize("name", MODELS)
def test_what_each_of_some_layouts_saved_each_other_one_loads(name: str, tmp_path: Path) -> None:
    all_pairs(name, drawn(name, 17, NUM, MOST), tmp_path)


def test_the_sets_have_every_kind_of_parallelism_and_their_mixtures() -> None:
    seen = set().union(*(features(split) for name in MODELS for split in drawn(name, 17, NUM, MOST)))
    assert {"vpp", "first", "cp x pp", "cp x ep", "pp x ep", "vpp x ep", "pp x vpp", "dp x cp", "tp x ep", "etp"} <= {
        *seen, *(" x ".join(reversed(each.split(" x "))) for each in seen)
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_what_each_of_many_layouts_saved_each_other_one_loads(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    start = request.config.getoption("--pairs-seed", None)
    start = random.randrange(2**32) if start is None else start
    print(f"--pairs-seed {start}")
    all_pairs(name, drawn(name, start, 10, 16), tmp_path)
