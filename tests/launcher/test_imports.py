"""Who may import whom, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"liverun.layout", "liverun.messages"}
"""what the launcher takes from the worker's side; neither needs torch"""


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return found


def test_the_launcher_takes_only_layouts_and_messages_from_the_workers_side() -> None:
    for path in (ROOT / "launcher").rglob("*.py"):
        names = {
            name
            for name in imported(path)
            if name.split(".")[0] in ("liverun", "resharding", "torch", "megatron")
        }
        if path.name == "api.py":  # runs in the program that launches, not in the agent
            names -= {"liverun.calls"}
        if path.name == "torch_rendezvous.py":  # runs in torchrun's agents, not in ours
            names = {name for name in names if not name.startswith("torch.distributed")}
        if path.name == "checkpoint.py":  # commands on files; imported when one runs
            names = {name for name in names if not name.startswith("resharding.checkpoint")}
        assert names <= SHARED, path


def test_nothing_of_ours_imports_what_only_torchruns_agents_need() -> None:
    for folder in ("launcher", "liverun", "resharding"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "launcher.torch_rendezvous" not in imported(path), path
            if path != ROOT / "liverun" / "torch_handler.py":  # asked for by torchrun's agents alone
                assert "launcher.torch_rendezvous" not in path.read_text(), path


def test_nothing_that_runs_in_a_worker_imports_the_launcher() -> None:
    for folder in ("liverun", "resharding"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != ROOT / "liverun" / "__main__.py":
                assert not any(name.split(".")[0] == "launcher" for name in imported(path)), path
