"""Checkpoints of a live job: taken while it trains, and what comes back from them, after a crash and elsewhere."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .conftest import TRAIN
from .launch import Launched, read_lines
from .test_resize import losses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
STEPS = 40


def test_a_run_that_comes_back_from_a_checkpoint_goes_on_as_if_nothing_had_been(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Without an interruption; from the middle on, under another layout; and with a killed rank and a restart."""
    saved, outs = tmp_path / "saved", {name: tmp_path / f"out-{name}" for name in ("whole", "other", "killed")}
    for out in outs.values():
        out.mkdir()

    def run(name: str, folder: Path, *options: str) -> Launched:
        words = (f"--checkpoint-dir={folder}", *options)
        more, steps = (["--hidden-dropout=0.1", "--bf16", "--untie-embeddings-and-output-weights"], 2000) if name == "killed" else ([], STEPS)
        return launch(TRAIN, *train_arguments(outs[name], *more, steps=steps), name=name, options=words)

    whole = run("whole", saved, "--checkpoint-every=10", "--keep-last=3")
    assert whole.finish() == 0, whole.output()
    assert sorted(path.name for path in saved.iterdir()) == [
        "latest", "step-00000020", "step-00000030", "step-00000040",
    ]  # fmt: skip
    truth = losses(outs["whole"])
    events = [event for event in whole.events() if event["kind"] == "checkpoint"]
    assert [event["step"] for event in events] == [10, 20, 30, 40]
    shutil.copytree(saved / "step-00000040", tmp_path / "end" / "step-00000040")

    # from step 20 on, split otherwise; the newest is damaged, and the one before it is taken
    shutil.rmtree(saved / "step-00000040")
    file = saved / "step-00000030" / "weight-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    other = run("other", saved, "--checkpoint-every=10", "--layout=tp=2")
    assert other.finish() == 0, other.output()
    assert "cannot resume from" in other.output()
    assert "weight-00001.safetensors is cut short" in other.output()
    rows = read_lines(outs["other"] / "loss.jsonl")
    assert [row["step"] for row in rows] == list(range(20, STEPS))
    for row in rows:
        assert math.isclose(row["loss"], truth[row["step"]]["loss"], rel_tol=2e-5), row
    index = json.loads((saved / "step-00000040" / "index.json").read_text())["index"]
    assert index["meta"]["origin"]["layout"]["tp"] == 2
    assert index["meta"]["consumed_samples"] == 8 * STEPS
    compared = other.cli("checkpoint", "diff", str(tmp_path / "end"), str(saved), "--json")
    assert compared.returncode == 1  # two layouts sum up in another order
    gaps = [row["max_abs"] for row in json.loads(compared.stdout)["tensors"] if row["what"] == "values"]
    assert gaps
    assert max(gap for gap in gaps if gap < 1) < 1e-3

    # one is asked for, then a rank is killed: from there on all is the same bit for bit, random streams included
    killed = run("killed", tmp_path / "own", "--max-restarts=4")
    log = outs["killed"] / "loss.jsonl"
    killed.until("step 3", lambda: any(row["step"] >= 3 for row in read_lines(log)))
    took = killed.cli("checkpoint", "save", killed.job, "--json")
    assert took.returncode == 0, took.stderr
    step = json.loads(took.stdout)["step"]
    assert killed.status()["last_checkpoint"]["step"] == step
    killed.until("five steps more", lambda: any(row["step"] >= step + 5 for row in read_lines(log)))
    # one process stays over the first restart, the other over the second; more only if neither did
    num_kept = 0
    for victim, times in ((1, 2), (0, 3), (1, 4), (0, 5)):
        if times > 3 and num_kept:
            break
        before = killed.ranks()
        psutil.Process(before[victim]).kill()
        killed.until("those again", lambda: sum(row["step"] == step + 5 for row in read_lines(log)) == times)  # noqa: B023
        after = killed.ranks()
        # gloo may not notice that a peer is gone; whoever hangs there is replaced, and that is said
        is_held = "has not left its script in" in killed.output()
        assert (after[1 - victim] == before[1 - victim] or is_held, after[victim] == before[victim]) == (True, False)
        num_kept += after[1 - victim] == before[1 - victim]
        rows = read_lines(log)
        often = Counter(row["step"] for row in rows)
        assert min(number for number in often if often[number] == times) == step
        assert len({(row["step"], row["loss"]) for row in rows}) == len({row["step"] for row in rows})
        # what a restart keeps is what has trained, as far as the launcher knows
        killed.until("a step it has heard of", lambda: killed.status()["step"] > step)
    assert num_kept

    # a world that a resize made saves as well, and knows what its new ranks hold
    killed.must_resize("--layout=tp=2")
    took = killed.cli("checkpoint", "save", killed.job, "--json")
    assert took.returncode == 0, took.stderr
    assert killed.cli("stop", killed.job).returncode == 0
    shown = json.loads(killed.cli("checkpoint", "inspect", str(tmp_path / "own"), "--json").stdout)
    assert (shown["origin"]["layout"]["tp"], shown["path"]) == (2, json.loads(took.stdout)["path"])
    assert killed.cli("checkpoint", "verify", str(tmp_path / "own")).returncode == 0


def test_a_worker_that_joins_where_a_checkpoint_was_taken_does_not_take_it_again(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Alone it would wait for the others' shares, and all for it at the next one."""
    out, saved = tmp_path / "out", tmp_path / "saved"
    out.mkdir()
    job = launch(
        TRAIN, *train_arguments(out, steps=5000), standbys=1, options=(f"--checkpoint-dir={saved}", "--checkpoint-every=1"),
    )  # fmt: skip
    job.until_trains()
    job.until_standbys(1)
    for rank in ("0", "1"):
        job.must_resize("--replace", rank)
        step = job.status()["step"]
        job.until("checkpoints of the new world", lambda: job.status()["last_checkpoint"]["step"] > step + 3)  # noqa: B023
    assert job.cli("stop", job.job).returncode == 0
    assert "checkpoint_failed" not in job.kinds(), job.output()
    steps = [event["step"] for event in job.events() if event["kind"] == "checkpoint"]
    assert steps == list(range(1, len(steps) + 1))
    assert (saved / "latest").read_text().strip() == f"step-{len(steps):08d}"
    assert sorted(path.name for path in saved.iterdir() if not path.name.startswith("step-")) == ["latest"]
