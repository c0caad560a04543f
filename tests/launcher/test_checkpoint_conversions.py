"""``liverun checkpoint convert|export`` with all their options, on folders that Megatron wrote."""

from __future__ import annotations

import json
import os
import pty
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "resharding"))
from deepspeed_made import make
from test_checkpoint_megatron import CONFIG, MODELS, saved_by_megatron
from test_checkpoint_patterns import RULES, slices

from launcher.checkpoint import app
from resharding.checkpoint.export import FAMILY
from resharding.checkpoint.opened import Checkpoint

QUERIES = "weight/decoder.layers.1.self_attention.linear_qkv.q.weight"


def run(*words: object) -> str:
    """Run the command in this process, which has imported everything."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_by_megatron(tmp_path_factory.mktemp("megatron"), MODELS["grouped queries"])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def kinds_in(path: Path) -> set[str]:
    with Checkpoint.open(path) as checkpoint:
        return {entry.kind for entry in checkpoint.index.entries}


def test_from_megatron_and_back_and_on_to_hugging_face(theirs: Path, config: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    assert "step-00000007: step 7" in run("convert", theirs, ours, "--model-config", config)
    with Checkpoint.open(ours) as checkpoint:
        assert checkpoint.index.by_key[QUERIES].shape == (32, 32)
    assert kinds_in(ours) == {"weight", "main", "exp_avg", "exp_avg_sq"}
    run("convert", theirs, tmp_path / "weights", "--weights-only")
    assert kinds_in(tmp_path / "weights") == {"weight"}
    for name, words in (("dense", ["--to", "torch_dist"]), ("experts", ["--expert-parallel"])):
        back = tmp_path / f"iter_{name}"
        assert run("convert", ours, back, *words) == f"{back}\n"
        run("convert", back, tmp_path / name, "--model-config", config)
        assert run("diff", ours, tmp_path / name) == f"all {len(_keys(ours))} tensors are the same\n"
    llama = tmp_path / "llama.json"
    llama.write_text(json.dumps({**CONFIG, **FAMILY}))
    told = ("--rope-theta", "10000", "--norm-eps", "1e-5", "--max-positions", "8", "--vocab-size", "61", "--model-config", llama)
    assert run("export", ours, tmp_path / "llama", *told) == f"{tmp_path / 'llama'}\n"
    about = json.loads((tmp_path / "llama" / "config.json").read_text())
    assert (about["vocab_size"], about["num_attention_heads"], about["num_key_value_heads"]) == (61, 4, 2)
    assert sorted(path.suffix for path in (tmp_path / "llama").iterdir()) == [".json", ".json", ".safetensors"]


def _keys(path: Path) -> list[str]:
    with Checkpoint.open(path) as checkpoint:
        return [entry.key for entry in checkpoint.index.entries]


def test_rules_for_slices_come_from_a_file(tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", slices(), {}) / "global_step3"
    asked = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "ours")])
    assert (asked.exit_code, "pass rules with --patterns" in asked.stderr) == (1, True)
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    run("convert", folder, tmp_path / "ours", "--patterns", tmp_path / "rules.json")
    with Checkpoint.open(tmp_path / "ours") as checkpoint:
        assert checkpoint.index.by_key["main/embed.weight"].shape == (11, 4)


def test_on_a_terminal_a_bar_shows_how_far_it_is(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, terminal = pty.openpty()
    shown = bytearray()

    def listen() -> None:
        try:
            while data := os.read(ours, 4096):
                shown.extend(data)
        except OSError:
            return  # it is closed at the other end

    listening = threading.Thread(target=listen)
    listening.start()
    try:
        monkeypatch.setenv("TERM", "xterm")
        with os.fdopen(terminal, "w") as stderr, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            app(["convert", str(theirs), str(tmp_path / "ours")], standalone_mode=False)
        listening.join(30)
    finally:
        os.close(ours)
    text = shown.decode()
    assert "converting" in text
    assert "━" in text
    assert "\x1b[2K" in text  # and it is gone in the end
