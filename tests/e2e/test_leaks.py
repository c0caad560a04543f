"""Thirty changes back and forth leave nothing behind in the processes that live through them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import PROBE
from .launch import Launched, read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_CHANGES = 30


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--keep=never",), marks=pytest.mark.long),
        pytest.param(("--defer=optimizer", "--verify=sample"), marks=pytest.mark.long),
    ],
    ids=["as it is", "given back", "deferred"],
)
def test_groups_threads_descriptors_and_tensors_are_flat_over_thirty_changes(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Known complaint 35: groups, memory and descriptors leak with every cycle."""
    out = tmp_path / "out"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, steps=400), nproc=2, standbys=0, options=options,
        probe={"resources": True, "steps_per_change": 400 / (NUM_CHANGES + 5)},
    )
    job.until_trains()
    for change in range(NUM_CHANGES):
        job.must_resize("--layout=tp=2" if change % 2 == 0 else "--layout=tp=1")
        job.until("the old world's end", lambda: has_retired(job, change + 1))  # noqa: B023
    assert job.status()["generation"] == NUM_CHANGES + 1
    # a few more steps, in which what was dropped last can go
    seen = job.status()["step"]
    job.until("three more steps", lambda: job.status()["step"] >= seen + 3)
    job.cli("stop", job.job)
    by_place: dict[tuple[int, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(out / "resources.jsonl"):
        by_place[row["pid"], row["generation"] % 2 == 0].append(row)
    assert len(by_place) == 4, "two processes, each under two layouts"
    for rows in by_place.values():
        # the last step of each generation: by then the world before it is gone
        last = {row["generation"]: row for row in rows}
        settled = [last[generation] for generation in sorted(last)][1:]
        assert len(settled) >= NUM_CHANGES // 2 - 1
        for name in ("groups", "threads", "descriptors", "tensors"):
            numbers = [row[name] for row in settled]
            early, late = numbers[:3], numbers[-3:]
            assert min(late) <= max(early), f"{name} grow: {numbers}"
        assert settled[-1]["python_threads"] == settled[0]["python_threads"]


def has_retired(job: Launched, generation: int) -> bool:
    return any(event["kind"] == "retired" and event["generation"] == generation for event in job.events())
