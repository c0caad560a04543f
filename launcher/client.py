"""The command line's end of an agent's socket."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

from launcher.control import (
    Control,
    DrainRequest,
    Note,
    Outcome,
    ResizeRequest,
    StatusReply,
    StatusRequest,
    StopRequest,
)
from launcher.rundir import JobError, JobRecord, find_job, read_record, resolve_root

END_TIMEOUT_S = 30.0


def complain(sentence: str, exit_code: int) -> NoReturn:
    """Say what is wrong on stderr and exit."""
    sys.stderr.write(f"liverun: {sentence}\n")
    sys.exit(exit_code)


def job_folder(job: str | None, run_dir: str | None, *, ended_too: bool = False) -> tuple[Path, JobRecord]:
    """Find the job that is meant, or exit with the reason."""
    root = resolve_root(run_dir, os.environ, os.geteuid())
    try:
        return find_job(root, job, os.geteuid(), ended_too=ended_too)
    except JobError as error:
        complain(str(error), error.exit_code)


def talk(record: JobRecord, request: Control) -> Iterator[Control]:
    """Send one request; its answers. Exits 69 when the agent cannot be reached."""
    from launcher.link import connect

    try:
        connection = connect(record.socket)
    except OSError as error:
        complain(
            f"the agent of job {record.id} (pid {record.pid}) cannot be reached: {error.strerror or error}",
            69,
        )
    with closing(connection), connection.makefile("rb") as stream:
        try:
            connection.sendall(request.encode())
            for line in stream:
                yield Control.decode(line)
        except ConnectionError:
            return
        except KeyboardInterrupt:
            if isinstance(request, StatusRequest):
                raise
            complain(f"interrupted; what job {record.id} was asked for goes on, see 'liverun status'", 130)


def fetch_status(folder: Path, record: JobRecord) -> dict[str, Any]:
    """Return the status object, of a job that has ended too."""
    if not record.ended_already:
        for answer in talk(record, StatusRequest()):
            assert isinstance(answer, StatusReply)
            return answer.status
        record = read_record(folder) or record
    try:
        status: dict[str, Any] = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        complain(
            f"the agent of job {record.id} (pid {record.pid}) is gone without a word; the job is lost", 69
        )
    return status


def resize(record: JobRecord, request: ResizeRequest | DrainRequest, *, wait: bool, as_json: bool) -> int:
    """Ask for another world and show how it comes; the exit code."""
    from launcher.render import outcome_line, progress_line

    for answer in talk(record, request):
        if isinstance(answer, Note):
            print(progress_line(answer.event, answer.elapsed_s), file=sys.stderr, flush=True)
            if not wait:
                print(json.dumps(answer.event) if as_json else answer.event["reason"])
                return 0
        elif isinstance(answer, Outcome):
            if as_json:
                values = {
                    "ok": answer.ok,
                    "outcome": answer.outcome,
                    "reason": answer.reason,
                    **answer.fields,
                }
                print(json.dumps(values))
            if answer.ok:
                if not as_json:
                    print(outcome_line(answer.outcome, answer.reason, dict(answer.fields)))
                return 0
            print(f"liverun: {answer.outcome}: {answer.reason}", file=sys.stderr)
            return 1
    print(f"liverun: job {record.id} ended before it answered", file=sys.stderr)
    return 69


def stop(folder: Path, record: JobRecord) -> int:
    """End a job cleanly; returns once nothing of it is left."""
    for _ in talk(record, StopRequest()):
        pass
    deadline = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < deadline:
        now = read_record(folder)
        if now is None or now.ended_already:
            print(f"job {record.id} {now.state if now else 'ended'}")
            return 0
        time.sleep(0.02)
    return 1
