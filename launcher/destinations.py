"""Where the output of each worker goes, and what of it is shown.

Every worker has a folder ``logs/<worker>/`` in the run folder. Without ``--log-dir`` its output lies there. With
it, streams that ``--redirects`` or ``--tee`` name lie where torchrun puts them, ``<log-dir>/<run id>_<random>/
attempt_<restarts>/<local rank>/{stdout,stderr}.log`` with ``error.json`` beside them, and the run folder has
links. A ``--logs-specs`` plug-in says it all instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.options import RunOptions
from launcher.streams import ERR, OUT

NAMES = ("stdout", "stderr")
BITS = {"stdout": OUT, "stderr": ERR}


class Asks(Protocol):
    """The template, as far as it is needed here."""

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return its answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Of one worker."""

    local_rank: int
    stdout: Path
    stderr: Path
    error: Path | None
    """where an error of the script is to be written as JSON; none where a plug-in wants none"""
    shown: frozenset[str]
    """streams that the console gets"""
    teed: frozenset[str]
    """streams that ``--tee`` names: prefixed, and looked at by the duplicate filters"""
    sizes: Mapping[str, int]
    """bytes that were in the files before this worker"""


class Destinations:
    """Of all workers of a job on this node."""

    def __init__(self, options: RunOptions, *, job: str, logs: Path) -> None:
        self._options = options
        self._job = job
        self._logs = logs
        self._run_folder: Path | None = None
        self._attempt: Path | None = None
        self._plugin: dict[str, Any] | None = None
        self._of: dict[str, Destination] = {}
        self.filtered: dict[str, Path] = {}
        """files for teed lines that match the filters, by stream"""

    def of(self, worker: str) -> Destination:
        """Return where a worker that was placed writes."""
        return self._of[worker]

    async def begin(self, restarts: int, template: Asks, environ_of: Callable[[int], dict[str, str]]) -> None:
        """Make the folders of an attempt. Raises ``OSError``, and ``TemplateError`` for a plug-in's failure."""
        options = self._options
        if options.logs_specs is not None:
            answer = await template.ask(
                {
                    "op": "logs",
                    "name": options.logs_specs,
                    "log_dir": str(options.log_dir) if options.log_dir else None,
                    "redirects": {
                        rank: sum(bit for bit in (OUT, ERR) if options.redirects.has(rank, bit))
                        for rank in range(options.nproc)
                    },
                    "tee": {
                        rank: sum(bit for bit in (OUT, ERR) if options.tee.has(rank, bit))
                        for rank in range(options.nproc)
                    },
                    "local_ranks": None if options.local_ranks is None else sorted(options.local_ranks),
                    "envs": {rank: environ_of(rank) for rank in range(options.nproc)},
                }
            )
            self._plugin = answer["dest"]
            self.filtered = {name: Path(self._plugin[f"filtered_{name}"]) for name in NAMES}
            return
        if options.log_dir is not None and str(options.log_dir) != os.devnull:
            if self._run_folder is None:
                options.log_dir.mkdir(parents=True, exist_ok=True)
                prefix = f"{options.rdzv_id or self._job}_"
                self._run_folder = Path(tempfile.mkdtemp(prefix=prefix, dir=options.log_dir))
            self._attempt = self._run_folder / f"attempt_{restarts}"
            shutil.rmtree(self._attempt, ignore_errors=True)
            self._attempt.mkdir()
        folder = self._attempt or self._logs / f"attempt_{restarts}"
        if options.stdout_filters or options.stderr_filters:
            folder.mkdir(exist_ok=True)
            self.filtered = {name: folder / f"filtered_{name}.log" for name in NAMES}

    def place(self, worker: str, local_rank: int) -> Destination:
        """Decide for one worker, and make its files. Raises ``OSError``."""
        own = self._logs / worker
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths = {name: own / f"{name}.log" for name in NAMES}
        error: Path | None = own / "error.json"
        shown, teed = self._shown(local_rank)
        if self._plugin is not None and str(local_rank) in self._plugin["stdouts"]:
            for name in NAMES:
                said = self._plugin[f"{name}s"][str(local_rank)]
                if said and said != os.devnull:
                    paths[name] = _linked(Path(said), paths[name])
            said = self._plugin["error_files"].get(str(local_rank)) or ""
            error = None if said in ("", os.devnull) else _linked(Path(said), own / "error.json")
        elif self._attempt is not None:
            folder = self._attempt / str(local_rank)
            folder.mkdir(exist_ok=True)
            error = _linked(folder / "error.json", own / "error.json")
            for name in NAMES:
                if self._in_log_dir(local_rank, BITS[name]):
                    paths[name] = _linked(folder / f"{name}.log", paths[name])
        for path in paths.values():
            path.touch(mode=0o600)
        self._of[worker] = Destination(
            local_rank=local_rank, stdout=paths["stdout"], stderr=paths["stderr"], error=error,
            shown=shown, teed=teed, sizes={name: path.stat().st_size for name, path in paths.items()},
        )  # fmt: skip
        return self._of[worker]

    def _in_log_dir(self, local_rank: int, bit: int) -> bool:
        return self._options.redirects.has(local_rank, bit) or self._options.tee.has(local_rank, bit)

    def _shown(self, local_rank: int) -> tuple[frozenset[str], frozenset[str]]:
        """Which streams the console gets, and which of them are teed."""
        options, plugin = self._options, self._plugin
        if plugin is not None and str(local_rank) in plugin["stdouts"]:
            teed = frozenset(name for name in NAMES if str(local_rank) in plugin[f"tee_{name}s"])
            bare = frozenset(name for name in NAMES if not plugin[f"{name}s"][str(local_rank)])
            return teed | bare, teed
        if options.local_ranks is not None and local_rank not in options.local_ranks:
            return frozenset(), frozenset()
        teed = frozenset(name for name in NAMES if options.tee.has(local_rank, BITS[name]))
        bare = frozenset(name for name in NAMES if not options.redirects.has(local_rank, BITS[name]))
        return teed | bare, teed


def _linked(real: Path, link: Path) -> Path:
    """Let the run folder lead to a file that lies elsewhere; the file."""
    if not link.is_symlink():
        link.symlink_to(real)
    return real
