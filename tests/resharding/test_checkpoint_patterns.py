"""Every pattern of the paper, over slices of two tensor parallel ranks: by rules, and by what DeepSpeed says itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed_made import MOMENTS, make, moment
from test_checkpoint_deepspeed import loaded, read

from resharding.checkpoint.convert import convert
from resharding.checkpoint.deepspeed import DeepSpeedSource
from resharding.checkpoint.format import BadCheckpoint

ROWS = 11
"""of the vocabulary; each of two ranks has 6"""


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) + start).float().view(shape) / 4


WHOLE = {
    "embed.weight": numbers(12, 4), "fc1.weight": numbers(8, 4, start=7), "fc2.weight": numbers(4, 6, start=3),
    "gate_up.weight": numbers(12, 4, start=1), "norm.weight": numbers(4, start=2), "router.bias": numbers(6, start=5),
    "pooler.weight": numbers(3, 3, start=9),
}  # fmt: skip


def slices() -> dict[str, list[torch.Tensor]]:
    """What two ranks have of each: cut by rows or columns, half by half, alike, each its own, or one rank's alone."""
    gate, up = WHOLE["gate_up.weight"].chunk(2)
    bias = WHOLE["router.bias"]
    return {
        "embed.weight": list(WHOLE["embed.weight"].chunk(2)), "fc1.weight": list(WHOLE["fc1.weight"].split([5, 3])),
        "fc2.weight": list(WHOLE["fc2.weight"].chunk(2, dim=1)),
        "gate_up.weight": [torch.cat([a, b]) for a, b in zip(gate.chunk(2), up.chunk(2), strict=True)],
        "norm.weight": [WHOLE["norm.weight"]] * 2, "router.bias": [bias - 0.25, bias + 0.25],
        "pooler.weight": [WHOLE["pooler.weight"]],
    }  # fmt: skip


RULES = {
    "rules": [
        {"match": "embed.weight", "pattern": "fragments", "axis": 0, "rows": ROWS},
        {"match": "fc1.weight", "pattern": "fragments"},
        {"match": "fc2.weight", "pattern": "fragments", "axis": 1},
        {"match": "gate_up.*", "pattern": "fragments", "parts": [1, 1]},
        {"match": "norm.*", "pattern": "replicated"},
        {"match": ".*bias", "pattern": "average"},
        {"match": "pooler.*", "pattern": "unique"},
    ]
}
SAID = {
    "tp_replicated_parameter_patterns": ["norm"], "parameter_to_average_patterns": [r"router\.bias"],
    "parameter_with_row_parallelism_patterns": ["fc2"], "parameter_with_2_sub_params_cat_dim_0": ["gate_up"],
    "vocabulary_parameter_patterns": ["embed"], "original_vocab_size": ROWS,
}  # fmt: skip


def wanted(name: str, kind: str) -> torch.Tensor:
    whole = WHOLE[name][:ROWS] if name == "embed.weight" else WHOLE[name]
    if kind == "weight":  # the mean is taken of weights
        halves = [each.bfloat16() for each in slices()[name]] if name == "router.bias" else []
        return torch.stack(halves).double().mean(dim=0).bfloat16() if halves else whole.bfloat16()
    return whole if kind == "main" else moment(kind, name, whole)


@pytest.mark.parametrize("by", ["rules", "DeepSpeed"])
def test_slices_of_every_pattern_make_up_the_parameter(by: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", slices(), SAID if by == "DeepSpeed" else {})
    source = DeepSpeedSource(folder, model={}, patterns={} if by == "DeepSpeed" else RULES)
    state = read(convert(source, tmp_path / "ours").path)
    assert state.keys() == {f"{kind}/{name}" for kind in ("weight", "main", *MOMENTS) for name in WHOLE}
    for key, value in state.items():
        kind, _, name = key.partition("/")
        assert torch.equal(value, wanted(name, kind)), key
    for stage in (1, 3):
        there = loaded(tmp_path / "ours", stage)
        assert [key for key, value in state.items() if not torch.equal(there[key], value)] == [], stage


def test_a_pattern_that_the_numbers_contradict_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", slices(), SAID)

    def refusal(match: str, pattern: str) -> str:
        rules = {"rules": [{"match": match, "pattern": pattern}, *RULES["rules"]]}
        with pytest.raises(BadCheckpoint) as caught:
            convert(DeepSpeedSource(folder, model={}, patterns=rules), tmp_path / "ours")
        return str(caught.value)

    assert "fc2.weight is said to be unique, and 2 ranks have a slice; pass rules that fit" in refusal("fc2.*", "unique")
    assert "router.bias is said to be replicated, and tensor parallel ranks have different" in refusal(".*bias", "replicated")
    assert "fc1.weight is said to be average, and its slices have shapes" in refusal("fc1.*", "average")


def test_weights_of_fp32_are_the_main_values(tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", slices(), SAID, dtype=torch.float32)
    state = read(convert(DeepSpeedSource(folder, model={}, patterns={}), tmp_path / "ours").path)
    assert {key.partition("/")[0] for key in state} == {"weight", *MOMENTS}
    for key, value in state.items():
        kind, _, name = key.partition("/")
        assert torch.equal(value, wanted(name, "main" if kind == "weight" else kind)), key
