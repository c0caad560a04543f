"""A Megatron job of one node that gets a notice: it stops at a boundary, and its checkpoint is of that boundary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import TRAIN
from .launch import Launched, read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]


def test_no_step_before_a_notice_is_lost(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Known complaint 19: an advance warning is ignored, and a whole interval of work is lost."""
    notice, saved = tmp_path / "notice", tmp_path / "saved"
    options = (f"--notice-file={notice}", f"--checkpoint-dir={saved}")
    job = launch(TRAIN, *train_arguments(tmp_path, steps=100_000), options=options)
    job.until("step 3", lambda: any(row["step"] >= 3 for row in read_lines(tmp_path / "loss.jsonl")))
    notice.write_text("60\n")
    assert job.finish() == 75, job.output()
    done = 1 + max(row["step"] for row in read_lines(tmp_path / "loss.jsonl"))
    index = json.loads((saved / f"step-{done:08}" / "index.json").read_text())["index"]
    assert index["meta"]["consumed_samples"] == 8 * done
    assert job.cli("checkpoint", "verify", str(saved)).returncode == 0
    assert [event["step"] for event in job.events() if event["kind"] == "checkpoint"] == [done]
    assert (saved / "latest").read_text().strip() == f"step-{done:08}"
