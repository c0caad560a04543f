"""Saved under one layout, loaded under another: every element, and the files themselves, which know no layout."""

from __future__ import annotations

import filecmp
import functools
import weakref
from dataclasses import replace
from pathlib import Path

import bed
import ckpt
import oracle
import pytest
import torch
from bed import Model, Rank, Split

from resharding.assign import Unplannable
from resharding.boxes import Box, Holding, Piece
from resharding.checkpoint.bits import bits_of_tensor
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.opened import Checkpoint
from resharding.checkpoint.writer import tensors_in
from resharding.listing import listing_of

BF16 = torch.bfloat16
MODELS = {
    "fp32, tied": Model(layers=2),
    "grouped queries, biases": Model(layers=2, dtype=BF16, tied=False, groups=2, bias=True),
    "optimizer not distributed": Model(layers=2, dtype=torch.float16, distributed=False),
    "many buckets": Model(layers=2, dtype=BF16, bucket=200),
    "experts": Model(layers=2, dtype=BF16, experts=4, tied=False, shared=16),
    "experts in one tensor": Model(layers=2, dtype=BF16, experts=4, grouped=True),
    "latent attention": Model(layers=2, dtype=BF16, mla=True),
    "Mamba, attention, MLP": Model(dtype=BF16, hybrid="M*-M"),
}
ONE = Split()
PAIRS = [
    ("fp32, tied", Split(tp=2, pp=2, dp=2), Split(dp=3)),
    ("fp32, tied", Split(dp=3), Split(pp=2, dp=2)),
    ("grouped queries, biases", Split(tp=2, dp=2), Split(tp=4, pp=2)),
    ("grouped queries, biases", Split(tp=4, pp=2), Split(tp=2, cp=2, sequence_parallel=True)),
    ("optimizer not distributed", Split(tp=2, dp=2), Split(pp=2)),
    ("many buckets", Split(tp=2, dp=3), Split(pp=2, dp=2)),
    ("experts", ONE, Split(dp=4, ep=4, etp=1)),
    ("experts", Split(tp=2, dp=2, ep=2, etp=2), Split(pp=2, dp=2, ep=2)),
    ("experts in one tensor", Split(tp=2, dp=2, ep=2), Split(pp=2, dp=2, ep=2)),
    ("latent attention", Split(tp=2, dp=2), Split(pp=2)),
    ("Mamba, attention, MLP", Split(tp=2, dp=2), Split(pp=2, dp=2)),
]


@functools.lru_cache(maxsize=4)
def _filled(name: str, split: Split) -> list[Rank]:
    ranks = ckpt.world(MODELS[name], split)
    for rank in ranks:
        bed.fill(rank.holding)
    return ranks


def _canonical(ranks: list[Rank]) -> dict[str, torch.Tensor]:
    return oracle.merge_dumps(
        {"ranks": rank.ranks, "entries": list(oracle._entries(rank.chunks, rank.optimizer, rank.ranks))}
        for rank in ranks
    )


@pytest.mark.parametrize(("name", "before", "after"), PAIRS, ids=str)
def test_what_one_layout_saved_another_loads_bit_for_bit(
    name: str, before: Split, after: Split, tmp_path: Path
) -> None:
    old, new = _filled(name, before), ckpt.world(MODELS[name], after, empty=True)
    for rank in new:
        bed.poison(rank.holding)
    path = ckpt.save(tmp_path, old, max_file_bytes=20_000)
    read = ckpt.load(tmp_path, new, staging_bytes=4096)
    assert [line for rank in new for line in bed.wrong(rank.holding)] == []
    assert [line for rank in old for line in bed.wrong(rank.holding)] == []
    assert read == sum(rank.holding.nbytes for rank in new)  # its boxes, and nothing else
    was, now = _canonical(old), _canonical(new)
    assert was.keys() == now.keys()
    assert [key for key in was if not torch.equal(was[key], now[key])] == []
    # and saved again under the new layout, it is the same files, byte for byte
    again = ckpt.save(tmp_path / "again", new, max_file_bytes=20_000)
    names = sorted(file.name for file in path.iterdir())
    assert names == sorted(file.name for file in again.iterdir())
    assert filecmp.cmpfiles(path, again, names, shallow=False)[0] == names
    assert len(names) > 4


@pytest.mark.parametrize("name", ["grouped queries, biases", "experts", "experts in one tensor"])
def test_any_tool_opens_the_files_and_finds_parts_by_name(name: str, tmp_path: Path) -> None:
    """Read with the safetensors library, and put together by hand, against the independent gather."""
    safetensors = pytest.importorskip("safetensors.torch")
    ranks = _filled(name, Split(tp=2, dp=2))
    path = ckpt.save(tmp_path, ranks)
    found = {}
    for file in path.glob("*.safetensors"):
        found.update(safetensors.load_file(file))
    model, truth = MODELS[name], _canonical(ranks)
    truth = {key: value for key, value in truth.items() if not key.startswith("step/")}
    groups, head = model.groups, model.hidden // model.heads
    for kind in ("weight", "main", "exp_avg", "exp_avg_sq"):
        for layer in range(model.layers):
            base = f"{kind}/decoder.layers.{layer}.self_attention.linear_qkv"
            q, k, v = (found.pop(f"{base}.{part}.weight") for part in "qkv")
            assert (q.shape[0], k.shape[0], v.shape[0]) == (model.heads * head, groups * head, groups * head)
            by_group = [part.view(groups, -1, model.hidden) for part in (q, k, v)]
            assert torch.equal(torch.cat(by_group, 1).flatten(0, 1), truth.pop(f"{base}.weight"))
            fc1 = ["mlp"] if not model.experts else [f"mlp.experts.{number}" for number in range(model.experts)]
            for name_ in fc1:
                base = f"{kind}/decoder.layers.{layer}.{name_}.linear_fc1"
                halves = [found.pop(f"{base}.{half}.weight") for half in ("gate", "up")]
                if not model.grouped:
                    assert torch.equal(torch.cat(halves), truth.pop(f"{base}.weight")), base
    if model.grouped:  # the gather knows these as one tensor a matrix, transposed
        truth = {key: value for key, value in truth.items() if ".experts.weight" not in key}
        found = {key: value for key, value in found.items() if ".experts." not in key}
    truth = {_named_as_in_files(key): value for key, value in truth.items()}
    shared = found.keys() & truth.keys()
    assert {key for key in truth if key not in shared and not _is_part(key)} == set()
    assert [key for key in shared if not torch.equal(found[key], truth[key])] == []
    assert {key for key in found if key not in shared and not _is_part(key)} == set()


