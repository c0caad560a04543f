"""How a job ended, for the process that started it from Python: a file that ``LIVERUN_OUTCOME`` names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from launcher.model import End
from launcher.orders import Finish
from launcher.pool import Pool
from launcher.rundir import write_json

VARIABLE = "LIVERUN_OUTCOME"


def write_reason(environ: Mapping[str, str], reason: str) -> None:
    """Tell why there was no job."""
    _write(environ, {"reason": reason, "failures": []})


def write_outcome(environ: Mapping[str, str], end: End | Finish, pool: Pool) -> None:
    """Tell how a job ended, and which workers failed, the first one first."""
    failures = []
    if end.outcome == "failed":
        ended = sorted(pool.of_last_attempt(), key=lambda item: (item[0] != end.worker, item[1].at))
        for worker, how in ended:
            if how.code != 0:
                error = pool.destinations.of(worker).error
                failures.append(
                    {
                        "rank": how.process.boot_rank,
                        "local_rank": how.process.slot,
                        "pid": how.process.pid,
                        "exitcode": how.code,
                        "error_file": str(error or ""),
                        "at": how.at,
                    }
                )
    _write(environ, {"reason": end.reason, "failures": failures})


def _write(environ: Mapping[str, str], value: Mapping[str, object]) -> None:
    if path := environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            write_json(Path(path), value)
