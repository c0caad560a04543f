"""Kinds of model beside the one of the other tests: the losses are those of one worker whatever becomes of its state."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import PROBE, TRAIN
from .launch import Launched, read_lines
from .test_resize import losses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STEPS, EVERY = 24, 8
KINDS = {
    "experts": (("--num-experts=4",), ("ep=2", "pp=2")),
    "a key head for each head, untied": (
        ("--num-query-groups=4", "--untie-embeddings-and-output-weights"), ("tp=2", "pp=2"),
    ),
}  # fmt: skip
"""What the script is told, and two ways to split the model over two workers."""


def origin_of(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of the world that saved it."""
    origin: dict[str, Any] = json.loads((path / "index.json").read_text())["index"]["meta"]["origin"]
    return origin


@pytest.mark.parametrize("kind", ["experts", pytest.param("a key head for each head, untied", marks=pytest.mark.long)])
def test_losses_are_those_of_one_worker_over_live_changes_and_from_a_checkpoint_under_any_layout(
    kind: str, launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    flags, layouts = KINDS[kind]
    saved, live_saved = tmp_path / "saved", tmp_path / "live-saved"

    def run(name: str, script: str, *options: str, nproc: int) -> Launched:
        out = tmp_path / f"out-{name}"
        out.mkdir()
        words = [str(out)] if script == PROBE else []
        return launch(
            script, *words, *train_arguments(out, *flags, steps=STEPS), name=name, nproc=nproc, options=options,
            probe={"steps_per_change": 6, "no_hooks": True},
        )  # fmt: skip

    alone = run("alone", TRAIN, f"--checkpoint-dir={saved}", f"--checkpoint-every={EVERY}", nproc=1)
    assert alone.finish() == 0, alone.output()
    truth = losses(tmp_path / "out-alone")

    live = run("live", PROBE, f"--checkpoint-dir={live_saved}", "--checkpoint-every=1", nproc=2)
    live.until_trains()
    one, other = layouts
    for words in (("--layout", one), ("--workers", "1"), ("--workers", "2", "--layout", other), ("--layout", one)):
        live.must_resize(*words)
    assert live.finish() == 0, live.output()
    rows = list(losses(tmp_path / "out-live").values())
    assert {row["generation"] for row in rows} == {1, 2, 3, 4, 5}
    assert rows[-1]["layout"] == one

    for step in (2 * EVERY, 3 * EVERY):
        shutil.rmtree(saved / f"step-{step:08d}")
    sources = [(saved, layout, layout) for layout in layouts]
    for generation, before, after in ((2, one, other), (4, other, one)):
        found = {path: origin_of(path) for path in sorted(live_saved.glob("step-*"))}
        newest = [path for path, origin in found.items() if origin["generation"] == generation][-1]
        axis, _, size = before.partition("=")
        assert found[newest]["layout"][axis] == int(size)
        folder = tmp_path / f"taken-{before}"  # in which it is alone
        shutil.copytree(newest, folder / newest.name)
        sources.append((folder, after, f"{before}-{after}"))
    for folder, layout, name in sources:
        (path,) = folder.glob("step-*")
        loaded = run(name, TRAIN, f"--checkpoint-dir={folder}", f"--layout={layout}", nproc=2)
        assert loaded.finish() == 0, loaded.output()
        rows_after = read_lines(tmp_path / f"out-{name}" / "loss.jsonl")
        assert [row["step"] for row in rows_after] == list(range(int(path.name.removeprefix("step-")), STEPS))
        rows += rows_after
    for row in rows:
        assert math.isclose(row["loss"], truth[row["step"]]["loss"], rel_tol=1e-5), row
