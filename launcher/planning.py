"""What only Megatron knows of a model, asked of an interpreter that has it: ``liverun plan``, and flat buffers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

CODE = (
    "import sys\n"
    "if sys.path and sys.path[0] == '': del sys.path[0]\n"  # the user's folder must not stand before ours
    "from liverun.{} import main\n"
    "main()\n"
)
SHOWN_LINKS = 10


def run_plan(words: Mapping[str, str], flags: Sequence[str], *, as_json: bool) -> int:
    """Print the plan; the exit code. ``words`` are options of ``liverun.plan``, ``flags`` the model's."""
    options = [f"--{name}={value}" for name, value in words.items()]
    done = subprocess.run(
        [*_program("plan"), *options, "--", *flags], stdout=subprocess.PIPE, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        return done.returncode if done.returncode > 0 else 128 - done.returncode
    plan = json.loads(done.stdout.splitlines()[-1])
    if plan["ignored_flags"]:
        ignored = " ".join(plan["ignored_flags"])
        sys.stderr.write(f"liverun: ignored, since it is the layouts' or says nothing of the state: {ignored}\n")
    if as_json:
        print(json.dumps(plan))
    else:
        show(plan)
    return 0


def buffer_rows(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return where a model has its parameters in flat buffers, as JSON, given Megatron's arguments by name.

    Raises ``ValueError`` with what ``liverun.buffers`` says of a mistake.
    """
    done = subprocess.run(
        _program("buffers"), input=json.dumps(arguments), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "Megatron cannot be asked")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _program(module: str) -> list[str]:
    return [os.environ.get("PYTHON_EXEC") or sys.executable, "-W", "ignore", "-c", CODE.format(module)]


def show(plan: Mapping[str, Any]) -> None:
    """Show a plan as tables."""
    from rich.table import Table

    from launcher.render import console

    out = console(sys.stdout)
    estimate = plan["estimate"]
    out.print(
        f"{_world(plan['from'])} -> {_world(plan['to'])}: {_amount(plan['bytes_moved'])} moved, "
        f"{_amount(plan['bytes_between_nodes'])} of it between nodes, {_amount(plan['bytes_local'])} local; "
        f"about {estimate['seconds']:.3g} s at {_amount(estimate['bytes_per_s'])} a second",
        style="bold",
    )
    out.print(
        f"state and staging of a worker: at most {_amount(estimate['peak_bytes_kept'])} if the old state is kept, "
        f"{_amount(estimate['peak_bytes_freed'])} if layers are given back"
    )
    table = Table()
    for column in ("rank", "node", "before", "after", "sent", "received", "local"):
        table.add_column(column, justify="right")
    for rank in plan["ranks"]:
        counts = (rank[f"bytes_{name}"] for name in ("before", "after", "sent", "received", "local"))
        table.add_row(str(rank["rank"]), rank["node"], *map(_amount, counts))
    out.print(table)
    links = sorted(plan["links"], key=lambda link: -link["bytes"])
    table = Table()
    for column in ("from rank", "to rank", "bytes", "nodes"):
        table.add_column(column, justify="right")
    for link in links[:SHOWN_LINKS]:
        between = "two" if link["between_nodes"] else "one"
        table.add_row(str(link["from"]), str(link["to"]), _amount(link["bytes"]), between)
    out.print(table)
    if len(links) > SHOWN_LINKS:
        out.print(f"the {SHOWN_LINKS} busiest of {len(links)} links; --json has all")


def _amount(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _world(world: Mapping[str, Any]) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in world["layout"].items() if size != 1 or axis == "dp")
    return f"{world['size']} worker{'s' * (world['size'] != 1)}, {axes}"
