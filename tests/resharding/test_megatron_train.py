from __future__ import annotations

from pathlib import Path

import oracle
import pytest
import torch
from processes import run_ranks


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_state_moves_between_real_worlds(dtype, tmp_path):
    """Train at tp=2, move to dp=2, train, move back to tp=2: the state equal bit for bit, the loss up to rounding."""
    script = Path(__file__).with_name("megatron_rank.py")
    run_ranks((script, rank, 2, tmp_path, dtype) for rank in range(2))
    for number in (1, 2):
        was = oracle.merge(tmp_path / f"before{number}.{rank}" for rank in range(2))
        now = oracle.merge(tmp_path / f"after{number}.{rank}" for rank in range(2))
        assert was.keys() == now.keys()
        assert [key for key in was if not torch.equal(was[key], now[key])] == []
        assert {was[key].item() for key in was if key.startswith("step/")} == {2.0 * number}
        assert sum(key.startswith("main/") for key in was) == (0 if dtype == "fp32" else 14)
        assert all(was[key].any() for key in was if key.startswith("exp_avg"))
    losses = torch.load(tmp_path / "losses")
    assert losses[0] == pytest.approx(losses[1], rel=1e-6 if dtype == "fp32" else 2e-2)
    assert losses[2] == pytest.approx(losses[3], rel=1e-6 if dtype == "fp32" else 2e-2)
    assert losses[4] < losses[0]
