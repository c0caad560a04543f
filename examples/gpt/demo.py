"""Train on this machine and change the world of the job, live; started by scripts/demo.

A folder of its own holds everything, and is gone at the end. Ctrl-C ends the job as well.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIVERUN = [sys.executable, "-m", "liverun"]
CHANGES = [(2, "tp=2"), (1, "tp=1"), (2, "pp=2"), (4, "tp=2"), (4, "tp=2,pp=2"), (2, "tp=1")]
STEPS_BETWEEN = 12
PATIENCE_S = 120.0


@dataclass
class Change:
    """One line of the table at the end."""

    world: str
    pause_s: float
    moved_mb: float
    loss_before: float
    loss_after: float


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small GPT and change its world, live.")
    parser.add_argument("--data-path", help="prefix of prepared data; default: Python's own library")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="liverun-demo-") as folder:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "LIVERUN_RUN_DIR": f"{folder}/runs",
        }
        try:
            return demonstrate(Path(folder), args.data_path, environment)
        except KeyboardInterrupt:
            print("\nstopped")
            return 130


def demonstrate(folder: Path, data_path: str | None, environment: dict[str, str]) -> int:
    if data_path is None:
        data_path = str(folder / "stdlib")
        command = [sys.executable, HERE / "prepare.py", "--output", data_path, "--max-bytes", "20000000"]
        subprocess.run(command, env=environment, check=True)
    losses = folder / "loss.jsonl"
    stderr = folder / "stderr.log"
    train = [HERE / "train.py", "--data-path", data_path, "--loss-log", losses, "--train-steps", "2000"]
    with stderr.open("wb") as log:
        job = subprocess.Popen(
            [*LIVERUN, "run", "--nproc-per-node", "2", "--standbys", "2", *train], env=environment, stderr=log
        )
        try:
            changes = resize_again_and_again(job, losses, environment)
            subprocess.run([*LIVERUN, "stop"], env=environment, check=True)
            job.wait(timeout=60)
        except RuntimeError as error:
            print(f"{error}; the last it said:\n{stderr.read_text()[-2000:]}", file=sys.stderr)
            return 1
        finally:
            end(job)
    show(changes, read(losses))
    return 0


def resize_again_and_again(job, losses: Path, environment: dict[str, str]) -> list[Change]:
    changes = []
    wait_for_step(job, losses, STEPS_BETWEEN)
    for workers, layout in CHANGES:
        command = [*LIVERUN, "resize", "--workers", str(workers), "--layout", layout]
        print(f"\n$ liverun resize --workers {workers} --layout {layout}", flush=True)
        if subprocess.run(command, env=environment, check=False).returncode:
            raise RuntimeError("the resize failed")
        status = subprocess.run(
            [*LIVERUN, "status", "--json"], env=environment, check=True, capture_output=True, text=True
        )
        resize = json.loads(status.stdout)["last_resize"]
        generation = resize["to"]["generation"]
        steps = wait_for_step(job, losses, read(losses)[-1]["step"] + STEPS_BETWEEN)
        before = [step for step in steps if step["generation"] < generation][-1]
        after = next(step for step in steps if step["generation"] == generation)
        changes.append(
            Change(
                world=f"{workers} workers, {layout}",
                pause_s=resize["pause_s"],
                moved_mb=resize["bytes_moved"] / 1e6,
                loss_before=before["loss"],
                loss_after=after["loss"],
            )
        )
        print(
            f"  step {before['step']}: loss {before['loss']:.4f}  ->  step {after['step']}: "
            f"loss {after['loss']:.4f}   pause {resize['pause_s'] * 1000:.0f} ms",
            flush=True,
        )
    return changes


def wait_for_step(job, losses: Path, step: int) -> list[dict]:
    """Wait until ``step`` is done; return all steps so far."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        done = read(losses)
        if done and done[-1]["step"] >= step:
            return done
        if job.poll() is not None:
            raise RuntimeError(f"the job ended early with exit code {job.returncode}")
        time.sleep(0.05)
    raise RuntimeError(f"step {step} did not come within {PATIENCE_S:.0f} s")


def read(losses: Path) -> list[dict]:
    if not losses.exists():
        return []
    text = losses.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def end(job) -> None:
    """Leave nothing running, whatever happened."""
    for ask, patience_s in ((job.terminate, 40), (job.kill, 10)):
        if job.poll() is None:
            ask()
            try:
                job.wait(timeout=patience_s)
            except subprocess.TimeoutExpired:
                continue


def show(changes: list[Change], steps: list[dict]) -> None:
    print(f"\n{'new world':24}{'pause':>10}{'moved':>12}{'loss before':>14}{'after':>10}")
    for change in changes:
        print(
            f"{change.world:24}{change.pause_s * 1000:7.0f} ms{change.moved_mb:9.1f} MB"
            f"{change.loss_before:14.4f}{change.loss_after:10.4f}"
        )
    unbroken = [step["step"] for step in steps] == list(range(len(steps)))
    print(f"\n{len(steps)} steps, loss {steps[0]['loss']:.2f} -> {steps[-1]['loss']:.2f}; ", end="")
    print("no step was lost or repeated." if unbroken else "STEPS ARE MISSING.")


if __name__ == "__main__":
    sys.exit(main())
