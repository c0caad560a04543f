"""What a power cut may take: whatever was not synced, in any order. And a disk that cannot sync."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from test_checkpoint_damage import holds, save

from resharding.checkpoint import folder


def state_of(path: str | Path) -> tuple[int, int, int]:
    """Return what changes whenever a file, or which names are in a folder, does."""
    about = Path(path).stat()
    return about.st_ino, about.st_size, about.st_mtime_ns


def test_everything_is_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[tuple[int, int, int]] = set()
    renamed: list[str] = []
    lock = threading.Lock()
    fsync, rename = os.fsync, os.rename

    def syncing(file: int) -> None:
        with lock:
            synced.add(state_of(f"/proc/self/fd/{file}"))
        fsync(file)

    def renaming(source, target, **kwargs) -> None:
        inside = [Path(source), *Path(source).iterdir()]
        assert {"index.json", "weight-00001.safetensors"} <= {path.name for path in inside}
        assert [path.name for path in inside if state_of(path) not in synced] == []
        renamed.append(str(target))
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "rename", renaming)
    path = save(tmp_path, 1)
    assert renamed == [str(path)]
    assert state_of(tmp_path) in synced  # where its name is, and latest's
    assert state_of(tmp_path / "latest") in synced


@pytest.mark.parametrize("name", ["weight-00001.safetensors", "index.json", "step-00000002.tmp"])
def test_a_file_that_cannot_be_synced_fails_the_save_and_the_one_before_loads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data files are synced in a thread beside the writing: what goes wrong there is no less said."""
    save(tmp_path, 1)
    fsync = os.fsync

    def failing(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        if name in path.name or (name.endswith(".tmp") and path.suffix == ".tmp"):
            raise OSError(5, "Input/output error")
        fsync(file)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert [step for step, _ in folder.complete_in(tmp_path)] == [1]
    assert folder.resolve(tmp_path).name == "step-00000001"
    assert holds(tmp_path, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "liverun-checkpoint-sync"]
