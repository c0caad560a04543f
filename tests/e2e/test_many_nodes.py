"""A real GPT on several hosts: nodes come and leave while it trains, over real links."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import PROBE, TRAIN
from .launch import LIVERUN, Launched, environment, read_lines

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hosts import Host, hosts, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]  # fmt: skip
STEPS = 120


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def agent(host: Host, at: Host, folder: Path, script: list[str]) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [
        *host.prefix, *LIVERUN, "run", "--nnodes=1:2", f"--rdzv-endpoint={at.address}:29400", "--job=far",
        "--rdzv-conf=last_call_timeout=0", f"--run-dir={folder / 'run'}", "--shutdown-timeout=30", *script,
    ]
    # steps are slow until both changes have been seen, however long a node takes to start
    env = environment(HOME=str(folder.parent), PROBE=json.dumps({"steps_per_change": STEPS - 20}))
    with (folder / "liverun.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder)


def events(folder: Path) -> list[dict[str, object]]:
    return [event for path in folder.glob("run/*/events.jsonl") for event in read_lines(path)]


def until(what: str, true: Callable[[], object], folder: Path, deadline_s: float = 120.0) -> None:
    end, log = time.monotonic() + deadline_s, folder / "liverun.log"
    while not true():
        kinds = [event["kind"] for event in events(folder)]
        assert "finished" not in kinds, f"the job ended before {what}: {kinds}\n{log.read_text()[-5000:]}"
        assert time.monotonic() < end, f"{what} did not happen:\n{log.read_text()[-5000:]}"
        time.sleep(0.05)


def test_a_node_joins_and_leaves_a_training_on_other_hosts_without_a_trace_in_the_losses(
    two: list[Host], tmp_path: Path, launch: Callable[..., Launched], train_arguments: Callable[..., list[str]]
) -> None:
    out = {name: tmp_path / name for name in ("far", "static")}
    for folder in out.values():
        folder.mkdir()
    script = [PROBE, str(out["far"]), *train_arguments(out["far"], steps=STEPS)]
    first = agent(two[0], two[0], tmp_path / "a", script)
    second = None
    try:
        until("the first world", lambda: any(e["kind"] == "world" for e in events(tmp_path / "a")), tmp_path / "a")
        second = agent(two[1], two[0], tmp_path / "b", script)
        until("two nodes", lambda: sum(e["kind"] == "active" for e in events(tmp_path / "a")) == 1, tmp_path / "a")
        rows = read_lines(out["far"] / "loss.jsonl")
        until("steps of both", lambda: len(read_lines(out["far"] / "loss.jsonl")) > len(rows) + 5, tmp_path / "a")
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 128 + signal.SIGTERM, (tmp_path / "b" / "liverun.log").read_text()
        assert first.wait(120) == 0, (tmp_path / "a" / "liverun.log").read_text()
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    static = launch(TRAIN, *train_arguments(out["static"], steps=STEPS), name="static-job", nproc=1)
    assert static.finish() == 0, static.output()
    rows = read_lines(out["far"] / "loss.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert {row["world_size"] for row in rows} == {1, 2}
    assert rows[-1]["world_size"] == 1
    for row, other in zip(rows, read_lines(out["static"] / "loss.jsonl"), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4), json.dumps(row)
