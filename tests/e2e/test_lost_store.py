"""The c10d store of a running Megatron world ends: the training goes on, and a later change finds a store of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .conftest import TRAIN
from .launch import Launched, read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]


def stores(job: Launched) -> list[int]:
    """Pids of the job's processes that listen for c10d clients; ranks of gloo listen too, but as workers."""
    found = []
    for child in psutil.Process(job.process.pid).children(recursive=True):
        listens = any(c.status == psutil.CONN_LISTEN for c in child.net_connections("tcp"))
        if listens and "LIVERUN_WORKER" not in child.environ() and not runs_as_worker(job, child.pid):
            found.append(child.pid)
    return found


def runs_as_worker(job: Launched, pid: int) -> bool:
    return any(worker["pid"] == pid for node in job.status()["nodes"] for worker in node["workers"])


def test_a_megatron_world_trains_on_without_its_store_and_changes_later(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    job = launch(TRAIN, *train_arguments(out, steps=1_000_000), nproc=2, standbys=1)
    job.until_trains()
    job.until_standbys(1)

    def step() -> int:
        return len(read_lines(out / "loss.jsonl"))

    (store,) = stores(job)
    os.kill(store, signal.SIGKILL)
    job.until("the loss to be seen", lambda: "store_lost" in job.kinds())
    for words in (("--layout=tp=2",), ("--replace=1",), ("--workers=1",)):
        now = step()
        job.until("three more steps", lambda now=now: step() >= now + 3)
        before = {worker["pid"] for node in job.status()["nodes"] for worker in node["workers"] if worker["rank"] == 0}
        job.must_resize(*words)
        after = {worker["pid"] for node in job.status()["nodes"] for worker in node["workers"] if worker["rank"] == 0}
        assert before == after
    assert job.kinds().count("active") == 3
    assert job.kinds().count("store_lost") == 1
    assert job.cli("stop", job.job).returncode == 0
    assert job.finish() == 0, job.output()
