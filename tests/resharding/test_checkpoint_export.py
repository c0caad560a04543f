"""Exported weights, loaded by transformers, compute what Megatron computes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bed
import ckpt
import pytest
import torch
from bed import Model, Split
from megatron.core import dist_checkpointing
from test_checkpoint_megatron import one_real_rank, state_of

from resharding.checkpoint.convert import convert
from resharding.checkpoint.export import export_llama
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.megatron_dist import MegatronSource
from resharding.checkpoint.model import described, fused_in
from resharding.checkpoint.opened import Checkpoint
from resharding.megatron import holding_of, materialize_optimizer_state

VOCAB = 61
TOKENS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(3))

COMPUTE = """
import sys, torch, transformers
for name in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(name)
    assert type(model).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        torch.save(model(torch.load("tokens.pt")).logits.float(), f"{name}.pt")
"""
"""in a process of its own: the CPU device layer that Megatron needs here gets in the way of how transformers loads"""


def compute(chunk: torch.nn.Module) -> torch.Tensor:
    """Return Megatron's logits."""
    size = TOKENS.shape[1]
    mask = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        return chunk(TOKENS, torch.arange(size).expand(2, -1), mask).float()


def computed_by_transformers(folder: Path, *names: str) -> list[torch.Tensor]:
    torch.save(TOKENS, folder / "tokens.pt")
    done = subprocess.run(
        [sys.executable, "-c", COMPUTE, *names], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{name}.pt") for name in names]


def gap(found: torch.Tensor, logits: torch.Tensor) -> float:
    wanted = logits.view(2, 8, -1)[..., :VOCAB]
    assert found.shape == wanted.shape
    assert float(wanted.abs().max()) > 0.1
    return float((found - wanted).abs().max())


def saved(folder: Path, model: Model):
    """Save a model with the numbers it was initialised with; return the folder, its logits, and what it says of itself."""
    with one_real_rank(folder):
        chunks, optimizer = bed.build(model, Split())
        materialize_optimizer_state(optimizer)
        rank = bed.Rank(chunks, optimizer, holding_of(chunks, optimizer), {})
        vars(rank).update(fused=fused_in(chunks))
        logits = compute(chunks[0])
        return ckpt.save(folder / "ours", [rank]), logits, described(chunks)


def test_what_megatron_saved_computes_the_same_logits_in_transformers(tmp_path: Path) -> None:
    """By way of a checkpoint of ours, which is told the model once: when it is converted."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    wanted = {}
    models = {
        "fp32": Model(layers=2, groups=2, bucket=None), "bf16": Model(layers=1, dtype=torch.bfloat16, bucket=None)
    }  # fmt: skip
    for name, model in models.items():
        (tmp_path / name / "iter_0000007").mkdir(parents=True)
        with one_real_rank(tmp_path / name):
            chunks, optimizer = bed.build(model, Split())
            materialize_optimizer_state(optimizer)
            wanted[name] = compute(chunks[0])
            state = {**state_of(chunks, optimizer), "iteration": 7, "consumed_samples": 56}
            dist_checkpointing.save(state, str(tmp_path / name / "iter_0000007"))
        source = MegatronSource(tmp_path / name / "iter_0000007", model=described(chunks))
        with Checkpoint.open(convert(source, tmp_path / name / "ours").path) as checkpoint:
            export_llama(checkpoint, tmp_path / f"{name}-llama", model={}, vocab_size=VOCAB)
    for (name, logits), found in zip(
        wanted.items(), computed_by_transformers(tmp_path, "fp32-llama", "bf16-llama"), strict=True
    ):
        assert gap(found, logits) < (1e-5 if name == "fp32" else 2e-2), name


@pytest.mark.long
def test_biases_and_a_head_of_its_own_compute_the_same_logits(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    path, logits, about = saved(tmp_path, Model(layers=2, groups=2, tied=False, bias=True))
    with Checkpoint.open(path) as checkpoint:
        assert any(entry.name.endswith("linear_fc2.bias") for entry in checkpoint.index.entries)
        export_llama(checkpoint, tmp_path / "llama", model=about, vocab_size=VOCAB)
    (found,) = computed_by_transformers(tmp_path, "llama")
    assert gap(found, logits) < 1e-5


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"activation_func": "gelu"}, r"has activation_func 'gelu', and models of the Llama family have 'silu'; it cannot be"),
        ({"rotary_interleaved": True}, "has rotary_interleaved True, and models of the Llama family have False"),
        ({"rotary_scaling": True}, "has rotary_scaling True, and models of the Llama family have False"),
        ({"rotary_percent": 0.5}, "has rotary_percent 0.5, and models of the Llama family have 1.0"),
        ({"normalization": "LayerNorm"}, "has normalization 'LayerNorm'"),
        ({"position_embedding_type": "none"}, "has position_embedding_type 'none'"),
        ({"layernorm_zero_centered_gamma": True}, "has layernorm_zero_centered_gamma True"),
        ({"softmax_scale": 0.5}, "has softmax_scale 0.5, and models of the Llama family have None"),
        *(
            ({name: None}, f"does not say what {name} is; write it into the JSON of --model-config")
            for name in ("activation_func", "normalization", "rotary_percent", "rotary_scaling")
        ),
    ],
)
def test_a_model_that_the_family_does_not_have_or_that_is_not_known_is_refused(
    about: dict, words: str, small: tuple[Path, dict], tmp_path: Path
) -> None:
    path, said = small
    model = {name: value for name, value in {**said, **about}.items() if value is not None}
    with Checkpoint.open(path) as checkpoint, pytest.raises(BadCheckpoint, match=words):
        export_llama(checkpoint, tmp_path / "llama", model=model)
    assert not (tmp_path / "llama").exists()


def test_biases_that_only_half_of_a_block_has_are_refused(small: tuple[Path, dict], tmp_path: Path) -> None:
    path, said = small
    with Checkpoint.open(path) as checkpoint:
        biased = replace(checkpoint.index.entries[0], key="weight/decoder.layers.0.self_attention.linear_qkv.q.bias")
        checkpoint.index = replace(checkpoint.index, entries=(*checkpoint.index.entries, biased))
        with pytest.raises(BadCheckpoint, match=r"has a bias in self_attention\.linear_qkv\.q and none in self_attention\.lin"):
            export_llama(checkpoint, tmp_path / "llama", model=said)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    path, _, about = saved(tmp_path_factory.mktemp("small"), Model(layers=1, groups=2))
    return path, about


def test_what_is_not_known_is_asked_for_and_other_models_are_refused(tmp_path: Path) -> None:
    path, _, about = saved(tmp_path, Model(layers=1, groups=2, experts=2, tied=False))
    with Checkpoint.open(path) as checkpoint:
        with pytest.raises(BadCheckpoint, match="does not say what rotary_base is; pass --rope-theta"):
            export_llama(checkpoint, tmp_path / "llama", model={})
        with pytest.raises(BadCheckpoint, match="has no gated MLP"):
            export_llama(checkpoint, tmp_path / "llama", model={**about, "rotary_base": 10000})
    assert not (tmp_path / "llama").exists()
