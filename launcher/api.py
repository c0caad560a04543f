"""liverun from Python, in the shapes of torch: ``main(args)``, ``parse_min_max_nnodes``, ``elastic_launch``.

A job runs in a process of its own, ``liverun run``, and ends with the caller: nothing of the caller's process is
touched but its signal handlers, and those only while the job runs. torch is imported when one of these is called
(configurations and errors are torch's own), never by the agent.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from liverun.calls import read_results, write_call

OURS = (
    "standbys", "layout", "job", "run_dir", "staging", "verify", "keep", "defer", "preload", "ranks_filter",
    "keep_runs", "checkpoint_dir", "checkpoint_every", "keep_last", "restart", "notices", "notice_file",
    "notice_signal",
)  # fmt: skip
"""options that torchrun does not have"""
AGENT_CODE = (
    "import ctypes, os, signal, sys\n"
    "sys.path[: bool(sys.path) and sys.path[0] == ''] = [{root!r}]\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)\n"  # a caller that dies takes the job with it
    "if os.getppid() != {parent}: sys.exit(143)\n"
    "from launcher.cli import main\n"
    "main()\n"
)
EXIT_USAGE = 2


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Read ``N`` or ``MIN:MAX``. Raises ``RuntimeError``, as torch does, and ``ValueError`` for no number."""
    parts = nnodes.split(":")
    if len(parts) > 2:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')
    return int(parts[0]), int(parts[-1])


def main(args: Sequence[str] | None = None) -> None:
    """Do what ``torch.distributed.run.main`` does: torchrun's command line, and our own options.

    Raises ``SystemExit`` for a wrong command line, ``ValueError`` for a wrong value, torch's
    ``ChildFailedError`` when a worker fails and ``SignalException`` when a signal ends the job.
    """
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    errors.record(_main)(args)


def _main(args: Sequence[str] | None) -> None:
    run = importlib.import_module("torch.distributed.run")
    parser: argparse.ArgumentParser = run.get_args_parser()
    given = parser.get_default("start_method") if "PET_START_METHOD" in os.environ else None
    parser.set_defaults(start_method=given)
    for name in OURS:
        flags = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
        parser.add_argument(*flags, default=None)
    values = parser.parse_args(args)
    low, high = parse_min_max_nnodes(values.nnodes)
    if not 0 < low <= high:
        raise AssertionError(f"min_nodes must be > 0 and <= max_nodes, got {low} and {high}")
    if values.max_restarts < 0:
        raise AssertionError("max_restarts must be >= 0")
    words = []
    if high > 1 and values.master_addr == parser.get_default("master_addr"):
        values.master_addr = None  # torch's 127.0.0.1 is where no other node is
    if high > 1 and values.node_rank == parser.get_default("node_rank"):
        values.node_rank = None  # torch's 0 is nobody's in particular
    for action in parser._actions:
        value = getattr(values, action.dest, None)
        if not action.option_strings or action.dest == "help" or value is None:
            continue
        if isinstance(value, bool):
            words += [action.option_strings[-1]] if value else []
        elif action.dest == "nproc_per_node":
            words.append(f"--nproc-per-node={run.determine_local_world_size(value)}")
        elif isinstance(value, list):
            words += [f"--{action.dest}={_joined(value)}"] if value else []
        else:
            words.append(f"--{action.dest}={value}")
    name = Path(values.training_script).name
    _launch(name, words, [values.training_script, *values.training_script_args], signals=values.signals_to_handle)


