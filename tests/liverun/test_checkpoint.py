"""What the launcher tells a worker of checkpoints, and how parameter groups of two layouts meet."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from liverun import checkpoint, messages
from liverun.checkpoint import Saver, Settings
from liverun.switch import Position


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
    saver.saved_step = 5  # it was loaded, or has just been taken
    assert [step for step in range(12) if saver.is_due(step)] == [10]
    assert not Saver(Settings(folder=tmp_path)).is_due(5)


def test_a_save_goes_on_beside_the_training_and_the_next_one_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second copy is made only once the first one is written: there is one at a time."""
    happened: list[str] = []
    may_write = {step: threading.Event() for step in (1, 2, 3)}
    begun = {step: threading.Event() for step in (1, 2, 3)}

    def write_share(temporary: Path, _design: object, _rank: int, _parts: object, small: dict, **_options: object) -> None:
        begun[small["step"]].set()
        assert may_write[small["step"]].wait(30)
        happened.append(f"written {small['step']}")

    monkeypatch.setattr(checkpoint.writer, "write_share", write_share)
    monkeypatch.setattr(checkpoint.writer, "snapshot", lambda *_: happened.append("copied") or [])
    monkeypatch.setattr(checkpoint.writer, "live_parts", lambda *_: happened.append("looked at") or [])
    monkeypatch.setattr(checkpoint.rng, "capture", dict)
    monkeypatch.setattr(checkpoint, "described", lambda _: {})
    for name in ("settle", "materialize_optimizer_state", "common_state", "group_settings"):
        monkeypatch.setattr(checkpoint.megatron, name, lambda _: {})
    training = SimpleNamespace(model=[], optimizer=None, scheduler=None, extra={})
    standing = SimpleNamespace(training=training, world=SimpleNamespace(rank=1))
    ground = SimpleNamespace(
        standing=standing, streams={}, share=None, holding=None, design=None, nonce="n", one_disk=True
    )
    saver = Saver(Settings(folder=tmp_path, every=1))
    monkeypatch.setattr(saver, "_known", lambda: ground)
    saver.save(Position(step=1, consumed_samples=8))  # comes back though nothing is written yet
    assert begun[1].wait(30)
    assert happened == ["copied"]
    second = threading.Thread(target=saver.save, args=(Position(step=2, consumed_samples=16),))
    waiting = threading.Event()
    wait = saver.wait
    monkeypatch.setattr(saver, "wait", lambda: (waiting.set(), wait()))
    second.start()
    assert waiting.wait(30)
    assert happened == ["copied"]
    may_write[1].set()
    second.join(30)
    assert not second.is_alive()
    assert happened == ["copied", "written 1", "copied"]
    may_write[2].set()
    saver.end()
    assert happened == ["copied", "written 1", "copied", "written 2"]
    may_write[3].set()
    saver.save(Position(step=3, consumed_samples=24), is_last=True)  # nothing is copied, and it is waited for
    assert happened[4:] == ["looked at", "written 3"]


def test_a_folder_that_cannot_be_listed_fails_the_save_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else whoever asked for the save would wait for a word that nobody says."""
    told: list[object] = []

    def refuse(root: Path) -> None:
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr(checkpoint.folders, "complete_in", refuse)
    ground = SimpleNamespace(standing=SimpleNamespace(world=SimpleNamespace(rank=0)), nonce="n", design=None)
    saver = Saver(Settings(folder=tmp_path), tell=told.append)
    saver._write(ground, 7, [], {}, request=3, pause_s=0.5)  # type: ignore[arg-type]
    (said,) = told
    assert isinstance(said, messages.Saved)
    assert (said.request, said.step, said.ok) == (3, 7, False)
    assert "Permission denied" in said.reason
    assert "checkpoint of step 7 failed: [Errno 13] Permission denied" in capsys.readouterr().err
