"""Exported weights, loaded by transformers, compute what Megatron computes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import bed
import ckpt
import pytest
import torch
from bed import Model, Split
from test_checkpoint_megatron import one_real_rank

from resharding.checkpoint.export import export_llama
from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.model import described, fused_in
from resharding.checkpoint.opened import Checkpoint
from resharding.megatron import holding_of, materialize_optimizer_state

VOCAB = 61
TOKENS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(3))

COMPUTE = """
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("llama")
assert type(model).__name__ == "LlamaForCausalLM"
with torch.no_grad():
    torch.save(model(torch.load("tokens.pt")).logits, "logits.pt")
"""
"""in a process of its own: the CPU device layer that Megatron needs here gets in the way of how transformers loads"""


def saved(folder: Path, model: Model):
    """Save a model with the numbers it was initialised with; return the folder, its logits, and what it says of itself."""
    with one_real_rank(folder):
        chunks, optimizer = bed.build(model, Split())
        materialize_optimizer_state(optimizer)
        rank = bed.Rank(chunks, optimizer, holding_of(chunks, optimizer), {})
        vars(rank).update(fused=fused_in(chunks))
        size = TOKENS.shape[1]
        mask = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)[None, None]
        with torch.no_grad():
            logits = chunks[0](TOKENS, torch.arange(size).expand(2, -1), mask)
        return ckpt.save(folder / "ours", [rank]), logits, described(chunks)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_transformers_computes_the_same_logits(tied: bool, tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    path, logits, about = saved(tmp_path, Model(layers=2, groups=2, tied=tied))
    with Checkpoint.open(path) as checkpoint:
        export_llama(checkpoint, tmp_path / "llama", model=about, vocab_size=VOCAB)
    torch.save(TOKENS, tmp_path / "tokens.pt")
    done = subprocess.run(
        [sys.executable, "-c", COMPUTE], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "logits.pt")
    assert found.shape == (2, 8, VOCAB)
    wanted = logits.view(2, 8, -1)[..., :VOCAB]
    assert float((found - wanted).abs().max()) < 1e-5
    assert float(wanted.abs().max()) > 0.1


def test_what_is_not_known_is_asked_for_and_other_models_are_refused(tmp_path: Path) -> None:
    path, _, about = saved(tmp_path, Model(layers=1, groups=2, experts=2, tied=False))
    with Checkpoint.open(path) as checkpoint:
        with pytest.raises(BadCheckpoint, match="does not say what rotary_base is; pass --rope-theta"):
            export_llama(checkpoint, tmp_path / "llama", model={})
        with pytest.raises(BadCheckpoint, match="has no gated MLP"):
            export_llama(checkpoint, tmp_path / "llama", model={**about, "rotary_base": 10000})
    assert not (tmp_path / "llama").exists()
