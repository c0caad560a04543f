from __future__ import annotations

from types import SimpleNamespace

import bed
import pytest
from bed import Model, Split

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


@pytest.mark.parametrize("split", [Split(tp=3), Split(tp=4), Split(pp=2), Split(pp=3), Split(pp=2, vpp=2), Split(pp=4, vpp=2)])
def test_megatron_agrees(split):
    """A layout is refused exactly if Megatron cannot build the model in it."""
    model = Model(layers=4, heads=4, groups=2)
    config = SimpleNamespace(num_layers=4, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=model.ffn)
    said = misfit(config, tp=split.tp, pp=split.pp, vpp=split.vpp)
    with bed.rank_of(split, 0):
        if said is None:
            bed.build(model, split)
        else:
            with pytest.raises((AssertionError, ValueError)):
                bed.build(model, split)
