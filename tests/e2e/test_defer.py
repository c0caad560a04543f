"""Changes of world whose optimizer state moves beside the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import BF16, BF16_STEPS, PROBE
from .launch import Launched, read_lines
from .test_resize import assert_bit_identical, losses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

DEFER = ("--defer=optimizer",)


def test_the_first_step_computes_before_the_optimizers_state_sets_out_and_not_a_bit_shows(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], undisturbed: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """bf16 with fp32 main parameters and dropout; state is held back until forward and backward have run."""
    out = tmp_path / "out"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, *BF16, steps=BF16_STEPS), nproc=2, standbys=1, options=DEFER,
        probe={"steps_per_change": 10, "late": {}, "no_hooks": True},
    )
    job.until_trains()
    job.until_standbys(1)
    for rank in ("1", "0"):
        job.must_resize("--replace", rank)
    changes = [event for event in job.events() if event["kind"] == "active"]
    assert job.finish() == 0, job.output()
    assert_bit_identical(undisturbed(*BF16, steps=BF16_STEPS), out)
    assert {row["generation"] for row in losses(out).values()} == {1, 2, 3}
    for generation, change in enumerate(changes, 2):
        assert 0 < change["bytes_late"] <= change["bytes_moved"] + change["bytes_local"]
        assert change["kept"] is True
        rows = [row for row in read_lines(out / "late.jsonl") if row["generation"] == generation]
        first = min(row["step"] for row in rows)
        assert [row["set_out"] for row in rows if row["step"] == first] == [False, False]
        assert all(row["set_out"] for row in rows if row["step"] > first)


@pytest.mark.parametrize(
    ("late", "why"),
    [
        ({"w0": "fail"}, "OSError: the network card fell out"),
        pytest.param({"w1": "kill"}, "Connection closed by peer", marks=pytest.mark.long),
    ],
    ids=["a receiver fails", "the leaver dies"],
)
def test_no_step_is_made_and_the_job_ends_if_the_optimizers_state_does_not_come(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path,
    late: dict[str, str], why: str,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, "--bf16", steps=1000), nproc=2, standbys=1, options=DEFER,
        probe={"late": late, "no_hooks": True},
    )
    job.until_trains()
    job.until_standbys(1)
    job.must_resize("--replace", "1")
    assert job.finish(60) == 1
    assert "the optimizer's state did not follow into generation 2" in job.output()
    assert why in job.output()
    assert "start again from the last checkpoint, and with --defer nothing" in job.output()
    assert {row["generation"] for row in losses(out).values()} == {1}, "a step was made with half a state"
    assert any(row["generation"] == 2 for row in read_lines(out / "late.jsonl")), "the new world did compute"


def test_a_job_that_may_restart_goes_on_from_the_last_whole_state_and_no_mix_is_trained(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], undisturbed: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Every step that was made, also twice, is that of a run to which nothing happened."""
    out, saved = tmp_path / "out", tmp_path / "saved"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, *BF16, steps=BF16_STEPS), nproc=2, standbys=1,
        options=(*DEFER, f"--checkpoint-dir={saved}", "--checkpoint-every=2", "--max-restarts=1"),
        probe={"steps_per_change": 3, "late": {"w0": "fail"}, "no_hooks": True},
    )  # fmt: skip
    job.until_trains()
    job.until_standbys(1)
    job.until("a checkpoint", (saved / "latest").exists)
    job.must_resize("--replace", "1")
    assert job.finish() == 0, job.output()
    assert "the optimizer's state did not follow into generation 2" in job.output()
    truth, rows = losses(undisturbed(*BF16, steps=BF16_STEPS)), read_lines(out / "loss.jsonl")
    assert {row["step"] for row in rows} == truth.keys()
    for row in rows:
        assert (row["loss"], row["grad_norm"]) == (truth[row["step"]]["loss"], truth[row["step"]]["grad_norm"]), row
    assert sorted({row["generation"] for row in rows}) == [1, 3], "a step was made with half a state"
    assert len(rows) - len(truth) <= 3, "more is lost than since the last checkpoint"
