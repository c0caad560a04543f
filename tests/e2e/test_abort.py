"""A change of world that fails before its commit leaves the training as if it had never been asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from .conftest import PROBE
from .launch import Launched, read_lines
from .test_resize import DROPOUT, assert_bit_identical, losses, start_to_disturb

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STEPS = 40


def start_with_a_stopped_joiner(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> tuple[Launched, Path, Path]:
    announced = tmp_path / "joiner.pid"
    job, disturbed = start_to_disturb(
        launch, train_arguments, tmp_path, *DROPOUT, steps=STEPS, standbys=2,
        probe={"steps_per_change": 20, "hang_in_build": 2, "announce": str(announced)},
    )
    job.until_trains()
    job.until_standbys(2)
    return job, disturbed, announced


def the_abort(job: Launched) -> dict[str, Any]:
    aborted = [event for event in job.events() if event["kind"] == "aborted"]
    assert len(aborted) == 1
    return aborted[0]


def test_old_world_trains_on_when_a_joiner_is_killed_while_preparing(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], undisturbed: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Known complaint 30: a late joiner stalls in a broadcast, and all with it."""
    job, disturbed, announced = start_with_a_stopped_joiner(launch, train_arguments, tmp_path)
    asked = job.cli("resize", job.job, "--no-wait", "--workers=4", "--layout=tp=2")
    assert asked.returncode == 0, asked.stderr
    pid = int(job.until("a joiner that builds", lambda: announced.exists() and announced.read_text()))
    os.kill(pid, signal.SIGKILL)
    job.until("the abort", lambda: "aborted" in job.kinds())
    assert "SIGKILL" in the_abort(job)["reason"]
    assert job.finish() == 0, job.output()
    assert_bit_identical(undisturbed(*DROPOUT, steps=STEPS), disturbed)
    assert {row["generation"] for row in losses(disturbed).values()} == {1}


def test_old_world_trains_on_when_a_joiner_never_answers(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], undisturbed: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Known complaint 36: a connect or an operation hangs past its time-out."""
    job, disturbed, announced = start_with_a_stopped_joiner(launch, train_arguments, tmp_path)
    asked = job.resize("--workers=4", "--layout=tp=2", timeout_s=4)
    assert asked.returncode != 0
    assert announced.exists()
    reason = the_abort(job)["reason"]
    assert "4 s" in reason
    assert reason in asked.stderr
    assert job.finish() == 0, job.output()
    assert_bit_identical(undisturbed(*DROPOUT, steps=STEPS), disturbed)
    assert {row["generation"] for row in losses(disturbed).values()} == {1}


def test_a_resize_works_after_an_aborted_one(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    job, disturbed, announced = start_with_a_stopped_joiner(launch, train_arguments, tmp_path)
    assert job.resize("--workers=4", "--layout=tp=2", timeout_s=4).returncode != 0
    assert announced.exists()
    job.until_standbys(2)
    job.must_resize("--workers=4", "--layout=tp=2")
    assert job.finish() == 0, job.output()
    generations = {row["generation"] for row in losses(disturbed).values()}
    assert generations == {1, 3}, "a generation number was used twice, or the second resize did not happen"


def test_a_resize_that_comes_too_late_does_not_harm_the_end(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, steps=6), nproc=2, standbys=1, probe={"steps_per_change": 1}
    )
    job.until("step 3", lambda: len(read_lines(out / "loss.jsonl")) > 3)
    asked = job.cli("resize", job.job, "--no-wait", "--replace=1")
    assert asked.returncode == 0, asked.stderr
    assert job.finish() == 0, job.output()
    assert len(losses(out)) == 6
    assert job.kinds()[-1] == "finished"


def test_old_world_trains_on_when_the_stream_fails_in_one_rank(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], undisturbed: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Its peers wait for it in the middle of theirs, and must not wait long."""
    job, disturbed = start_to_disturb(
        launch, train_arguments, tmp_path, *DROPOUT, steps=STEPS, standbys=2,
        probe={"steps_per_change": 20, "fail_stream": 1},
    )
    job.until_trains()
    job.until_standbys(2)
    asked = job.resize("--workers=4", "--layout=tp=2", timeout_s=300)
    assert asked.returncode != 0
    reason = the_abort(job)["reason"]
    assert "the network card fell out" in reason
    assert "not committed" in reason
    times = {event["kind"]: datetime.fromisoformat(event["time"]) for event in job.events()}
    assert (times["aborted"] - times["switching"]).total_seconds() < 60, "somebody waited for a time-out"
    assert job.finish() == 0, job.output()
    assert_bit_identical(undisturbed(*DROPOUT, steps=STEPS), disturbed)
