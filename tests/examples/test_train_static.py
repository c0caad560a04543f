"""examples/gpt/train.py in worlds that do not change, under torchrun: the yardstick for those that do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPT = Path(__file__).resolve().parents[2] / "examples" / "gpt"
FLAGS = {
    "--num-layers": 4, "--hidden-size": 64, "--num-attention-heads": 4, "--num-query-groups": 2,
    "--ffn-hidden-size": 128, "--seq-length": 32, "--micro-batch-size": 2, "--global-batch-size": 8,
    "--lr-warmup-samples": 16, "--log-interval": 0,
}  # fmt: skip
LAYOUTS = {
    "dp=2": [],
    "tp=2": ["--tensor-model-parallel-size", "2"],
    "pp=2": ["--pipeline-model-parallel-size", "2"],
    "pp=2,vpp=2": ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"],
}

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    command = [sys.executable, GPT / "prepare.py", "--output", prefix, "--max-bytes", "500000"]
    subprocess.run(command, check=True, timeout=120)
    return prefix


def train(corpus, log, *more, workers=1, steps=12):
    """Run the example under torchrun; return what it logged, step by step."""
    flags = [str(word) for pair in FLAGS.items() for word in pair]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    done = subprocess.run(
        [*command, GPT / "train.py", "--data-path", corpus, "--loss-log", log, "--train-steps", str(steps), *flags, *more],
        capture_output=True, text=True, timeout=240, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in log.read_text().splitlines()]


def losses(steps):
    return [step["loss"] for step in steps]


@pytest.mark.timeout(600)
def test_every_layout_continues_one_checkpoint_with_the_same_losses(corpus, tmp_path):
    """Weights and optimizer state of tp=2, loaded under each layout, train on as tp=2 does."""
    saved = tmp_path / "saved"
    keep = ["--dist-ckpt-optim-fully-reshardable"]
    whole = train(
        corpus, tmp_path / "whole.jsonl", *LAYOUTS["tp=2"], *keep, "--save", saved, "--save-interval", "8", workers=2
    )
    assert [step["step"] for step in whole] == list(range(12))
    assert whole[-1]["loss"] < whole[0]["loss"]
    single = train(corpus, tmp_path / "single.jsonl", *keep, "--load", saved)
    assert [step["step"] for step in single] == [8, 9, 10, 11]
    assert losses(single) == pytest.approx(losses(whole[8:]), rel=1e-5)
    for name, layout in LAYOUTS.items():
        resumed = train(corpus, tmp_path / f"{name}.jsonl", *layout, *keep, "--load", saved, workers=2)
        assert losses(resumed) == pytest.approx(losses(whole[8:]), rel=1e-5), name


def test_bf16_and_dropout_train_and_repeat_bit_for_bit(corpus, tmp_path):
    more = ["--bf16", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    first = train(corpus, tmp_path / "1.jsonl", *more, workers=2)
    second = train(corpus, tmp_path / "2.jsonl", *more, workers=2)
    assert losses(first) == losses(second)
    assert first[-1]["loss"] < first[0]["loss"]


def test_every_sample_is_used_once_in_order(corpus, tmp_path):
    folder = tmp_path / "samples"
    train(corpus, tmp_path / "loss.jsonl", "--sample-log", folder, "--eval-interval", "5", workers=2, steps=6)
    used: dict[int, list[int]] = {}
    for log in folder.iterdir():
        for record in map(json.loads, log.read_text().splitlines()):
            used.setdefault(record["step"], []).extend(record["ids"])
    assert len(list(folder.iterdir())) == 2
    assert {step: sorted(ids) for step, ids in used.items()} == {
        step: list(range(8 * step, 8 * step + 8)) for step in range(6)
    }
    evaluated = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    assert [step["step"] for step in evaluated if "eval_loss" in step] == [0, 5]
