"""Every kind of model between real processes, Megatron's groups and all, with ranks that join and leave; all checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import MODELS
from family_rank import SIZE

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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(tmp_path / "store"), str(seed), *names],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(SIZE)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * SIZE, outputs
    found = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    print({name: row["pair"] for name, row in found[0].items()}, f"--pairs-seed {seed}")
    for told in found:
        assert {name: row["wrong"] for name, row in told.items()} == {name: [] for name in names}
        assert all(row["pieces"] > 10 for row in told.values() if row["is_new"])
    assert [name for name in names if not sum(told[name]["moved"] for told in found)] == []
