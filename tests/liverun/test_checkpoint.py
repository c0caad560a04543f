"""What the launcher tells a worker of checkpoints, and how parameter groups of two layouts meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from liverun.checkpoint import Saver, Settings


def test_settings_come_from_the_environment_and_nonsense_is_named(tmp_path: Path) -> None:
    assert Settings.of({"LIVERUN_CHECKPOINT_EVERY": "5"}) is None
    environ = {"LIVERUN_CHECKPOINT_DIR": str(tmp_path), "LIVERUN_CHECKPOINT_EVERY": "5", "LIVERUN_KEEP_LAST": "2"}
    assert Settings.of(environ) == Settings(folder=tmp_path, every=5, keep_last=2)
    for text in ("0", "-1", "many"):
        with pytest.raises(ValueError, match=f"LIVERUN_KEEP_LAST={text} is not a whole number of at least 1"):
            Settings.of({**environ, "LIVERUN_KEEP_LAST": text})


def test_a_checkpoint_is_due_once_and_never_before_the_first_step(tmp_path: Path) -> None:
    saver = Saver(Settings(folder=tmp_path, every=5))
    assert [step for step in range(12) if saver.is_due(step)] == [5, 10]
    saver._saved_step = 5  # it was loaded, or has just been taken
    assert [step for step in range(12) if saver.is_due(step)] == [10]
    assert not Saver(Settings(folder=tmp_path)).is_due(5)
