"""What the benchmarks share: the model, the data, starting jobs, reading their logs."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parent.parent
TRAIN = str(ROOT / "examples" / "gpt" / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--standalone"]
LIVERUN = [sys.executable, "-m", "liverun"]
PATIENCE_S = 300.0

LARGE = {
    "--num-layers": 8, "--hidden-size": 512, "--num-attention-heads": 8, "--num-query-groups": 4,
    "--ffn-hidden-size": 1536, "--seq-length": 32, "--micro-batch-size": 1, "--global-batch-size": 4,
}  # fmt: skip
"""A GPT of 26 M parameters; see ``num_parameters``."""


def num_parameters(flags: dict) -> int:
    """Count the parameters of the model that ``flags`` describe, embeddings tied."""
    hidden, heads, groups = (
        flags["--hidden-size"],
        flags["--num-attention-heads"],
        flags["--num-query-groups"],
    )
    head = hidden // heads
    attention = hidden * head * (heads + 2 * groups) + hidden * hidden
    return flags["--num-layers"] * (attention + 3 * hidden * flags["--ffn-hidden-size"] + 2 * hidden) + (
        384 * hidden + hidden
    )


def as_arguments(flags: dict) -> list[str]:
    return [str(word) for pair in flags.items() for word in pair]


def layout_arguments(layout: str) -> list[str]:
    """Turn ``tp=2,pp=1`` into Megatron's own flags."""
    names = {"tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size"}
    sizes = dict(part.split("=") for part in layout.split(","))
    return [word for axis, size in sizes.items() for word in (names[axis], size)]


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "LIVERUN_RUN_DIR": str(folder / "runs"),
    }


def prepare_data(folder: Path) -> str:
    prefix = str(folder / "data" / "stdlib")
    command = [sys.executable, ROOT / "examples" / "gpt" / "prepare.py", "--output", prefix]
    subprocess.run(
        [*command, "--max-bytes", "4000000"], env=environment(folder), check=True, stdout=sys.stderr
    )
    return prefix


class Run:
    """A job that a benchmark has started, and its log of steps."""

    def __init__(self, command: list, folder: Path, name: str) -> None:
        self.losses = folder / f"{name}.jsonl"
        self.output = folder / f"{name}.log"
        self.started_s = time.perf_counter()
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--loss-log", self.losses, "--log-interval", "0"],
                env=environment(folder), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def steps(self) -> list[dict]:
        if not self.losses.exists():
            return []
        text = self.losses.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for(self, num_steps: int) -> list[dict]:
        deadline_s = time.perf_counter() + PATIENCE_S
        while len(steps := self.steps()) < num_steps:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"ended early ({self.process.returncode}): {self.output.read_text()[-2000:]}"
                )
            if time.perf_counter() > deadline_s:
                raise RuntimeError(f"{num_steps} steps did not come in {PATIENCE_S:.0f} s")
            time.sleep(0.02)
        return steps

    def wait(self) -> list[dict]:
        if self.process.wait(timeout=PATIENCE_S):
            raise RuntimeError(f"exit code {self.process.returncode}: {self.output.read_text()[-2000:]}")
        return self.steps()

    def end(self) -> None:
        """Leave nothing running: the session that was started ends as a whole."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()


def conditions() -> dict:
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
        "load": os.getloadavg()[0],
    }
