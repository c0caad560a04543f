"""What people see: tables for status and jobs, lines for events and the progress of a resize."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.rundir import JobRecord


def console(file: IO[str]) -> Console:
    """Return a console that colours only a terminal, and none when ``NO_COLOR`` is set."""
    from rich.console import Console

    width = None if file.isatty() else 160
    return Console(file=file, highlight=False, width=width, no_color=bool(os.environ.get("NO_COLOR")) or None)


def print_status(status: dict[str, Any]) -> None:
    """Show a status object."""
    from rich.table import Table

    out = console(sys.stdout)
    world = status["world"]
    head = f"job {status['job']}: {status['state']}, generation {status['generation']}"
    if world is not None:
        axes = ", ".join(
            f"{axis}={size}" for axis, size in world["layout"].items() if size != 1 or axis == "dp"
        )
        head += f", {world['size']} worker{'s' * (world['size'] != 1)}, {axes}"
    if status["step"] is not None:
        head += f", step {status['step']}"
    if status["report"]:
        head += "".join(f", {name} {value:.6g}" for name, value in status["report"].items())
    out.print(head, style="bold")
    out.print(status["reason"])
    for node in status["nodes"]:
        if not node["workers"]:
            continue
        table = Table(title=f"node {node['id']} ({node['host']}): {node['state']}", title_justify="left")
        for column in ("worker", "pid", "rank", "state"):
            table.add_column(column)
        for row in node["workers"]:
            rank = "-" if row["rank"] is None else str(row["rank"])
            table.add_row(row["id"], str(row["pid"]), rank, row["state"])
        out.print(table)
    if (restart := status.get("last_restart")) is not None:
        out.print(f"last restart: {restart['reason']}")
    last = status["last_resize"]
    if last is not None:
        out.print(f"last resize ({last['cause']}): {last['outcome']}; {cost(last)}; {last['reason']}")


def print_jobs(records: Iterable[JobRecord]) -> None:
    """Show jobs, one a row."""
    from rich.table import Table

    table = Table()
    for column in ("job", "pid", "state", "started", "exit code", "command"):
        table.add_column(column)
    for record in records:
        code = "" if record.exit_code is None else str(record.exit_code)
        table.add_row(
            record.id, str(record.pid), record.state, record.started, code, " ".join(record.command)
        )
    console(sys.stdout).print(table)


def event_line(event: dict[str, Any]) -> str:
    """One event on one line."""
    return f"{event['time']}  generation {event['generation']:<3} {event['kind']:<13} {event['reason']}"


def progress_line(event: dict[str, Any], elapsed_s: float) -> str:
    """One step of a resize on its way."""
    return f"{elapsed_s:8.2f} s  {event['kind']:<10} {event['reason']}"


def cost(last: dict[str, Any]) -> str:
    """Pause and bytes of a resize; where it came that far, whether the old state was kept and what comparing took."""
    moved, local = last["bytes_moved"], last["bytes_local"]
    text = f"pause {last['pause_s']:.3f} s, {megabytes(moved)} moved, {megabytes(local)} local"
    verify = last.get("verify", {"mode": ""})  # an older run folder's status has none
    if not verify["mode"]:
        return text
    took = f"checked in {verify['seconds']:.3f} s"
    checked = {"full": took, "sample": f"a sample {took}", "off": "not checked"}[verify["mode"]]
    return f"{text}, old state {'kept' if last['kept'] else 'given back layer by layer'}, {checked}"


def outcome_line(outcome: str, reason: str, fields: dict[str, Any]) -> str:
    """Return the one line that a resize leaves on stdout."""
    if outcome == "active":
        return f"generation {fields['generation']}: {fields['summary']}; {cost(fields)}"
    return reason


def megabytes(count: int) -> str:
    """Bytes as megabytes."""
    return f"{count / 1e6:.1f} MB"
