"""Another framework's names as Megatron's, and what a universal folder says of its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bed
import ckpt
import foreign
import pytest
import torch
from bed import Model, Split

from resharding import megatron
from resharding.checkpoint.convert import convert
from resharding.checkpoint.folder import kind_of
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.opened import Checkpoint
from resharding.checkpoint.sources import open_source

MODEL = {"num_attention_heads": 4, "num_query_groups": 2, "hidden_size": 32}
GROUPS = [{"lr": 0.25, "weight_decay": 0.1, "betas": (0.9, 0.95), "params": [0]}]


def opened(path: Path, spec: dict[str, Any] | None = None, *, model: dict[str, Any] | None = None, **options: Any):
    kind = kind_of(path)
    assert kind is not None
    return open_source(kind, path, patterns=spec or {}, model=model or {}, **options)


def test_a_model_of_deepspeeds_is_renamed_and_put_together_into_megatrons(tmp_path: Path) -> None:
    """Separate q, k, v, gate and up become the fused tensors of a tensor parallel world, moments included."""
    (rank,) = ckpt.world(Model(layers=2, groups=2), Split())
    bed.fill(rank.holding)
    groups = list(megatron.common_state(rank.optimizer)["groups"])
    with Checkpoint.open(ckpt.save(tmp_path / "first", [rank])) as checkpoint:
        state = foreign.as_llama(checkpoint)
    assert not any("decoder" in key for key in state)
    rows = [{**GROUPS[0], "lr": 0.25 * (number + 1)} for number in range(len(groups))]
    path = foreign.universal(tmp_path / "universal", state, step=7, groups=rows)
    converted = convert(opened(path, foreign.spec_of(groups), model=MODEL), tmp_path / "ours").path
    ranks = ckpt.world(Model(layers=2, groups=2), Split(tp=2), empty=True)
    for each in ranks:
        bed.poison(each.holding)
    ckpt.load(converted, ranks)
    assert [line for each in ranks for line in bed.wrong(each.holding)] == []
    with Checkpoint.open(converted) as checkpoint:
        meta = checkpoint.index.meta
    wanted = {name: {"lr": row["lr"], "weight_decay": 0.1, "step": 7.0} for name, row in zip(groups, rows, strict=True)}
    assert meta.optimizer["groups"] == wanted
    assert [fields["betas"] for fields in meta.optimizer["settings"].values()] == [[0.9, 0.95]] * len(groups)


def state(*kinds: str) -> dict[str, torch.Tensor]:
    return {f"{kind}/layers.0.weight": torch.arange(6.0).view(2, 3) for kind in kinds}


def test_groups_and_steps_of_a_universal_folder_are_read(tmp_path: Path) -> None:
    path = foreign.universal(tmp_path, state("weight", "exp_avg", "momentum_buffer"), step=5, groups=GROUPS)
    source = opened(path)
    assert {tensor.key for tensor in source.tensors} == set(state("weight", "exp_avg", "momentum_buffer"))
    assert source.meta.optimizer["groups"] == {"group 0": {"lr": 0.25, "weight_decay": 0.1, "step": 5.0}}
    torch.save(torch.tensor(6.0), path / "zero" / "layers.0.weight" / "step.pt")
    assert opened(path).meta.optimizer["groups"]["group 0"]["step"] == 6.0
    (path / "zero" / "layers.0.weight" / "step.pt").unlink()
    with pytest.raises(BadCheckpoint, match="does not say how many steps group 0 has made; pass --weights-only"):
        opened(path)
    assert opened(path, weights_only=True).meta.optimizer["groups"] == {}
    foreign.universal(path, {"weight/other": torch.zeros(2)}, step=9, groups=GROUPS)
    torch.save(6, path / "zero" / "layers.0.weight" / "step.pt")
    with pytest.raises(BadCheckpoint, match=r"parameters of group 0 of .* are at different steps, \[6, 9.0\]"):
        opened(path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"param": torch.zeros(5)}, r"strange\.pt has not the shape of fp32\.pt beside it; pass --weights-only"),
        ({"scales": torch.zeros(5)}, r"strange\.pt holds no parameter"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(value: Any, words: str, tmp_path: Path) -> None:
    path = foreign.universal(tmp_path, state("weight"), step=5, groups=GROUPS)
    torch.save(value, path / "zero" / "layers.0.weight" / "strange.pt")
    with pytest.raises(BadCheckpoint, match=words):
        opened(path)
    assert [tensor.key for tensor in opened(path, weights_only=True).tensors] == ["weight/layers.0.weight"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"rename": [{"match": "(", "to": "a"}]}, "'rename' rule .* is none; it needs 'match', and a template 'to'"),
        ({"rename": [{"match": "a", "to": r"\1"}]}, "'rename' rule .* is none"),
        ({"rename": [{"match": ".*", "to": "a"}]}, "two tensors would be called weight/a; correct 'rename'"),
        ({"rename": [{"match": "(a)", "to": r"x.linear_qkv.q.weight"}]}, "do not make up weight/x.linear_qkv.weight; pass num"),
        ({"groups": []}, "'groups' in --patterns has to be a list of 1 objects"),
        ({"renames": []}, "--patterns has 'renames', which says nothing; name rules, rename or groups"),
    ],
)  # fmt: skip
def test_a_specification_that_does_not_fit_is_said(spec: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = foreign.universal(tmp_path, {"weight/a": torch.zeros(4, 2), "weight/b": torch.zeros(3)}, step=5, groups=GROUPS)
    with pytest.raises(BadCheckpoint, match=words):
        opened(path, spec, model=MODEL)
