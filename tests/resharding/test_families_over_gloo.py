"""Every kind of model between real processes, Megatron's groups and all, with ranks that join and leave; all checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import MODELS
from family_rank import SIZE
from processes import run_ranks

SHORT = ("experts", "Mamba, attention, MLP", "latent attention")


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names", [SHORT, pytest.param(tuple(name for name in MODELS if name not in SHORT), marks=pytest.mark.long)],
    ids=["three", "the others"],
)  # fmt: skip
def test_families_move_between_real_processes(
    names: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = request.config.getoption("--pairs-seed")
    seed = 17 if seed is None else seed
    script = Path(__file__).with_name("family_rank.py")
    outputs = run_ranks(((script, rank, tmp_path / "store", seed, *names) for rank in range(SIZE)), limit_s=600.0)
    found = [json.loads(out.splitlines()[-1]) for out in outputs]
    print({name: row["pair"] for name, row in found[0].items()}, f"--pairs-seed {seed}")
    for told in found:
        assert {name: row["wrong"] for name, row in told.items()} == {name: [] for name in names}
        assert all(row["pieces"] > 10 for row in told.values() if row["is_new"])
    assert [name for name in names if not sum(told[name]["moved"] for told in found)] == []
