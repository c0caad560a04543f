"""A conversion: taken up where it was killed, never with the numbers of another source, never over what is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from resharding.checkpoint import folder
from resharding.checkpoint.convert import convert
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.megatron_write import read_tensor
from resharding.checkpoint.opened import Checkpoint
from resharding.checkpoint.universal import UniversalSource

NUM_LAYERS = 12

KILLED = """
import os, signal, sys
from resharding.checkpoint import convert
convert.SYNC_BYTES, noted, real = 1, [], convert._note
def note(*args):
    real(*args)
    noted.append(1)
    if len(noted) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
convert._note = note
from launcher.cli import main
main()
"""
"""the command, killed once five tensors are done"""


def universal(path: Path, value: int) -> Path:
    """Write a universal folder that ``value`` tells from others of the same shapes."""
    for layer in range(NUM_LAYERS):
        parameter = path / "zero" / f"layers.{layer}.weight"
        parameter.mkdir(parents=True)
        torch.save({"param": torch.full((3, 4), float(100 * value + layer))}, parameter / "fp32.pt")
    return path


def opened(path: Path) -> UniversalSource:
    return UniversalSource(path, model={}, step=7, consumed_samples=70)


def values(path: Path) -> list[float]:
    with Checkpoint.open(path) as checkpoint:
        assert [checkpoint.damage(entry) for entry in checkpoint.index.entries] == [None] * NUM_LAYERS
        return [
            float(read_tensor(checkpoint, tensor)[0, 0])
            for tensor in sorted(checkpoint.index.whole, key=lambda tensor: int(tensor.key.split(".")[1]))
        ]


def interrupted(
    source: UniversalSource, root: Path, patch: pytest.MonkeyPatch, num_tensors: int = NUM_LAYERS // 2
) -> None:
    """Convert so many tensors, and one more."""
    patch.setattr("resharding.checkpoint.convert.SYNC_BYTES", 1)
    left = iter(range(num_tensors))

    def progress(_nbytes: int) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, root, progress=progress)


@pytest.mark.parametrize("how", ["another folder", "changed in place"])
def test_what_one_source_had_is_never_taken_for_anothers(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, first = tmp_path / "root", universal(tmp_path / "a", 1)
    interrupted(opened(first), root, monkeypatch)
    if how == "another folder":
        second = universal(tmp_path / "b", 2)
    else:
        second = first
        parameter = second / "zero" / "layers.0.weight" / "fp32.pt"
        torch.save({"param": torch.full((3, 4), 200.0)}, parameter)
        os.utime(parameter, ns=(1, 1))
    done = convert(opened(second), root)
    assert done.num_resumed == 0
    wanted = [200.0 + layer for layer in range(NUM_LAYERS)]
    assert values(done.path) == (wanted if how == "another folder" else [200.0, *range(101, 100 + NUM_LAYERS)])


def test_a_conversion_that_was_killed_goes_on_and_gives_the_same_bytes(tmp_path: Path) -> None:
    source = universal(tmp_path / "a", 1)
    words = ["checkpoint", "convert", str(source), "--step", "7", "--consumed-samples", "70"]

    def run(code: str, root: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *words, str(tmp_path / root)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    killed = run(KILLED, "root")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert folder.candidates(tmp_path / "root") == []
    resumed = run("from launcher.cli import main\nmain()", "root")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.endswith("step 7; 5 tensors were done before\n")
    whole = convert(opened(source), tmp_path / "whole").path
    names = sorted(file.name for file in whole.iterdir())
    assert sorted(file.name for file in (tmp_path / "root" / whole.name).iterdir()) == names
    for name in names:
        assert (whole / name).read_bytes() == (tmp_path / "root" / whole.name / name).read_bytes(), name


def test_a_line_of_the_journal_that_was_being_written_spoils_none_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(universal(tmp_path / "a", 1))
    for count in (2, 5):
        interrupted(source, tmp_path / "root", monkeypatch, count)
        (journal,) = (tmp_path / "root").glob(".step-*.tmp/.done.jsonl")
        with journal.open("a") as file:
            file.write('["weight/layers.')
    done = convert(source, tmp_path / "root")
    assert done.num_resumed == 6
    assert values(done.path) == [100.0 + layer for layer in range(NUM_LAYERS)]


def test_a_job_that_begins_leaves_conversions_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(universal(tmp_path / "a", 1))
    interrupted(source, tmp_path / "root", monkeypatch)
    left = tmp_path / "root" / folder.temporary_name(9, "0123abcd")
    left.mkdir()
    folder.clear_unfinished(tmp_path / "root")
    assert not left.exists()
    assert convert(source, tmp_path / "root").num_resumed == NUM_LAYERS // 2 + 1


def test_a_step_that_is_there_is_not_converted_over_and_a_running_conversion_not_joined(tmp_path: Path) -> None:
    one, other = opened(universal(tmp_path / "a", 1)), opened(universal(tmp_path / "b", 2))

    def meanwhile(_nbytes: int) -> None:
        with pytest.raises(BadCheckpoint, match=r"another process converts into .*; wait until it has ended"):
            convert(one, tmp_path / "root")

    path = convert(one, tmp_path / "root", progress=meanwhile).path
    with pytest.raises(BadCheckpoint, match=r"step-00000007 exists; name another folder, or remove it"):
        convert(other, tmp_path / "root")
    assert values(path) == [100.0 + layer for layer in range(NUM_LAYERS)]
