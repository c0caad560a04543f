"""Every pattern of the paper, over slices of two tensor parallel ranks: by rules, and by what DeepSpeed says itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_made import MOMENTS, make, moment
from test_checkpoint_deepspeed import loaded, read

from resharding.checkpoint.convert import convert
from resharding.checkpoint.deepspeed import DeepSpeedSource
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.patterns import read_patterns

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


# --- what DeepSpeed says of its own cuts, beyond lists of names ---

FUSED = numbers(18, 4, start=1)
"""three tensors of 12, 4 and 2 rows, each cut by itself"""
WIDTHS = ((7, 5), (3, 1), (0, 2))
"""how many rows of each the two ranks have"""


def cut(widths: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """What two ranks have of ``FUSED``."""
    tensors = FUSED.split([sum(each) for each in widths])
    pieces = [tensor.split(list(each)) for tensor, each in zip(tensors, widths, strict=True)]
    return [torch.cat([each[rank] for each in pieces]) for rank in range(2)]


def sub_params(shape: Sequence[Any], *, axis: int = 0, version: float = 0.4, **more: Any) -> dict[str, Any]:
    row = {"patterns": ["^qkv$"], "shape": list(shape), "partition_dim": axis}
    return {"universal_checkpoint_version": version, "parameter_with_sub_params": [row], **more}


def piece(shape: Sequence[int], source: int, dest: int, ranks: Sequence[int], **more: Any) -> dict[str, Any]:
    """Rows of ``FUSED``, as DeepSpeed 0.19.8 writes them down."""
    return {"shape": list(shape), "source": [source, [4, 1]], "dest": [dest, [4, 1]], "locations": list(ranks), **more}


def affine(shards: Sequence[Sequence[int]], pieces: Sequence[Sequence[Mapping[str, Any]]], version: int = 1) -> dict[str, Any]:
    ranks = {rank: {"shard_shape": list(shards[rank]), "pieces": list(pieces[rank])} for rank in range(2)}
    return {"affine_map": {"version": version, "params": {"^qkv$": {"logical_shape": [18, 4], "ranks": ranks}}}}


QUERY_CUT = affine(
    [(12, 4), (12, 4)],
    [
        [piece((6, 4), 0, 0, [0]), piece((6, 4), 48, 24, [0, 1])],
        [piece((6, 4), 24, 0, [1]), piece((6, 4), 48, 24, [0, 1])],
    ],
)
"""the first 12 rows by halves, the others on both ranks"""
TWO_RUNS = affine(
    [(12, 4), (6, 4)],
    [[piece((6, 4), 0, 0, [0]), piece((6, 4), 48, 24, [0])], [piece((6, 4), 24, 0, [1])]],
)
"""the first rank has the ends, the other the middle"""
OF_FUSED = {
    "unequal widths": (cut(WIDTHS), sub_params([(12, 4, 2), -1], sub_param_shard_widths={"^qkv$": WIDTHS})),
    "row parallel too": (
        cut(WIDTHS),
        sub_params([(12, 4, 2), -1], sub_param_shard_widths={"^qkv$": WIDTHS}, parameter_with_row_parallelism_patterns=["^qkv$"]),
    ),
    "how many, before 0.4": (cut([(3, 3)] * 3), sub_params([3, -1], version=0.3)),
    "sizes, before 0.4": (cut([(6, 6), (2, 2), (1, 1)]), sub_params([(12, 4, 2), -1], version=0.3)),
    "one half of all": ([torch.cat([FUSED[:6], FUSED[12:]]), FUSED[6:]], QUERY_CUT),
    "blocks apart": ([torch.cat([FUSED[:6], FUSED[12:]]), FUSED[6:12]], TWO_RUNS),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_FUSED)
def test_a_parameter_of_several_tensors_goes_together_as_deepspeed_says(kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", {"qkv": OF_FUSED[kind][0], "norm": [numbers(4)] * 2}, {
        **OF_FUSED[kind][1], "tp_replicated_parameter_patterns": ["norm"],
    })  # fmt: skip
    state = read(convert(DeepSpeedSource(folder, model={}, patterns={}), tmp_path / "ours").path)
    assert torch.equal(state["main/qkv"], FUSED)
    assert torch.equal(state["weight/qkv"], FUSED.bfloat16())
    for key in MOMENTS:
        assert torch.equal(state[f"{key}/qkv"], moment(key, "qkv", FUSED)), key


def test_rules_may_say_how_wide_every_slice_is(tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", {"qkv": cut(WIDTHS)}, {})
    rules = {"rules": [{"match": "qkv", "pattern": "fragments", "widths": WIDTHS}]}
    state = read(convert(DeepSpeedSource(folder, model={}, patterns=rules), tmp_path / "ours").path)
    assert torch.equal(state["main/qkv"], FUSED)
    for widths in ([], [[7, -5]], [7, 5], [["a"]]):
        with pytest.raises(BadCheckpoint, match="is none; it needs 'match'"):
            read_patterns({"rules": [{**rules["rules"][0], "widths": widths}]})
    with pytest.raises(BadCheckpoint, match=r"qkv has slices of \[10, 8\] rows, and is said to be cut into \[\(9, 9\)\]"):
        DeepSpeedSource(folder, model={}, patterns={"rules": [{**rules["rules"][0], "widths": [[9, 9]]}]})


OVERLAPPING = [[piece((9, 4), 0, 0, [0])], [piece((9, 4), 32, 0, [1])]]
ACROSS = {"shape": [9, 4], "source": [0, [8, 1]], "dest": [0, [4, 1]], "locations": [0]}
REFUSED = {
    "is kept multiplied by 0.5": affine([(9, 4), (9, 4)], [
        [piece((9, 4), 0, 0, [0], scale=0.5)], [piece((9, 4), 36, 0, [1])]]),
    "an affine map of version 2, newer than the 1": affine([(9, 4), (9, 4)], [[], []], version=2),
    "an affine map whose pieces do not make up": affine([(9, 4), (9, 4)], OVERLAPPING),
    "an affine map of which a piece is no block": affine([(9, 4), (9, 4)], [[ACROSS], [piece((9, 4), 36, 0, [1])]]),
    r"its affine map says \[\(12, 4\), \(12, 4\)\]": QUERY_CUT,
    "nothing says how wide its slices": sub_params([(12, 4, 2), -1]),
    "is said to be cut into": sub_params([(12, 4, 2), -1], sub_param_shard_widths={"^qkv$": WIDTHS}),
    "do not go together along axis 1": sub_params([-1, 3, 4], axis=1, version=0.3),
    "not in proportion": sub_params([4, -1], version=0.3),
    r"as the checkpoint says itself \(tied\)": {"autotp_unsupported_parameter_patterns": {"^qkv$": "tied"}},
    "the checkpoint says 'woven_parameters'": {"woven_parameters": ["qkv"]},
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_a_cut_that_is_not_known_is_asked_about(reason: str, tmp_path: Path) -> None:
    """Told by ``--patterns``, each of them is read."""
    folder = make(tmp_path / "theirs", {"qkv": FUSED.chunk(2)}, REFUSED[reason])
    with pytest.raises(BadCheckpoint, match=rf"qkv .*{reason}.*; pass rules .*--patterns"):
        DeepSpeedSource(folder, model={}, patterns={})
    rules = {"rules": [{"match": "qkv", "pattern": "fragments"}]}
    source = DeepSpeedSource(folder, model={}, patterns=rules)
    assert torch.equal(read(convert(source, tmp_path / "ours").path)["main/qkv"], FUSED)


@pytest.mark.parametrize(
    "info",
    [
        {"affine_map": {"version": 1, "params": {"^qkv$": {"logical_shape": [18, 4]}}}}, {"affine_map": [1]},
        {"parameter_with_sub_params": [{"patterns": ["^qkv$"]}]}, {"vocabulary_parameter_patterns": ["("]},
        sub_params([(12, 4, 2), -1], sub_param_shard_widths={"^qkv$": [["wide"]]}),
    ],
)  # fmt: skip
def test_what_has_not_deepspeeds_form_is_one_sentence(info: dict[str, Any], tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", {"qkv": FUSED.chunk(2)}, info)
    with pytest.raises(BadCheckpoint, match=r"universal_checkpoint_info is not as DeepSpeed .* writes it .*--patterns"):
        DeepSpeedSource(folder, model={}, patterns={})


def test_blocks_that_both_ranks_have_are_compared(tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", {"qkv": [torch.cat([FUSED[:6], FUSED[12:]]), FUSED[6:] + 1]}, QUERY_CUT)
    with pytest.raises(BadCheckpoint, match="/qkv is said to be replicated, and tensor parallel ranks have different"):
        convert(DeepSpeedSource(folder, model={}, patterns={}), tmp_path / "ours")


@pytest.mark.parametrize("key", ["ds_autoep_layers", "autoep_layers"])
def test_experts_of_autoep_are_refused(key: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", {"w": [numbers(4, 4)]}, {})
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save(torch.load(path) | {key: [{"num_experts": 4}]}, path)
    with pytest.raises(BadCheckpoint, match="has experts of AutoEP, which cannot be read yet"):
        DeepSpeedSource(folder, model={}, patterns={})


def test_parameters_that_are_not_trained_are_refused_where_both_stage_3_and_tensor_parallel_cut_them(tmp_path: Path) -> None:
    folder = make(tmp_path / "theirs", {"w": numbers(4, 4).chunk(2)}, {"tp_replicated_parameter_patterns": []})
    for path in (folder / "global_step3").iterdir():
        state = torch.load(path, weights_only=False)
        if "optimizer_state_dict" in state:
            first = state["optimizer_state_dict"]
            state["optimizer_state_dict"] = {
                "fp32_flat_groups": first["single_partition_of_fp32_groups"],
                "optimizer_state_dict": first["base_optimizer_state"],
            }
        else:
            state |= {"frozen_param_shapes": {"f": (4,)}, "frozen_param_fragments": {"f": torch.zeros(2)}}
        torch.save(state, path)
    with pytest.raises(BadCheckpoint, match="stage 3 with frozen parameters and tensor parallel, which cannot be read"):
        DeepSpeedSource(folder, model={}, patterns={})
