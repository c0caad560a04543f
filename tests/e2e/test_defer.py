"""Changes of world whose optimizer state moves beside the first step."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import BF16, BF16_STEPS, PROBE
from .launch import Launched, read_lines
from .test_resize import assert_bit_identical, losses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

DEFER = ("--defer=optimizer",)
MESSAGES = "--staging=256KiB"
"""makes several messages of what a rank of this small model receives"""


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


def test_a_new_layouts_first_step_and_the_stream_beside_it_run_together_and_not_a_bit_shows(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """From dp to tp, in two jobs that change before the same step, of which one defers nothing."""
    outs = {name: tmp_path / f"{name}-out" for name in ("deferred", "whole")}
    jobs = {}
    for name, options in (("deferred", (*DEFER, MESSAGES)), ("whole", ())):
        outs[name].mkdir()
        jobs[name] = launch(
            PROBE, str(outs[name]), *train_arguments(outs[name], *BF16, steps=7), name=name, nproc=2, options=options,
            probe={"until_armed": 0, "steps_per_change": 3, "beside": name == "deferred", "no_hooks": True},
        )
    for job in jobs.values():
        job.until_trains()
        job.must_resize("--layout=tp=2")
    for job in jobs.values():
        assert job.finish() == 0, job.output()
    assert_bit_identical(outs["whole"], outs["deferred"])
    for name, out in outs.items():
        assert [row["layout"] for row in losses(out).values()] == [*["tp=1"] * 2, *["tp=2"] * 5]
        (change,) = [event for event in jobs[name].events() if event["kind"] == "active"]
        assert (change["bytes_late"] > 0) == (name == "deferred")
    rows = read_lines(outs["deferred"] / "beside.jsonl")
    for rank in (0, 1):
        whats = [row["what"] for row in rows if row["rank"] == rank]
        more = whats.count("arrived") - 1
        assert more >= 2, "so few messages show nothing"
        assert whats == ["forward", "arrived", "computed", *["arrived"] * more, "whole", "step"]
        (whole,) = [row for row in rows if row["what"] == "whole" and row["rank"] == rank]
        assert whole["keys"] == ["exp_avg", "exp_avg_sq", "main"]


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        ({"late": {"w0": "fail"}}, "OSError: the network card fell out"),
        ({"late": {"w1": "kill"}}, "Connection (closed|reset) by peer|Broken pipe"),
        ({"late": {}, "damage": ["moment"]}, "did not arrive from rank"),
    ],
    ids=["a receiver fails", "the leaver dies", "a byte is another one"],
)
def test_no_step_is_made_and_the_job_ends_if_the_optimizers_state_does_not_come(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path,
    probe: dict[str, Any], why: str,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, "--bf16", steps=1000), nproc=2, standbys=1, options=(*DEFER, MESSAGES),
        probe={**probe, "no_hooks": True},
    )
    job.until_trains()
    job.until_standbys(1)
    job.must_resize("--replace", "1")
    assert job.finish(60) == 1
    assert "the optimizer's state did not follow into generation 2" in job.output()
    assert re.search(why, job.output()), job.output()
    assert "start again from the last checkpoint, and with --defer nothing" in job.output()
    assert {row["generation"] for row in losses(out).values()} == {1}, "a step was made with half a state"
    assert any(row["generation"] == 2 for row in read_lines(out / "late.jsonl")), "the new world did compute"
    damages = read_lines(out / "damages.jsonl")
    assert [(row["generation"], row["what"]) for row in damages] == [(2, what) for what in probe.get("damage", [])]
    for row in damages:
        assert any(f"{key}: the slice at" in job.output() for key in row["keys"]), row
    assert job.kinds().count("active") == 1, "there is no way back to the old world"


@pytest.mark.parametrize("late", [{"w0": "fail"}, {"w1": "kill"}], ids=["a receiver fails", "the leaver dies"])
def test_a_job_that_may_restart_goes_on_from_the_last_whole_state_and_no_mix_is_trained(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], undisturbed: Callable[..., Path],
    tmp_path: Path, late: dict[str, str],
) -> None:
    """Every step that was made, also twice, is that of a run to which nothing happened."""
    out, saved = tmp_path / "out", tmp_path / "saved"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, *BF16, steps=BF16_STEPS), nproc=2, standbys=1,
        options=(*DEFER, MESSAGES, f"--checkpoint-dir={saved}", "--checkpoint-every=2", "--max-restarts=1"),
        probe={"steps_per_change": 3, "late": late, "no_hooks": True},
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