def _named_as_in_files(key: str) -> str:
    """Megatron names a norm after the matrix behind it, with which it can be fused; the gather does not."""
    key = key.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    return key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


def _is_part(key: str) -> bool:
    """Tell the tensors that are not compared one by one: biases, and the matrix of shared experts."""
    return "linear_qkv" in key or "linear_fc1" in key


def test_padding_is_left_out_where_the_vocabulary_is_known(tmp_path: Path) -> None:
    model = replace(MODELS["grouped queries, biases"], vocab=96)
    old = ckpt.world(model, Split(tp=4))
    for rank in old:
        bed.fill(rank.holding)
    path = ckpt.save(tmp_path, old, vocab_size=61)
    with Checkpoint.open(path) as checkpoint:
        shapes = {entry.key: entry.shape for entry in checkpoint.index.entries if entry.padded}
    assert shapes
    assert {shape[0] for shape in shapes.values()} == {61}
    new = ckpt.world(replace(model, vocab=64), Split(tp=2), empty=True)
    for rank in new:
        bed.poison(rank.holding)
    ckpt.load(path, new)
    was, now = _canonical(old), _canonical(new)
    for key, value in now.items():
        kept = 61 if key.split("/")[1] in {key.split("/")[1] for key in shapes} and not key.startswith("step") else len(value)
        assert torch.equal(value[:kept], was[key][:kept]), key
        assert not value[kept:].any(), key


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = ckpt.save(tmp_path, _filled("fp32, tied", Split(tp=2)))
    with pytest.raises(Unplannable, match=r"decoder.layers.1.*this model has no place for it"):
        ckpt.load(path, ckpt.world(replace(MODELS["fp32, tied"], layers=1), ONE))
    with pytest.raises(Unplannable, match=r"decoder.layers.2.*does not have it"):
        ckpt.load(path, ckpt.world(replace(MODELS["fp32, tied"], layers=3), ONE))
    with pytest.raises(Unplannable, match=r"main/.*does not have it"):
        ckpt.load(path, ckpt.world(replace(MODELS["fp32, tied"], dtype=BF16), ONE))


def test_a_rank_that_is_missing_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(Unplannable, match="no rank of the old world holds"):
        ckpt.save(tmp_path, _filled("fp32, tied", Split(tp=2, pp=2, dp=2))[:-1])


def test_a_number_that_changed_on_its_way_is_noticed_whoever_answers_for_it(tmp_path: Path) -> None:
    ranks = _filled("grouped queries, biases", Split(tp=2, dp=2))
    with Checkpoint.open(ckpt.save(tmp_path, ranks)) as checkpoint:
        listings = [listing_of(rank.holding) for rank in ranks]
        assert {t.key for t in tensors_in(listings)} == {t.key for t in checkpoint.index.whole}
        piece = next(p for p in ranks[3].holding.pieces if p.box.key.startswith("exp_avg_sq/") and p.box.numel > 1)
        at = (0,) * len(piece.box.shape)
        kept = piece.view()[at].clone()
        piece.view()[at] += 1
        with pytest.raises(BadCheckpoint, match=r"exp_avg_sq/.* is damaged"):
            ckpt.check(checkpoint, ranks)
        piece.view()[at] = kept
        ckpt.check(checkpoint, ranks)


def test_what_was_loaded_is_summed_up_with_one_copy_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that does not lie on the CPU in C order has to be copied to be looked at."""
    tensors = [torch.arange(12.0).view(3, 4).t() for _ in range(9)]
    holding = Holding.of(
        Piece(Box(f"weight/{i}", "float32", (4, 3), (0, 0), (4, 3)), lambda tensor=tensor: tensor)
        for i, tensor in enumerate(tensors)
    )
    rank = Rank([], None, holding, {})
    vars(rank).update(fused={})
    copies: list[weakref.ref] = []
    most = 0

    def counting(tensor: torch.Tensor):
        nonlocal most
        bits = bits_of_tensor(tensor)
        copies.append(weakref.ref(bits))
        most = max(most, sum(each() is not None for each in copies))
        return bits

    with Checkpoint.open(ckpt.save(tmp_path, [rank])) as checkpoint:
        monkeypatch.setattr("resharding.checkpoint.writer.bits_of_tensor", counting)
        ckpt.check(checkpoint, [rank])
    assert len(copies) == 9
    assert most <= 2
