"""A Megatron job of one node that gets a notice: it stops at a boundary, and its checkpoint is of that boundary."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import TRAIN
from .launch import Launched, read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder, where this is allowed on a disk of 16 MiB of its own."""
    folder = tmp_path / "saved"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=False, capture_output=True)
    yield folder
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def test_no_step_before_a_notice_is_lost(
    disk: Path, launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Known complaint 19: an advance warning is ignored, and a whole interval of work is lost.

    Before that, the disk for checkpoints is full for a while, which costs the job nothing but that checkpoint.
    """
    notice, saved = tmp_path / "notice", disk
    options = (f"--notice-file={notice}", f"--checkpoint-dir={saved}")
    job = launch(TRAIN, *train_arguments(tmp_path, steps=100_000), options=options)
    job.until("step 3", lambda: any(row["step"] >= 3 for row in read_lines(tmp_path / "loss.jsonl")))
    if saved.is_mount():
        a_full_disk_is_said_and_training_goes_on(job, saved, tmp_path / "loss.jsonl")
    notice.write_text("60\n")
    assert job.finish() == 75, job.output()
    done = 1 + max(row["step"] for row in read_lines(tmp_path / "loss.jsonl"))
    index = json.loads((saved / f"step-{done:08}" / "index.json").read_text())["index"]
    assert index["meta"]["consumed_samples"] == 8 * done
    assert job.cli("checkpoint", "verify", str(saved)).returncode == 0
    assert [event["step"] for event in job.events() if event["kind"] == "checkpoint"] == [done]
    assert (saved / "latest").read_text().strip() == f"step-{done:08}"


def a_full_disk_is_said_and_training_goes_on(job: Launched, disk: Path, losses: Path) -> None:
    room = os.statvfs(disk)
    (disk / "filler").write_bytes(b"x" * (room.f_bavail * room.f_bsize - 2**20))
    done = job.cli("checkpoint", "save", job.job)
    assert (done.returncode, "No space left" in done.stderr) == (1, True), done.stderr
    failed = [event for event in job.events() if event["kind"] == "checkpoint_failed"]
    assert failed
    said = ("No space left", "rank 0 gave it up")
    assert all(any(words in event["reason"] for words in said) for event in failed), failed
    assert len({event["worker"] for event in failed}) == len(failed)  # once by each rank that could not write
    step = max(row["step"] for row in read_lines(losses))
    job.until("steps after that", lambda: any(row["step"] >= step + 3 for row in read_lines(losses)))
    assert not list(disk.glob("step-*"))
    (disk / "filler").unlink()
