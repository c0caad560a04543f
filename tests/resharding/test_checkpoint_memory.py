"""What reading, writing and converting a checkpoint takes of memory: the largest tensor counts, not how many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import deepspeed_made
import foreign
import torch
from bed import Model, Split
from checkpoint_memory_rank import FEW, KINDS, LARGEST, MANY, NAMES, SHAPE
from test_checkpoint_buckets import saved

from resharding.checkpoint.files import STAGING_BYTES

HERE = Path(__file__).parent
AT_MOST = {
    "make": 2 * LARGEST, "write": 3 * LARGEST, "back": 5 * LARGEST, "buckets": 5 * LARGEST, "zero": 4 * LARGEST,
    "zero_3": 4 * LARGEST, "slices": 4 * LARGEST, "universal": 2 * LARGEST, "export": 3 * STAGING_BYTES,
    "read": 3 * STAGING_BYTES,
}  # fmt: skip
"""From any source to ours; from ours to torch_dist; from that, from its ``dp_reshardable``, from ZeRO's files of stages 1
and 3 and of two tensor parallel ranks, and from DeepSpeed's universal ones; to weights for Hugging Face; and into the
places of a layout."""
IN_BUCKETS = Model(hidden=SHAPE[1], ffn=SHAPE[0] // 2, bucket=None)
"""its largest tensor is as large, and one bucket has all of them"""


def test_one_tensor_is_in_memory_at_a_time_however_many_there_are(tmp_path: Path) -> None:
    for layers in (FEW, MANY):
        theirs = tmp_path / f"saved{layers}"
        theirs.mkdir()
        saved(theirs, replace(IN_BUCKETS, layers=layers), Split()).rename(tmp_path / f"buckets{layers}")
        names = [f"decoder.layers.{layer}.{name}.weight" for layer in range(layers) for name in NAMES]
        whole = {name: torch.ones(SHAPE) for name in names}
        deepspeed_made.make(tmp_path / f"zero{layers}", {name: [value] for name, value in whole.items()}, {})
        cut = {name: list(value.chunk(2, dim=int("fc2" in name))) for name, value in whole.items()}
        deepspeed_made.make(tmp_path / f"slices{layers}", cut, {})
        params = {name: value.bfloat16() for name, value in whole.items()}
        foreign.zero(tmp_path / f"zero-3-{layers}", params, frozen={"frozen": torch.ones(SHAPE)})
        state = {f"{kind}/{name}": value for kind in KINDS for name, value in whole.items()}
        foreign.universal(tmp_path / f"universal{layers}", state, step=3, groups=[{"lr": 0.5}])
    words = [sys.executable, "-W", "ignore", str(HERE / "checkpoint_memory_rank.py"), str(tmp_path)]
    environ = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }  # fmt: skip
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    print({name: [round(peak / 2**20, 1) for peak in both] for name, both in peaks.items()}, "MiB, of few layers and of many")
    assert peaks.keys() == AT_MOST.keys()
    assert [name for name, both in peaks.items() if max(both) > AT_MOST[name]] == []
