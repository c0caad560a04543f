"""Folders as DeepSpeed's ZeRO stage 1 writes them, of several tensor parallel ranks, put together by hand.

Two data parallel ranks share each tensor parallel rank's flat vector; see ``resharding/checkpoint/deepspeed.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
Slices = Mapping[str, Sequence[torch.Tensor]]
"""of main values, by name: what each tensor parallel rank has; ranks after the last one lack it"""


def moment(kind: str, name: str, main: torch.Tensor) -> torch.Tensor:
    """Return numbers that tell a parameter's kinds from each other; linear, so that a mean stays one."""
    return main * (3 if kind == "exp_avg" else 5) + len(name)


def make(folder: Path, slices: Slices, info: Mapping[str, Any], *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write ``folder``, of step 3. ``info`` is what DeepSpeed calls ``universal_checkpoint_info``."""
    path = folder / "global_step3"
    path.mkdir(parents=True)
    for tensor_rank in range(max(map(len, slices.values()))):
        held = {name: ranks[tensor_rank] for name, ranks in slices.items() if tensor_rank < len(ranks)}
        model = {
            "module": {name: value.to(dtype) for name, value in held.items()},
            "param_shapes": [{name: value.shape for name, value in held.items()}],
            "global_steps": 3, "global_samples": 24, "universal_checkpoint_info": dict(info),
            "checkpoint_parallel_dimensions": {"tp_degree": max(map(len, slices.values()))},
        }  # fmt: skip
        torch.save(model, path / f"mp_rank_{tensor_rank:02d}_model_states.pt")
        kinds = {"main": held, **{kind: {n: moment(kind, n, v) for n, v in held.items()} for kind in MOMENTS}}
        flat = {kind: torch.cat([value.reshape(-1).float() for value in each.values()]) for kind, each in kinds.items()}
        half = -(-len(flat["main"]) // 2)
        for rank in range(2):
            mine = {kind: value[rank * half : (rank + 1) * half].clone() for kind, value in flat.items()}
            state = {"step": torch.tensor(3.0), **{kind: mine[kind] for kind in MOMENTS}}
            optimizer = {
                "single_partition_of_fp32_groups": [mine["main"]], "partition_count": [2],
                "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.5, "params": [0]}]},
                "param_alignment_paddings": None,
            }  # fmt: skip
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_{tensor_rank:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer}, path / name)
    (folder / "latest").write_text("global_step3")
    return folder
