"""Folders that real DeepSpeed wrote, at every ZeRO stage, against what its own converter makes of them."""

from __future__ import annotations

import importlib
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks

from resharding.boxes import Box, Holding, Piece, flat_range_boxes
from resharding.checkpoint import reader
from resharding.checkpoint.convert import convert
from resharding.checkpoint.deepspeed import DeepSpeedSource
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.megatron_write import read_tensor
from resharding.checkpoint.opened import Checkpoint
from resharding.checkpoint.patterns import read_patterns
from resharding.checkpoint.universal import UniversalSource

HERE = Path(__file__).parent
NAMES = {"embed.weight", "head.weight", *(f"layers.{i}.{kind}" for i in range(3) for kind in ("weight", "bias"))}


def read(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(path) as checkpoint:
        assert [checkpoint.damage(entry) for entry in checkpoint.index.entries] == [None] * len(checkpoint.index.entries)
        return {tensor.key: read_tensor(checkpoint, tensor) for tensor in checkpoint.index.whole}


def trained(folder: Path, stage: int, kind: str = "plain", size: int = 2) -> Path:
    """Train with real ranks of DeepSpeed, and save."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    path = folder / f"{kind}{stage}"
    script = HERE / "deepspeed_rank.py"
    run_ranks(((script, rank, size, stage, port, path, kind) for rank in range(size)), limit_s=240.0)
    return path


def universal(source: Path, target: Path) -> Path:
    """Convert with DeepSpeed's own tool."""
    tool: Any = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    step = source / (source / "latest").read_text().strip()
    words = ["--input_folder", str(step), "--output_folder", str(target), "--num_extract_workers", "1"]
    code = "import sys; from deepspeed.checkpoint.ds_to_universal import *; main(parse_arguments())"
    words += ["--num_merge_workers", "1", "--inject_missing_state"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert tool is not None
    return target


def loaded(path: Path, stage: int) -> dict[str, torch.Tensor]:
    """Load a checkpoint into two ranks that cut it as a ZeRO stage does: all end to end, or each parameter by itself."""
    with Checkpoint.open(path) as checkpoint:
        whole = checkpoint.index.whole
        found = {t.key: torch.full(t.global_shape, -1, dtype=getattr(torch, t.dtype)) for t in whole}
        for rank in range(2):
            pieces = []
            for kind in {t.key.partition("/")[0] for t in whole}:
                members = [tensor for tensor in whole if tensor.key.startswith(f"{kind}/")]
                half, at = -(-sum(math.prod(t.global_shape) for t in members) // 2), 0
                for tensor in members:
                    numel = math.prod(tensor.global_shape)
                    mine = (rank * half - at, (rank + 1) * half - at) if stage < 3 else (rank * -(-numel // 2), (rank + 1) * -(-numel // 2))
                    first, last = (min(max(end, 0), numel) for end in mine)
                    at += numel
                    for offset, shape in flat_range_boxes(tensor.global_shape, first, last) if first < last else ():
                        view = found[tensor.key][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
                        box = Box(tensor.key, tensor.dtype, tensor.global_shape, offset, shape)
                        pieces.append(Piece(box, lambda view=view: view))
            reader.read_into(checkpoint, Holding.of(pieces))
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_stage_gives_the_same_state_and_that_of_deepspeeds_own_converter(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    states = {}
    for stage in (1, 2, 3):
        source = DeepSpeedSource(trained(tmp_path, stage), model={}, patterns={})
        states[stage] = read(convert(source, tmp_path / f"ours{stage}").path)
        assert (source.meta.step, source.meta.consumed_samples) == (3, 24)
        groups = source.meta.optimizer["settings"].values()
        assert [(group["lr"], group["weight_decay"], len(group["parameters"])) for group in groups] == [
            (1e-3, 0.1, 5), (5e-4, 0.0, 3),
        ]  # fmt: skip
        assert {fields["step"] for fields in source.meta.optimizer["groups"].values()} == {3.0}
    for stage, state in states.items():
        kinds = ("weight", "main", "exp_avg", "exp_avg_sq")
        assert state.keys() == {f"{kind}/{name}" for kind in kinds for name in NAMES} | {"weight/scale"}
        for name in NAMES:
            assert torch.equal(state[f"weight/{name}"], state[f"main/{name}"].bfloat16()), (stage, name)
    for key, value in states[1].items():
        assert torch.equal(value, states[2][key]), key
        assert torch.allclose(value, states[3][key], atol=1e-3), key  # it sums up in another order
    for saved, other in ((1, 3), (3, 1)):
        there = loaded(tmp_path / f"ours{saved}", other)
        assert [key for key, value in states[saved].items() if not torch.equal(there[key], value)] == []
    for stage in (1, 3):
        folder = universal(tmp_path / f"plain{stage}", tmp_path / f"universal{stage}")
        source = UniversalSource(folder, model={})
        assert (source.meta.step, source.meta.consumed_samples) == (3, 24)
        groups = source.meta.optimizer["settings"].values()
        assert [(group["lr"], group["weight_decay"], len(group["parameters"])) for group in groups] == [
            (1e-3, 0.1, 5), (5e-4, 0.0, 3),
        ]  # fmt: skip
        assert [fields["step"] for fields in source.meta.optimizer["groups"].values()] == [3.0, 3.0]
        theirs = read(convert(source, tmp_path / f"u{stage}").path)
        for name in NAMES:
            assert torch.equal(theirs[f"weight/{name}"], states[stage][f"main/{name}"]), (stage, name)
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(theirs[f"{kind}/{name}"], states[stage][f"{kind}/{name}"]), (stage, kind, name)
    (tmp_path / "plain1" / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(BadCheckpoint, match="has files of 1 data parallel ranks out of 2"):
        DeepSpeedSource(tmp_path / "plain1", model={}, patterns={})


CASES = {
    "experts": (2, 4, "second.deepspeed_moe.experts.deepspeed_experts.3.down.bias"),
    "pipeline": (1, 4, "tied_modules.embed.weight"),
    "frozen": (3, 2, "layers.2.weight"),
    "fp32": (1, 2, "layers.2.weight"),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", CASES)
def test_stages_experts_and_what_is_not_trained_give_the_state_that_deepspeed_has(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    stage, size, one = CASES[kind]
    path = trained(tmp_path, stage, kind, size)
    truth: dict[str, torch.Tensor] = {}
    for rank in range(size):
        truth.update(torch.load(path / f"truth-{rank}"))
    if kind == "fp32":  # the weight is the main parameter
        mains = {key: truth.pop(key) for key in list(truth) if key.startswith("main/")}
        assert all(torch.equal(value, truth[key.replace("main/", "weight/")]) for key, value in mains.items())
    source = DeepSpeedSource(path, model={}, patterns={})
    state = read(convert(source, tmp_path / "ours").path)
    assert state.keys() == truth.keys()
    assert f"exp_avg_sq/{one}" in state
    for key, value in state.items():
        assert torch.equal(value, truth[key]), key
    named = [name for group in source.meta.optimizer["settings"].values() for name in group["parameters"]]
    assert sorted(named) == sorted(key.partition("/")[2] for key in truth if key.startswith("exp_avg/"))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_autotp_has_cut_goes_together_as_in_deepspeeds_own_converter(tmp_path: Path) -> None:
    """Query, key and value of unequal size in one tensor, a layer cut by columns, and all that is whole."""
    pytest.importorskip("deepspeed")
    path = trained(tmp_path, 1, "autotp")
    ours = read(convert(DeepSpeedSource(path, model={}, patterns={}), tmp_path / "ours").path)
    source = UniversalSource(universal(path, tmp_path / "universal"), model={})
    theirs = read(convert(source, tmp_path / "theirs").path)
    assert theirs["weight/qkv.weight"].shape == (12, 6)
    assert theirs["exp_avg/out.weight"].shape == (6, 12)
    assert {key for key in ours if not key.startswith("main/")} == theirs.keys()
    for key, value in theirs.items():  # a universal folder has the main values as its weights
        assert torch.equal(ours[key.replace("weight/", "main/")], value), key


def _slices(whole: torch.Tensor, axis: int, parts: list[int], widths: list[int]) -> list[torch.Tensor]:
    """Cut each of several tensors along an axis into slices of unequal widths, and put a rank's together."""
    sections = [part * sum(widths) for part in parts]
    cut = [section.split([part * width for width in widths], dim=axis)
           for section, part in zip(whole.split(sections, dim=axis), parts, strict=True)]  # fmt: skip
    return [torch.cat(pieces, dim=axis) for pieces in zip(*cut, strict=True)]


@pytest.mark.parametrize(
    ("axis", "parts", "widths"), [(0, [1], [2, 3]), (1, [1], [1, 1, 2]), (0, [1, 1], [2, 2]), (0, [4, 1, 1], [1, 3])]
)
def test_fragments_of_several_tensors_and_of_unequal_size_go_together(axis, parts, widths) -> None:
    size = sum(parts) * sum(widths)
    whole = torch.arange(size * 5).view((size, 5) if axis == 0 else (5, size))
    pieces = _slices(whole, axis, parts, widths)
    rule = {"match": "w", "pattern": "fragments", "axis": axis, "parts": parts}
    pattern = read_patterns({"rules": [rule]}).of("w", len(pieces))
    shapes = [tuple(piece.shape) for piece in pieces]
    assert pattern.whole_shape(shapes) == tuple(whole.shape)
    again = torch.full_like(whole, -1)
    for rank, piece in enumerate(pieces):
        for block in pattern.blocks(shapes, rank):
            there = [slice(at, at + length) for at, length in zip(block.at, block.size, strict=True)]
            again[there] = piece[[slice(at, at + length) for at, length in zip(block.start, block.size, strict=True)]]
    assert torch.equal(again, whole)


def test_slices_without_a_rule_are_asked_about_and_rules_are_checked() -> None:
    patterns = read_patterns({"rules": [{"match": "a.*", "pattern": "replicated"}]})
    assert patterns.of("abc", 2).kind == "replicated"
    assert patterns.of("b", 1).kind == "unique"
    with pytest.raises(BadCheckpoint, match="b lies on 2 tensor parallel ranks, and no rule says"):
        patterns.of("b", 2)
    with pytest.raises(ValueError, match="its slices have shapes"):
        patterns.of("abc", 2).whole_shape([(2, 3), (3, 3)])
    for rule in ({"match": "a"}, {"match": "a", "pattern": "glued"}, {"match": "(", "pattern": "average"}):
        with pytest.raises(BadCheckpoint, match="needs 'match' and a 'pattern' out of"):
            read_patterns({"rules": [rule]})
