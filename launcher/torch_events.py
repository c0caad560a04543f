"""Torch's elastic events, as ``--event-log-handler console`` prints them: one JSON object a line, on stderr."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.options import RunOptions


class TorchEvents:
    """Writes the events of one job; field for field what torch.distributed.elastic.events writes."""

    def __init__(
        self, options: RunOptions, *, job: str, write: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._options = options
        self._job = job
        self._write = write
        self._clock = clock
        self._began = clock()

    def worker(
        self,
        state: str,
        *,
        worker: str,
        rank: int,
        restarts: int,
        pid: int | None = None,
        code: int | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell of one worker: ``START``, ``SUCCEEDED``, ``FAILED`` or ``TERMINATED``."""
        details = {  # torch wraps each of these in a tuple
            "local_rank": [rank], "role_rank": [rank], "role_world_size": [self._options.nproc],
            "exit_code": [code], "worker_pid": [pid],
        }  # fmt: skip
        raw = None if error is None else json.dumps(error)
        self._event(state, "WORKER", restarts, details, rank=rank, worker=worker, raw_error=raw)

    def agent(self, state: str, *, restarts: int, error: str | None = None) -> None:
        """Tell how the job ended: ``SUCCEEDED`` or ``FAILED``."""
        self._event(state, "AGENT", restarts, {}, raw_error=error)

    def _event(
        self,
        state: str,
        source: str,
        restarts: int,
        details: Mapping[str, Any],
        *,
        rank: int | None = None,
        worker: str | None = None,
        raw_error: str | None = None,
    ) -> None:
        options = self._options
        name = options.argv[0] if options.mode == "program" else Path(options.argv[0]).name
        metadata = {
            "run_id": options.rdzv_id or self._job, "global_rank": rank, "group_rank": 0, "worker_id": worker,
            "role": options.role, "hostname": socket.gethostname(), "state": state,
            "total_run_time": int(self._clock() - self._began), "rdzv_backend": "static",
            "raw_error": raw_error,
            "metadata": json.dumps({"group_world_size": 1, "entry_point": name, **details}),
            "agent_restarts": restarts, "duration_ms": None,
        }  # fmt: skip
        event = {
            "name": f"torchelastic.worker.status.{state}", "source": source, "timestamp": 0,
            "metadata": metadata,
        }  # fmt: skip
        self._write(json.dumps(event) + "\n")


def monotonic_events(options: RunOptions, job: str, write: Callable[[str], None]) -> TorchEvents:
    """Events by this machine's clock."""
    return TorchEvents(options, job=job, write=write, clock=time.monotonic)
