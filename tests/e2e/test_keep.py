"""Changes of world that give the old state back layer by layer, instead of keeping it until the commit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import BF16, BF16_STEPS, PROBE
from .launch import Launched, read_lines
from .test_resize import assert_bit_identical, losses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

MIB = 1 << 20
STAGING = 16 * MIB
SLACK = 16 * MIB
AUTO = ("--keep=auto", "--staging=16MiB")
NEVER = ("--keep=never", "--staging=16MiB")
RESIZES = [("--layout=tp=2",), ("--workers=1",), ("--workers=2", "--layout=pp=2")]
"""moving, shrinking and growing"""


def test_no_second_copy_of_the_state_ever_exists(
    launch: Callable[..., Launched], corpus: Path, tmp_path: Path
) -> None:
    """33.8 M parameters, 405 MB of state; what the system saw at most stays within the bound, and the loss the same.

    And ``liverun plan`` says to the byte what the first of the changes moves.
    """
    out = tmp_path / "out"
    out.mkdir()
    shape = [
        "--num-layers=8", "--hidden-size=512", "--num-attention-heads=8", "--num-query-groups=8",
        "--ffn-hidden-size=2048", "--seq-length=16",
    ]  # fmt: skip
    job = launch(
        PROBE, str(out), f"--data-path={corpus}", "--train-steps=8", *shape, "--global-batch-size=2", "--micro-batch-size=1", "--log-interval=0", f"--loss-log={out / 'loss.jsonl'}",
        "--pipeline-model-parallel-size=2", nproc=2, options=NEVER,
        probe={"memory": True, "evaluate": True, "steps_per_change": 1},
    )
    job.until_trains()
    for words in RESIZES:
        job.must_resize(*words)
    said = [event for event in job.events() if event["kind"] == "active"]
    flags = ["--swiglu", "--disable-bias-linear", "--normalization=RMSNorm", "--position-embedding-type=rope"]
    planned = job.cli(
        "plan", "--from=pp=2", "--to=tp=2", "--json", "--", *shape, *flags, "--padded-vocab-size=384",
        "--use-distributed-optimizer",
    )
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert [(row["bytes_moved"], row["bytes_local"]) for row in said[:1]] == [(plan["bytes_moved"], plan["bytes_local"])]
    assert job.finish() == 0, job.output()
    records = read_lines(out / "changes.jsonl")
    assert sum(row["memory"]["state"] for row in records if (row["when"], row["generation"]) == ("after", 3)) > 400e6
    num_checked = 0
    for generation, event in enumerate(said, 1):
        before = [row for row in records if (row["when"], row["generation"]) == ("before", generation)]
        after = [row for row in records if (row["when"], row["generation"]) == ("after", generation + 1)]
        assert after[0]["eval_loss"] == pytest.approx(before[0]["eval_loss"], rel=1e-6)
        layer = max(row["memory"]["layer"] for row in (*before, *after))
        most = 0
        for row in after:
            was = next((old["memory"] for old in before if old["pid"] == row["pid"]), None)
            if was is None:
                continue  # a joiner: its share is in the change's peak_extra_bytes
            num_checked += 1
            bare = was["resident_before"] - was["state"] - was["gradients"]
            states = max(was["state"], row["memory"]["state"])
            # before, gradients are there too, and make more room than staging and a layer need
            bound = max(was["resident_before"], bare + states + STAGING + layer) + SLACK
            assert row["memory"]["most_resident"] <= bound, (generation, was, row)
            most = max(most, row["memory"]["most_resident"] - was["resident_before"])
        assert event["kept"] is False
        assert most <= event["peak_extra_bytes"] + 8 * MIB
        joining = max((row["memory"]["state"] for row in after if row["pid"] not in {old["pid"] for old in before}), default=0)
        grown = max(row["memory"]["state"] for row in after) - min(row["memory"]["state"] for row in before)
        assert event["peak_extra_bytes"] <= max(joining, grown, 0) + STAGING + layer + SLACK
    assert num_checked == 4


def test_a_failure_before_anything_is_given_back_changes_nothing_and_nor_does_a_change_that_does(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], undisturbed: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Where memory is short and nobody has said what to do; ``liverun status`` says what was done."""
    out = tmp_path / "out"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, *BF16, steps=BF16_STEPS), nproc=2, standbys=2,
        options=AUTO, probe={"steps_per_change": 12, "fail_stream": 1, "scarce_memory": True},
    )
    job.until_trains()
    job.until_standbys(2)
    asked = job.resize("--workers=4", "--layout=tp=2")
    assert asked.returncode == 1
    assert "the network card fell out" in asked.stderr
    job.must_resize("--replace=1")
    active = next(event for event in job.events() if event["kind"] == "active")
    assert active["kept"] is False
    assert job.status()["last_resize"]["kept"] is False
    said = job.cli("status", job.job).stdout
    assert "old state given back layer by layer, checked in 0." in " ".join(said.split())
    assert active["verify"]["mode"] == "full"
    assert job.finish() == 0, job.output()
    assert_bit_identical(undisturbed(*BF16, steps=BF16_STEPS), out)
    assert {row["generation"] for row in losses(out).values()} == {1, 3}


def test_a_failure_after_layers_are_given_back_ends_the_job_and_says_so(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, steps=1000), nproc=2, options=NEVER, probe={"fail_release": [1, 9]}
    )
    job.until_trains()
    asked = job.resize("--layout=tp=2", timeout_s=30)
    assert asked.returncode == 1
    why = "generation 2 failed when layers of the old world had been given back: "
    assert why in asked.stderr
    assert job.finish(60) == 1
    assert why in job.output()
    assert "w1: OSError: the network card fell out" in job.output()
    assert "start again from the last checkpoint, and if memory allows with --keep always" in job.output()
    assert {row["generation"] for row in losses(out).values()} == {1}
    assert "active" not in job.kinds()
