"""Thirty changes back and forth, and restarts, leave nothing behind in the processes that live through them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import PROBE
from .launch import ROOT, Launched, read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

AGAIN = str(ROOT / "tests" / "e2e" / "again.py")
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


NUM_RESTARTS = 5
"""that one process has to live through"""
MAX_RESTARTS = 15
NUM_SETTLING = 5
"""steps after which nothing changes any more"""
WRITING = {"liverun-checkpoint-write", "liverun-checkpoint-sync"}
"""threads that are there as long as a checkpoint is being written"""


def test_a_process_that_lives_through_restarts_keeps_nothing_of_them(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Rank 1 is killed again and again, every other time while a resize prepares; the script swallows what fails.

    Now and then an operation of gloo does not notice that its peer is gone. Such a process is replaced, and the count
    begins anew.
    """
    out = tmp_path / "out"
    out.mkdir()
    job = launch(
        AGAIN, str(out), *train_arguments(out, steps=5000), nproc=2,
        options=(f"--checkpoint-dir={tmp_path / 'saved'}", "--checkpoint-every=5", "--keep-last=2",
                 f"--max-restarts={MAX_RESTARTS}"),
    )  # fmt: skip
    job.until_trains()
    stays, reached, lived, num_replaced = job.ranks()[0], 0, 0, 0
    for number in range(1, MAX_RESTARTS + 1):
        job.until("new steps", lambda: (job.status()["step"] or 0) > reached + 10)  # noqa: B023
        if lived == NUM_RESTARTS:
            break
        reached, victim = job.status()["step"], job.ranks()[1]
        if number % 2 == 0:
            assert job.resize("--layout=tp=2", "--no-wait").returncode == 0
            # both have connected: gloo would wait for one that dies before, and the other could not be kept
            job.until("half a change", lambda: len(list(out.glob("builds-*"))) == 2 * (number // 2))  # noqa: B023
        psutil.Process(victim).kill()
        job.until("the restart", lambda: job.kinds().count("world") == number + 1)  # noqa: B023
        lived += 1
        if (now := job.ranks()[0]) != stays:
            stays, lived, num_replaced = now, 0, num_replaced + 1
            assert job.output().count("has not left its script in") == num_replaced, job.output()
    job.cli("stop", job.job)
    rows = [row for row in read_lines(out / "resources.jsonl") if row["pid"] == stays]
    settled = [
        next(row for row in of_generation(rows, number)[NUM_SETTLING:] if not WRITING & {*row["python_threads"]})
        for number in sorted({row["generation"] for row in rows})
    ]
    assert len(settled) == NUM_RESTARTS + 1
    for name, slack in (("groups", 1), ("threads", 1), ("descriptors", 1), ("tensors", 1), ("resident", 1.1)):
        numbers = [row[name] for row in settled]
        assert min(numbers[-3:]) <= max(numbers[:3]) * slack, f"{name} grow: {numbers}"
    assert settled[-1]["python_threads"] == settled[0]["python_threads"]


def of_generation(rows: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["generation"] == number]
