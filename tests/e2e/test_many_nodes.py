"""A real GPT on several hosts: nodes come and leave while it trains, over real links."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def agent(host: Host, at: Host, folder: Path, script: list[str], *options: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [
        *host.prefix, *LIVERUN, "run", "--nnodes=1:2", f"--rdzv-endpoint={at.address}:29400", "--job=far",
        "--rdzv-conf=last_call_timeout=0", f"--run-dir={folder / 'run'}", "--shutdown-timeout=30", *options, *script,
    ]
    # with the probe, steps are slow until both changes have been seen, however long a node takes to start
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


def named(kind: str, folder: Path) -> list[dict[str, Any]]:
    return [event for event in events(folder) if event["kind"] == kind]


def end(agents: list[subprocess.Popen[bytes]]) -> None:
    for process in agents:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_node_joins_and_leaves_a_training_on_other_hosts_without_a_trace_in_the_losses(
    two: list[Host], tmp_path: Path, launch: Callable[..., Launched], train_arguments: Callable[..., list[str]]
) -> None:
    out, a, b = (tmp_path / name for name in ("out", "a", "b"))
    out.mkdir()
    script = [PROBE, str(out), *train_arguments(out, steps=STEPS)]
    agents = [agent(two[0], two[0], a, script)]
    try:
        until("the first world", lambda: named("world", a), a)
        agents.append(agent(two[1], two[0], b, script))
        until("two nodes", lambda: named("active", a), a)
        rows = read_lines(out / "loss.jsonl")
        until("steps of both", lambda: len(read_lines(out / "loss.jsonl")) > len(rows) + 5, a)
        agents[1].send_signal(signal.SIGTERM)
        assert agents[1].wait(60) == 128 + signal.SIGTERM, (b / "liverun.log").read_text()
        assert agents[0].wait(120) == 0, (a / "liverun.log").read_text()
    finally:
        end(agents)
    rows = read_lines(out / "loss.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert {row["world_size"] for row in rows} == {1, 2}
    assert rows[-1]["world_size"] == 1
    folder = tmp_path / "static"
    folder.mkdir()
    static = launch(TRAIN, *train_arguments(folder, steps=STEPS), name="static-job", nproc=1)
    assert static.finish() == 0, static.output()
    for row, other in zip(rows, read_lines(folder / "loss.jsonl"), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4), json.dumps(row)


def test_a_host_that_is_lost_costs_the_steps_since_the_checkpoint_and_no_process_elsewhere(
    two: list[Host], tmp_path: Path, train_arguments: Callable[..., list[str]]
) -> None:
    """The survivor goes on from the newest checkpoint, of tp=2, as a smaller world of tp=1, in the same process."""
    out, a, b = (tmp_path / name for name in ("out", "a", "b"))
    out.mkdir()
    script = [TRAIN, *train_arguments(out, steps=4000)]  # the probe replaces what the package exports: no process stays
    options = ("--max-restarts=1", f"--checkpoint-dir={tmp_path / 'saved'}", "--checkpoint-every=20")

    def trained(step: int, size: int) -> bool:
        return any((row["step"], row["world_size"]) == (step, size) for row in read_lines(out / "loss.jsonl"))

    def saved() -> list[int]:
        """Steps of checkpoints that the world of both has taken."""
        return [event["step"] for event in named("checkpoint", a) if event["generation"] == 3]

    agents = [agent(two[0], two[0], a, script, *options)]
    try:
        until("the first world", lambda: named("world", a), a)
        agents.append(agent(two[1], two[0], b, script, *options))
        until("two nodes", lambda: named("active", a), a)
        words = [*two[0].prefix, *LIVERUN, "resize", "far", "--layout=tp=2", f"--run-dir={a / 'run'}"]
        resized = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment())
        assert resized.returncode == 0, resized.stderr
        until("a checkpoint of both", saved, a)
        until("steps after it", lambda: trained(saved()[-1] + 5, 2), a)
        agents[1].kill()
        until("another start", lambda: named("restarting", a), a)
        # gloo may not notice that a peer is gone; whoever hangs there is replaced, and that is said
        is_held = "has not left its script in" in (a / "liverun.log").read_text()
        assert list(named("restarting", a)[0]["kept"]) == ["n0"] or is_held, (a / "liverun.log").read_text()
        before = max(row["step"] for row in read_lines(out / "loss.jsonl") if row["world_size"] == 2)
        until("as many steps again", lambda: trained(before, 1), a)
        agents[0].send_signal(signal.SIGTERM)
        assert agents[0].wait(60) == 128 + signal.SIGTERM, (a / "liverun.log").read_text()
    finally:
        end(agents)
    rows = read_lines(out / "loss.jsonl")
    again = next(n for n, row in enumerate(rows[1:], 1) if row["step"] <= rows[n - 1]["step"])
    lost = {row["step"]: row["loss"] for row in rows[:again]}
    assert rows[again]["step"] in range(saved()[-1], before, 20)  # the last may be whole, and the word of it lost
    assert [row["step"] for row in rows[:again]] == list(range(again))
    assert {(row["world_size"], row["layout"]) for row in rows[again:]} == {(1, "tp=1")}
    assert (rows[again - 1]["world_size"], rows[again - 1]["layout"]) == (2, "tp=2")
    twice = [row for row in rows[again:] if row["step"] in lost]
    assert [row["step"] for row in twice] == list(range(rows[again]["step"], before + 1))
    for row in twice:
        assert row["loss"] == pytest.approx(lost[row["step"]], rel=1e-4), json.dumps(row)
