"""Two ranks load a folder whose newest checkpoint is damaged: both take the one before, and say why in a sentence."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "resharding"))
import foreign as other

from resharding.checkpoint.convert import convert
from resharding.checkpoint.format import VERSION, Index, decode_index
from resharding.checkpoint.opened import Checkpoint
from resharding.checkpoint.sources import open_source

HERE = Path(__file__).parent
REFUSED = 30
"""a step whose ``extra`` one rank's script does not take"""


def newest(root: Path) -> Path:
    return root / (root / "latest").read_text().strip()


def flip(key: str) -> Callable[[Path], None]:
    """Change a byte in the middle of a tensor."""

    def damage(root: Path) -> None:
        entry = read(root).by_key[key]
        file = newest(root) / entry.file
        data = bytearray(file.read_bytes())
        data[entry.begin + entry.nbytes // 2] ^= 1
        file.write_bytes(data)

    return damage


def read(root: Path) -> Index:
    path = newest(root) / "index.json"
    return decode_index(path.read_bytes(), str(path))


def remove(name: str) -> Callable[[Path], None]:
    return lambda root: (newest(root) / name).unlink()


def newer(root: Path) -> None:
    path = newest(root) / "index.json"
    message = json.loads(path.read_text())
    message["index"]["version"] = VERSION + 1
    path.write_text(json.dumps(message))


def rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change what is no tensor, with a digest that is right."""

    def damage(root: Path) -> None:
        index = read(root)
        change(vars(index.meta))
        (newest(root) / "index.json").write_bytes(index.encode())

    return damage


def foreign(root: Path) -> None:
    """Leave nothing but a checkpoint of DeepSpeed."""
    shutil.rmtree(root)
    (root / "global_step5").mkdir(parents=True)
    (root / "global_step5" / "mp_rank_00_model_states.pt").touch()
    (root / "latest").write_text("global_step5")


def renamed(root: Path) -> None:
    """Put a checkpoint in its place that DeepSpeed's tool wrote, and that was converted with rules for its names."""
    with Checkpoint.open(root) as checkpoint:
        state = other.as_llama(checkpoint)
        groups = list(checkpoint.index.meta.optimizer["groups"])
    source = other.universal(
        root.parent / "universal", state, step=20,
        groups=[{"lr": 0.25 * (number + 1), "weight_decay": 0.1, "params": [0]} for number in range(len(groups))],
    )  # fmt: skip
    shutil.rmtree(root)
    model = {"num_attention_heads": 4, "hidden_size": 32}
    convert(open_source("universal", source, patterns=other.spec_of(groups), model=model), root)


def one_step(root: Path) -> None:
    """Make the folder a checkpoint itself."""
    step = newest(root)
    shutil.copytree(step, root.parent / "aside")
    shutil.rmtree(root)
    (root.parent / "aside").rename(root)


def only_without_index(root: Path) -> None:
    shutil.rmtree(root / "step-00000010")
    remove("index.json")(root)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "nothing": lambda _root: None,
    "a byte of rank 1's random stream": flip("rng/1/torch"),
    "a byte of a weight": flip("weight/embedding.word_embeddings.weight"),
    "a file is missing": remove("exp_avg-00001.safetensors"),
    "a newer format": newer,
    "no index": remove("index.json"),
    "another framework's groups": rewritten(
        lambda meta: meta["optimizer"].update(groups={"group 0": {"lr": 0.1, "step": 3.0}})
    ),
    "no groups": rewritten(lambda meta: meta["optimizer"].update(groups={})),
    "extra state": rewritten(lambda meta: meta["extra"].update(sampler={"value": 1})),
    "a script that refuses": lambda _root: None,
    "another framework's, renamed": renamed,
    "DeepSpeed": foreign,
    "a step": one_step,
    "only without index": only_without_index,
}
REASONS = {
    "a byte of rank 1's random stream": r"rng/1/torch in .* is damaged, its digest does not match; use another checkpoint",
    "a byte of a weight": r"weight/embedding\.word_embeddings\.weight in .* is damaged, its digest does not match; use .*",
    "a file is missing": r".*exp_avg-00001\.safetensors is missing; use another checkpoint",
    "a newer format": rf".*index\.json is of format version {VERSION + 1}, and this liverun reads versions up to .*",
    "no index": r".*step-00000020 has no index\.json; use another checkpoint",
    "another framework's groups": r".* has no parameter group \{.*\}, it has group 0; .* name the groups with --patterns .*",
    "no groups": r".* has no parameter groups, and this job has an optimizer; convert it without --weights-only, .*",
    "extra state": r"extra state 'sampler' is in the checkpoint and not in Training\(extra=\.\.\.\); give .*",
    "a script that refuses": r"what is no tensor does not load, RuntimeError: no; build the job as it was saved",
}
ENDS = {
    "DeepSpeed": r"liverun: --checkpoint-dir .* is a DeepSpeed checkpoint; convert it with 'liverun checkpoint convert' .*",
    "a step": r"liverun: --checkpoint-dir .* is itself a checkpoint; name the folder in which it lies, .*",
    "only without index": r"liverun: none of the checkpoints in .* can be loaded \(.*step-00000020 has no index\.json; .*",
}


def told_by_ranks(folder: Path) -> list[dict[str, Any]]:
    """Return what each of two ranks found in every case."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    outputs = run_ranks(((HERE / "load_rank.py", rank, folder, port) for rank in range(2)), limit_s=240.0)
    return [json.loads(out.splitlines()[-1]) for out in outputs]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_every_rank_takes_the_checkpoint_before_one_that_a_rank_cannot_load(tmp_path: Path) -> None:
    """And what no checkpoint can be taken from ends every rank with a sentence."""
    told = told_by_ranks(tmp_path)
    for name in ("nothing", *REASONS):
        step = 20 if name in ("nothing", "a script that refuses") else 10
        for rank, each in enumerate(told):
            found = each[name]
            values = (found["step"], found["weight"], found["extra"], found["drawn"])
            assert values == (step, step, step, 100 * step + rank), (name, rank)
        *reasons, resumed = told[0][name]["said"].splitlines()
        assert re.fullmatch(rf"liverun: resumed from .*step-000000{step}, step {step}", resumed), name
        assert len(reasons) == (name in REASONS)
        for reason in reasons:
            assert re.fullmatch(rf"liverun: cannot resume(?: from .*)?: {REASONS[name]}", reason), reason
        assert told[1][name]["said"] == ""
    for each in told:
        found = each["another framework's, renamed"]
        assert "end" not in found, found
        assert (found["step"], found["weight"], found["moments"], found["steps"]) == (20, 20, [20], [20])
        assert found["lrs"] == [0.25 * (number + 1) for number in range(len(found["lrs"]))]
    for name, sentence in ENDS.items():
        for each in told:
            assert re.fullmatch(sentence, each[name]["end"]), each[name]
