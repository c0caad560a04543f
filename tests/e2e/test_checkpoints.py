"""Evaluation, and Megatron's own checkpoints, after every kind of change."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import PROBE
from .launch import Launched, read_lines
from .test_resize import losses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

CHANGES = [
    (("--workers=4", "--layout=tp=2"), 4),
    (("--layout=pp=2",), 4),
    (("--workers=1",), 1),
    (("--workers=2",), 2),
    (("--workers=4", "--layout=tp=2,pp=2"), 4),
]


def test_saving_loading_and_evaluating_work_after_every_kind_of_change(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Known complaints 38: evaluation and saving fail after a reshard, and 37: callbacks bound to the old model break."""
    out = tmp_path / "out"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, "--eval-interval=1", steps=60), nproc=2, standbys=2,
        probe={"save": True, "steps_per_change": 60 / (len(CHANGES) + 1)},
    )
    job.until_trains()
    job.until_standbys(2)
    for words, _ in CHANGES:
        job.must_resize(*words)
    assert job.finish() == 0, job.output()
    reloads = Counter(row["generation"] for row in read_lines(out / "reloads.jsonl"))
    assert reloads == {generation: size for generation, (_, size) in enumerate(CHANGES, start=2)}
    rows = losses(out)
    assert all(isinstance(row["eval_loss"], float) for row in rows.values())
    for generation in reloads:
        latest = json.loads((out / "checkpoints" / str(generation) / "latest.json").read_text())
        assert latest["step"] in rows
