"""Fixtures for tests that start whole jobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .launch import ROOT, Launched, environment

PROBE = str(ROOT / "tests" / "e2e" / "probe.py")
TRAIN = str(ROOT / "examples" / "gpt" / "train.py")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small corpus of real text."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "gpt" / "prepare.py"), "--output", str(prefix), "--max-bytes", "3000000"],
        check=True, env=environment(),
    )
    return prefix


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start jobs; whatever is left of them at the end fails the test."""
    started: list[Launched] = []

    def start(*script: str, name: str = "job", **options: object) -> Launched:
        folder = tmp_path / name
        folder.mkdir()
        started.append(Launched(folder, *script, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    left = [process for job in started for process in job.close()]
    assert not left, f"left behind: {left}"


BF16 = ("--hidden-dropout=0.1", "--attention-dropout=0.1", "--bf16")
BF16_STEPS = 24


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[..., Path]:
    """What a run of two workers writes if nothing happens to it, by its arguments; the same ones run once."""
    known: dict[tuple[object, ...], Path] = {}

    def folder(*more: str, steps: int) -> Path:
        key = (*more, steps)
        if key not in known:
            out = tmp_path_factory.mktemp("undisturbed")
            job = Launched(out, PROBE, str(out), *arguments_for(corpus)(out, *more, steps=steps), nproc=2)
            try:
                assert job.finish() == 0, job.output()
            finally:
                left = job.close()
            assert not left
            known[key] = out
        return known[key]

    return folder


@pytest.fixture
def train_arguments(corpus: Path) -> Callable[..., list[str]]:
    """Arguments of a tiny run of the example."""
    return arguments_for(corpus)


def arguments_for(corpus: Path) -> Callable[..., list[str]]:
    def arguments(out: Path, *more: str, steps: int = 100) -> list[str]:
        return [
            f"--data-path={corpus}", f"--train-steps={steps}", "--num-layers=4", "--hidden-size=64",
            "--num-attention-heads=4", "--num-query-groups=2", "--ffn-hidden-size=128", "--seq-length=32",
            "--global-batch-size=8", "--micro-batch-size=2", "--lr-warmup-samples=80", "--log-interval=0",
            f"--loss-log={out / 'loss.jsonl'}", f"--sample-log={out / 'samples'}", *more,
        ]

    return arguments
