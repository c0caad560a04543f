"""Starts real agents, watches their events, and finds whatever they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
DEADLINE_S = 60.0
QUICK = "last_call_timeout=0,keep_alive_interval=1,keep_alive_max_attempt=3"
"""``--rdzv-conf`` of jobs of several nodes: nobody is waited for, and a node is lost after 3 s of silence"""


def until(what: str, condition: Any, deadline_s: float = DEADLINE_S) -> Any:
    """Wait for a condition to return something true; a deadline, never a guess, ends the wait."""
    deadline = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {deadline_s} s for {what}"
        time.sleep(0.01)


def processes_with(mark: str) -> list[int]:
    """Every process whose environment carries the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


@dataclass
class Bed:
    """A folder of jobs, and the environment that everything in a test runs in."""

    folder: Path
    mark: str
    agents: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.folder / "jobs"

    @property
    def end_file(self) -> Path:
        return self.folder / "end"

    def environ(self, **more: str) -> dict[str, str]:
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith(("LIVERUN_", "PET_", "TORCHELASTIC_"))
        }
        clean.update(
            LIVERUN_RUN_DIR=str(self.root), FAKE_END=str(self.end_file), OMP_NUM_THREADS="1", NO_COLOR="1",
            COLUMNS="200",
        )  # fmt: skip
        name, _, value = self.mark.partition("=")
        return {**clean, name: value, **more}

    def launch(
        self, *words: str, cwd: Path | None = None, stdout: Any = None, prefix: tuple[str, ...] = (), **environ: str
    ) -> Agent:
        """Start an agent; ``--preload none`` unless the test says otherwise. ``prefix``: what runs it elsewhere."""
        if "LIVERUN_PRELOAD" not in environ:
            environ["LIVERUN_PRELOAD"] = "none"
        number = len(self.agents)
        out, err = self.folder / f"agent{number}.out", self.folder / f"agent{number}.err"
        with out.open("w") as out_file, err.open("w") as err_file:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "liverun", *words], env=self.environ(**environ),
                cwd=cwd or self.folder, stdout=stdout or out_file, stderr=err_file, stdin=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        self.agents.append(process)
        return Agent(self, process, out, err)

    def fake(self, nproc: int, standbys: int = 0, *words: str, behave: dict[str, Any] | None = None) -> Agent:
        """Start a job of fake workers and wait for its first world."""
        agent = self.launch(
            "--nproc-per-node", str(nproc), "--standbys", str(standbys), *words, str(FAKE_WORKER),
            FAKE_BEHAVE=json.dumps(behave or {}),
        )  # fmt: skip
        agent.event("world")
        return agent

    def cli(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "liverun", *words], env=self.environ(**environ), cwd=self.folder, check=False,
            capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def cli_start(self, *words: str) -> subprocess.Popen[str]:
        """Start one command."""
        process = subprocess.Popen(
            [sys.executable, "-m", "liverun", *words], env=self.environ(), cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.agents.append(process)
        return process

    def script(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)


@dataclass
class Agent:
    """One agent that a test has started."""

    bed: Bed
    process: subprocess.Popen[str]
    out: Path
    err: Path
    root: Path | None = None
    """where its run folder is, if not where the bed has them"""

    @property
    def folder(self) -> Path:
        """The job's run folder."""

        def find() -> Path | None:
            for path in (self.root or self.bed.root).glob("*/job.json"):
                with contextlib.suppress(ValueError):
                    if json.loads(path.read_text())["pid"] == self.process.pid:
                        return path.parent
            return None

        return until("the run folder", lambda: find() or self._dead("it had a run folder"))

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        if not path.exists():
            return []
        text = path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events()]

    def event(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for an event of that kind, the ``count``-th one."""

        def find() -> dict[str, Any] | None:
            found = [event for event in self.events() if event["kind"] == kind]
            return found[count - 1] if len(found) >= count else self._dead(f"event {kind}")

        return until(f"event {kind} ({count})", find)

    def _dead(self, what: str) -> None:
        if self.process.poll() is not None and not list(self.bed.root.glob("*/status.json")):
            raise AssertionError(f"the agent ended before {what}: {self.err.read_text()}")

    def status(self) -> dict[str, Any]:
        return json.loads(self.bed.cli("status", "--json").stdout)

    def workers(self) -> list[dict[str, Any]]:
        return self.status()["nodes"][0]["workers"]

    def pids(self) -> dict[str, int]:
        return {row["id"]: row["pid"] for row in self.workers()}

    def log(self, worker: str, name: str = "stdout") -> str:
        path = self.folder / "logs" / worker / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stdout(self) -> str:
        return self.out.read_text(errors="replace")

    def stderr(self) -> str:
        return self.err.read_text(errors="replace")

    def finish(self) -> int:
        """Let fake workers come to their end; the agent's exit code."""
        self.bed.end_file.touch()
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def closing(bed: Bed) -> Iterator[Bed]:
    """Hand out the bed; afterwards nothing may be left of what it started."""
    yield bed
    for process in bed.agents:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    try:
        until("every process of this test to end", lambda: not processes_with(bed.mark), 10.0)
    except AssertionError:
        left = processes_with(bed.mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"processes {left} were left behind") from None
