"""Starting real jobs from tests, and looking at them the way a user does: through the command line and its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
LIVERUN = [sys.executable, "-m", "liverun"]
DEADLINE_S = 120.0
"""for anything a test waits for; far more than it takes, so that only a hang meets it"""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole JSON line of a file that may still grow."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def environment(**extra: str) -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("LIVERUN_", "PET_"))}
    return {**keep, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "NO_COLOR": "1", **extra}


def torchrun(*script: str, nproc: int) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun to its end."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *script],
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )


class Launched:
    """A job that runs under ``liverun``, with its run folder and its output in ``folder``."""

    def __init__(
        self, folder: Path, *script: str, nproc: int = 2, standbys: int = 0, options: tuple[str, ...] = (),
        probe: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.job = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.hurry = folder / "hurry"
        self.env = environment(PROBE=json.dumps({**(probe or {}), "hurry": str(self.hurry)}))
        command = [
            *LIVERUN, "run", "--standalone", f"--nproc-per-node={nproc}", f"--standbys={standbys}",
            f"--run-dir={self.run_dir}", f"--job={self.job}", "--shutdown-timeout=10", *options, *script,
        ]
        self.log = (folder / "liverun.log").open("w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=self.env, cwd=folder)

    def cli(self, *words: str, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        """Run ``liverun WORDS`` in a second process."""
        return subprocess.run(
            [*LIVERUN, *words], env={**self.env, "LIVERUN_RUN_DIR": str(self.run_dir)}, cwd=self.folder,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )

    def resize(self, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return self.cli("resize", self.job, "--timeout", str(timeout_s), *words)

    def must_resize(self, *words: str) -> None:
        done = self.resize(*words)
        assert done.returncode == 0, f"resize {words} failed: {done.stderr}\n{self.output()}"

    def status(self) -> dict[str, Any]:
        done = self.cli("status", self.job, "--json")
        assert done.returncode == 0, f"{done.stderr}\n{self.output()}"
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def ranks(self) -> dict[int, int]:
        """Pids by rank."""
        workers = [worker for node in self.status()["nodes"] for worker in node["workers"]]
        return {worker["rank"]: worker["pid"] for worker in workers if worker["rank"] is not None}

    def events(self) -> list[dict[str, Any]]:
        found = sorted(self.run_dir.rglob("events.jsonl"))
        return [event for path in found for event in read_lines(path)]

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events()]

    def until(self, what: str, true: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """Wait until ``true()`` is; fail with what the job said if it ends first or the deadline passes."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            found = true()
            if found:
                return found
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.output()}"
            time.sleep(0.05)
        raise AssertionError(f"{what} did not happen within {deadline_s} s:\n{self.output()}")

    def until_trains(self) -> None:
        self.until("the first world", lambda: "world" in self.kinds() or "active" in self.kinds())

    def until_standbys(self, num: int) -> None:
        self.until(f"{num} standbys", lambda: sum(node["standbys"] for node in self.status()["nodes"]) >= num)

    def finish(self, deadline_s: float = 300.0) -> int:
        """Let the job come to its end, no step of it slowed down any more; its exit code."""
        self.hurry.touch()
        code = self.process.wait(timeout=deadline_s)
        self.log.flush()
        return code

    def output(self) -> str:
        return (self.folder / "liverun.log").read_text()[-8000:]

    def close(self) -> list[psutil.Process]:
        """End the job if it still runs; return processes of it that are left, which must be none."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()
        end = time.monotonic() + 5
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.05)
        for process in left:
            process.kill()
        return left

    def _left(self) -> list[psutil.Process]:
        left = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("LIVERUN_JOB") == self.job and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return left
