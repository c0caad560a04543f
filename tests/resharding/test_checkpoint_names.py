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
from resharding.checkpoint.folder import kind_of, newest_of_others
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.megatron_write import read_tensor, write_megatron
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
        theirs = write_megatron(checkpoint, tmp_path / "theirs")
    (group, *_) = torch.load(theirs / "common.pt", weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    assert (group["lr"], group["step"], group["betas"], "parameters" in group) == (0.25, 7.0, (0.9, 0.95), False)
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
    with (
        Checkpoint.open(convert(opened(path), tmp_path / "ours").path) as checkpoint,
        pytest.raises(BadCheckpoint, match="has parameter group group 0 of another framework; convert it with 'groups'"),
    ):
        write_megatron(checkpoint, tmp_path / "theirs")
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


def read(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(path) as checkpoint:
        return {tensor.key: read_tensor(checkpoint, tensor) for tensor in checkpoint.index.whole}


PARAMS = {"a.weight": torch.arange(6.0).view(2, 3).bfloat16(), "b.weight": torch.arange(5.0).bfloat16()}
FROZEN = {"c.weight": torch.arange(7.0).bfloat16()}


@pytest.mark.parametrize("frozen", [None, FROZEN], ids=["stage 1", "stage 3"])
def test_the_folder_above_the_steps_is_taken_and_opening_it_puts_nothing_together(
    frozen: dict[str, torch.Tensor] | None, tmp_path: Path
) -> None:
    root = foreign.zero(tmp_path / "deepspeed", PARAMS, frozen=frozen)
    assert kind_of(root) == kind_of(root / "global_step5") == "deepspeed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", lambda *_args, **_options: pytest.fail("a tensor was put together"))
        source = opened(root)
    found = read(convert(source, tmp_path / "ours").path)
    wanted = {f"weight/{name}": value for name, value in (PARAMS | (frozen or {})).items()}
    wanted |= {f"main/{name}": value.float() for name, value in PARAMS.items()}
    wanted |= {f"exp_avg/{name}": 2 * value.float() for name, value in PARAMS.items()}
    assert found.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if not torch.equal(found[key], value)] == []
    assert source.meta.optimizer["groups"] == {"group 0": {"lr": 0.25, "weight_decay": 0.1, "step": 5.0}}


def test_megatrons_folder_above_the_steps_is_known_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "iter_0000007").mkdir()
    (tmp_path / "iter_0000007" / "metadata.json").touch()
    assert kind_of(tmp_path) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert kind_of(tmp_path) == "megatron"
    assert newest_of_others(tmp_path) == tmp_path / "iter_0000007"
