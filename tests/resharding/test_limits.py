from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import bed
import pytest
from bed import Model, Split
from test_families import MODELS

from resharding import megatron
from resharding.limits import misfit

DENSE = {"num_layers": 12, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 96}


@pytest.mark.parametrize(
    ("facts", "sizes", "words"),
    [
        ({}, {"tp": 2, "pp": 3}, None),
        ({}, {"tp": 8}, None),  # Megatron shares a query group between ranks
        ({}, {"tp": 3}, "num_attention_heads=8 cannot be split over tp=3"),
        ({"num_attention_heads": 12, "num_query_groups": 4, "ffn_hidden_size": 96}, {"tp": 6}, "num_query_groups=4"),
        ({"ffn_hidden_size": 98}, {"tp": 4}, "ffn_hidden_size=98"),
        ({}, {"pp": 5}, "num_layers=12 cannot be split over pp=5"),
        ({}, {"pp": 4, "vpp": 3}, None),
        ({}, {"pp": 4, "vpp": 2}, "vpp=2"),
        ({}, {"vpp": 2}, "vpp=2 needs pp"),
        ({"account_for_embedding_in_pipeline_split": True, "num_layers": 11}, {"pp": 4}, None),
        ({"account_for_embedding_in_pipeline_split": True}, {"pp": 4}, "1 for embedding and loss"),
        ({"num_layers_in_first_pipeline_stage": 2}, {"pp": 3}, None),
        ({"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}, {"pp": 3}, None),
        ({"num_layers_in_first_pipeline_stage": 2}, {"pp": 4}, "leaves 10 layers"),
        ({"num_layers_in_first_pipeline_stage": 2}, {"pp": 2, "vpp": 2}, None),
        ({"num_layers_in_first_pipeline_stage": 3}, {"pp": 2, "vpp": 2}, "first pipeline stage has 3"),
        ({"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2}, {"pp": 2}, "8 layers"),
        ({"pipeline_model_parallel_layout": "x", "pipeline_model_parallel_size": 2}, {"pp": 4}, "is written for pp=2"),
        ({"pipeline_model_parallel_layout": "x", "pipeline_model_parallel_size": 2}, {"pp": 2}, None),
        ({}, {"ep": 2}, "ep=2 needs experts"),
        ({"num_moe_experts": 6}, {"ep": 4}, "num_moe_experts=6 cannot be split over ep=4"),
        ({"cp_comm_type": "a2a"}, {"tp": 4, "cp": 4}, "cp=4"),
        ({}, {"tp": 4, "vocab_size": 50257}, "vocab_size=50257"),
    ],
)
def test_misfits_are_said_in_one_sentence(facts, sizes, words):
    said = misfit(SimpleNamespace(**{**DENSE, **facts}), **sizes)
    if words is None:
        assert said is None
    else:
        assert words in (said or "")


FAMILIES = {
    **MODELS,
    "an odd expert": Model(experts=4, expert_ffn=25),
    "an odd shared expert": Model(experts=4, shared=15),
    "many heads, few Mamba groups": Model(hybrid="MMMM", heads=8, groups=8),
}
ANY = [
    Split(tp=2), Split(tp=3), Split(tp=4), Split(tp=8), Split(pp=2), Split(pp=3), Split(pp=2, vpp=2), Split(pp=4, vpp=2),
    Split(tp=2, cp=2), Split(tp=4, cp=4),
]  # fmt: skip
OF_EXPERTS = [Split(dp=2, ep=2), Split(dp=3, ep=3), Split(tp=4, dp=2, ep=2, etp=2), Split(dp=10, ep=2, etp=5)]


@functools.cache
def _chunks(name: str) -> list[Any]:
    with bed.rank_of(Split(), 0):
        return bed.build(FAMILIES[name], Split())[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_megatron_agrees(name: str) -> None:
    """A layout is refused, by what the model in another one says, exactly if Megatron cannot build the model in it."""
    model = FAMILIES[name]
    for split in [*ANY, *(OF_EXPERTS if model.experts else [])]:
        if model.bert and split.cp > 1:
            continue  # its attention would need kernels
        if model.bert and split.vpp > 1:
            continue  # Megatron's BertModel does not know virtual stages
        sizes = {axis: getattr(split, axis) for axis in ("tp", "pp", "vpp", "cp", "ep")} | {"etp": split.expert_tp}
        said = megatron.misfit_of(_chunks(name), sizes)
        assert (said is None) == _is_built(model, split), (split, said)


def _is_built(model: Model, split: Split) -> bool:
    layers = 0
    for stage in range(split.pp if model.hybrid else 1):  # a Mamba stack leaves layers out without a word
        try:
            with bed.rank_of(split, stage * split.size // split.pp):
                modules = [chunk.module for chunk in bed.build(model, split)[0]]
                layers += sum(len((module.encoder if model.bert else module.decoder).layers) for module in modules)
        except (AssertionError, ValueError):
            return False
    return not model.hybrid or layers == model.layers