class elastic_launch:  # noqa: N801  (torch's name)
    """Launch a function or a program as workers: ``elastic_launch(config, entrypoint)(*args)``.

    ``config`` is a torch ``LaunchConfig``. The result maps each global rank to what its function
    returned; a program's is empty. Function, arguments and results are pickled; nothing of them is unpickled
    by the agent.
    """

    def __init__(self, config: Any, entrypoint: Callable[..., Any] | str | None) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job to its end. Raises torch's ``ChildFailedError`` when a worker fails."""
        entrypoint, words = self._entrypoint, config_words(self._config)
        if entrypoint is None:
            raise AssertionError("there is nothing to launch: entrypoint is None")
        signals = self._config.signals_to_handle
        if isinstance(entrypoint, str):
            name = importlib.import_module("torch.distributed.launcher.api")._get_entrypoint_name(
                entrypoint, list(args)
            )
            script = [entrypoint, *map(str, args)]
            _launch(name, [*words, "--no-python"], script, signals=signals)
            return {}
        folder = Path(tempfile.mkdtemp(prefix="liverun-call-"))
        try:
            payload = folder / "call"
            write_call(payload, entrypoint, args)
            environ = {"LIVERUN_FUNCTION": "1"}
            script = [str(payload), str(folder)]
            _launch(getattr(entrypoint, "__qualname__", str(entrypoint)), words, script, environ, signals=signals)
            return read_results(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def config_words(config: Any) -> list[str]:
    """Write a torch ``LaunchConfig`` as options. Raises ``ValueError`` for what has no equivalent."""
    specs = config.logs_specs
    if type(specs).__name__ != "DefaultLogsSpecs":
        raise ValueError(f"logs_specs: {type(specs).__name__} must be named, with --logs-specs on a command line")
    words = {
        "nnodes": f"{config.min_nodes}:{config.max_nodes}", "nproc-per-node": config.nproc_per_node,
        "role": config.role, "rdzv-id": config.run_id or "none", "max-restarts": config.max_restarts,
        "monitor-interval": config.monitor_interval, "shutdown-timeout": config.shutdown_timeout,
        "start-method": config.start_method, "event-log-handler": config.event_log_handler,
        "signals-to-handle": config.signals_to_handle, "local-addr": config.local_addr,
        "rdzv-backend": config.rdzv_backend if config.rdzv_backend == "static" else "c10d",
        "rdzv-endpoint": config.rdzv_endpoint if config.rdzv_backend == "static" or config.max_nodes > 1 else None,
        "log-dir": specs.root_log_dir, "redirects": _streams(specs._redirects),
        "tee": _streams(specs._tee),
        "local-ranks-filter": ",".join(map(str, sorted(specs._local_ranks_filter or ()))),
        "duplicate-stdout-filters": _joined(config.duplicate_stdout_filters or ()),
        "duplicate-stderr-filters": _joined(config.duplicate_stderr_filters or ()),
        "numa-binding": config.numa_options.affinity_mode.value if config.numa_options else None,
    }  # fmt: skip
    flags = ["--virtual-local-rank"] if config.virtual_local_rank else []
    return [f"--{name}={value}" for name, value in words.items() if value not in (None, "")] + flags


def _joined(words: Sequence[str]) -> str:
    return ",".join(word.replace(",", ",,") for word in words)


def _streams(choice: Any) -> str:
    """Write torch's ``Std``, or a mapping of local ranks to it, as ``--redirects`` has it."""
    if isinstance(choice, dict):
        return ",".join(f"{rank}:{int(value)}" for rank, value in choice.items()) or "0"
    return str(int(choice))


def _launch(
    name: str, words: Sequence[str], script: Sequence[str], environ: Mapping[str, str] | None = None, *, signals: str
) -> None:
    """Run ``liverun run`` to its end, and raise what torch would."""
    root = str(Path(__file__).resolve().parent.parent)
    code = AGENT_CODE.format(root=root, parent=os.getpid())
    with tempfile.TemporaryDirectory(prefix="liverun-outcome-") as folder:
        outcome = Path(folder) / "outcome.json"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
        process = subprocess.Popen(
            [sys.executable, "-c", code, "run", *words, "--", *script],
            env={**inherited, **(environ or {}), "LIVERUN_OUTCOME": str(outcome)},
            stdout=_pipe_unless(sys.stdout, 1), stderr=_pipe_unless(sys.stderr, 2), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        said: list[str] = []
        with _forwarding(process, signals) as received, _pumping(process, said):
            returncode = process.wait()
        if received:
            elastic = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
            raise elastic.SignalException(f"Process {os.getpid()} got signal: {received[0]}", sigval=received[0])
        if returncode == 0:
            return
        found = json.loads(outcome.read_text()) if outcome.exists() else {}
        reason = str(found.get("reason") or f"the job ended with exit code {returncode}")
        if found.get("failures"):
            raise _child_failed(name, found["failures"])
        if returncode == EXIT_USAGE:
            raise ValueError(reason)
        raise RuntimeError(reason)


def _child_failed(name: str, failures: Sequence[Mapping[str, Any]]) -> Exception:
    """Return torch's error; the first failure observed is its root cause."""
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    found = {}
    for failure in failures:
        fields = {key: failure[key] for key in ("local_rank", "pid", "exitcode", "error_file")}
        found[failure["rank"]] = process_failure = errors.ProcessFailure(**fields)
        process_failure.timestamp = int(failure["at"])
    error: Exception = errors.ChildFailedError(name=name, failures=found)
    return error


def _pipe_unless(stream: Any, fd: int) -> int | None:
    """Return what a child writes to: ours if it is the real one, else a pipe that is copied to it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if stream.fileno() == fd:
            stream.flush()
            return None
    return subprocess.PIPE


@contextlib.contextmanager
def _pumping(process: subprocess.Popen[bytes], said: list[str]) -> Iterator[None]:
    """Copy what the job prints to ``sys.stdout`` and ``sys.stderr``, where those are not the real ones."""

    def pump(pipe: IO[bytes], sink: Any) -> None:
        for line in pipe:
            text = line.decode(errors="replace")
            said.append(text)
            with contextlib.suppress(OSError, ValueError):
                sink.write(text)

    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [threading.Thread(target=pump, args=pair, daemon=True) for pair in pairs if pair[0] is not None]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(10.0)


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[bytes], names: str) -> Iterator[list[signal.Signals]]:
    """Hand signals on to the job instead of dying of them; the ones that came."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def forward(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))
        with contextlib.suppress(OSError):
            process.send_signal(number)

    known = signal.Signals.__members__
    numbers = [known[name.strip()] for name in names.split(",") if name.strip() in known]
    old = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
