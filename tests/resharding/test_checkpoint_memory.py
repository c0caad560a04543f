"""What reading, writing and converting a checkpoint takes of memory: the largest tensor counts, not how many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from checkpoint_memory_rank import LARGEST

from resharding.checkpoint.files import STAGING_BYTES

HERE = Path(__file__).parent
AT_MOST = {"make": 2 * LARGEST, "write": 3 * LARGEST, "back": 5 * LARGEST, "read": 3 * STAGING_BYTES}
"""From any source to ours; from ours to torch_dist; from that; and into the places of a layout."""


def test_one_tensor_is_in_memory_at_a_time_however_many_there_are(tmp_path: Path) -> None:
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
