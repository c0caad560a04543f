"""One of two ranks of ``test_resume``: RANK FOLDER PORT. Saves two checkpoints, then loads copies that are damaged."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "resharding"))
import bed
import test_resume
import torch
import torch.distributed as dist

import liverun
from liverun.checkpoint import Settings
from liverun.switch import Position
from resharding import megatron


class Counter:
    """State of the script's own."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["value"] == test_resume.REFUSED and dist.get_rank() == 1:
            raise RuntimeError("no\nmore")
        self.value = state["value"]


def main() -> None:
    rank, folder, port = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    (folder / "whole").mkdir(exist_ok=True)
    os.environ.update(
        RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        LIVERUN_CHECKPOINT_DIR=str(folder / "whole"),
    )  # fmt: skip
    counter = Counter()

    def build(world: liverun.World) -> liverun.Training:
        world.seed(1)
        chunks, optimizer = bed.build(bed.Model(layers=1), bed.Split(dp=2))
        return liverun.Training(model=chunks, optimizer=optimizer, extra={"counter": counter})

    job = liverun.join(build)
    training, saver = job.training, job._saver
    assert saver is not None
    megatron.materialize_optimizer_state(training.optimizer)
    weight = next(training.model[0].parameters()).detach()
    (leaf,) = megatron.leaves(training.optimizer)
    states = list(leaf.optimizer.state.values())

    def save(root: Path, step: int) -> None:
        saver.settings = Settings(folder=root)
        weight.fill_(step)
        for state in states:
            state["exp_avg"].fill_(step)
            state["step"].fill_(step)
        counter.value = step
        torch.manual_seed(100 * step + int(rank))
        saver.save(Position(step=step, consumed_samples=8 * step))
        saver.wait()
        dist.barrier()

    for step in (10, 20):
        save(folder / "whole", step)
    told = {}
    for name, damage in test_resume.DAMAGES.items():
        root = folder / name
        if rank == "0":
            shutil.copytree(folder / "whole", root)
        dist.barrier()
        if name == "a script that refuses":
            save(root, test_resume.REFUSED)
        if rank == "0":
            damage(root)
        dist.barrier()
        saver.settings = Settings(folder=root)
        counter.value = -1
        weight.fill_(-1)
        for state in states:
            state["exp_avg"].fill_(-1)
            state["step"].fill_(-1)
        saver._known().standing.training.extra = {} if name == "another framework's, renamed" else {"counter": counter}
        torch.manual_seed(0)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                position = saver.load(job.world.device)
            except SystemExit as end:
                told[name] = {"end": str(end), "said": said.getvalue()}
                continue
        told[name] = {
            "step": position and position.step, "weight": float(weight.flatten()[0]), "extra": counter.value,
            "drawn": torch.initial_seed(), "said": said.getvalue(),
            "moments": sorted({float(value) for state in states for value in state["exp_avg"].flatten()}),
            "steps": sorted({float(state["step"]) for state in states}),
            "lrs": sorted(group["lr"] for group in leaf.optimizer.param_groups),
        }  # fmt: skip
    dist.barrier()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
