"""Nothing that the launcher reads can make it run anything: held on the sources, and in agents at work."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_bed import Bed
from test_many_nodes import Nodes

ROOT = Path(__file__).resolve().parents[2]
UNPICKLES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
EVALUATES = {"eval", "exec", "compile", "__import__"}
ALLOWED = {("launcher/api.py", "liverun.calls")}
"""The Python entry points hand a function of the caller's to workers of the caller's, pickled: in the program that
launches and in those workers. It is written and read beside the agent, which never looks into it."""


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Whatever in a source could unpickle or evaluate: imports, calls by name, and names given as text."""
    for node in ast.walk(tree):
        found: set[str] = set()
        if isinstance(node, ast.Import):
            found = {alias.name.partition(".")[0] for alias in node.names} & UNPICKLES
        elif isinstance(node, ast.ImportFrom):
            found = {(node.module or "").partition(".")[0]} & UNPICKLES
            if node.module == "builtins":
                found |= {alias.name for alias in node.names} & EVALUATES
        elif isinstance(node, ast.Name):
            found = {node.id} & EVALUATES
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("builtins", "__builtins__"):
                found = {node.attr} & EVALUATES
            elif (node.value.id, node.attr) in (("torch", "load"), ("multiprocessing", "connection")):
                found = {f"{node.value.id}.{node.attr}"}
        elif isinstance(node, ast.Call):
            words = {word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)}
            found = {word for word in words if word.partition(".")[0] in UNPICKLES | EVALUATES}
        for what in sorted(found):
            yield node.lineno, what


def taken_from_workers(path: Path) -> set[str]:
    """The modules of ``liverun`` that a source imports, as it is read and later."""
    found = set()
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    name = str(path.relative_to(ROOT))
    return {module for module in found if module.split(".")[0] == "liverun" and (name, module) not in ALLOWED}


def sources() -> set[Path]:
    """Every source of the launcher, and of what it takes from the workers' side, however far."""
    found: set[Path] = set()
    ends = {ROOT / "liverun" / "__init__.py", ROOT / "liverun" / "link.py"}  # run before, and at, the workers' end
    waiting = set((ROOT / "launcher").rglob("*.py")) | ends
    while waiting:
        path = waiting.pop()
        found.add(path)
        for module in taken_from_workers(path):
            base = ROOT / Path(*module.split("."))
            waiting |= {place for place in (base.with_suffix(".py"), base / "__init__.py") if place.exists()} - found
    return found


def test_no_source_of_the_launcher_or_its_messages_can_run_what_it_reads() -> None:
    found = sources()
    names = {str(path.relative_to(ROOT)) for path in found}
    assert {"liverun/__init__.py", "liverun/layout.py", "liverun/link.py", "liverun/messages.py"} <= names
    assert "liverun/calls.py" not in names
    assert len(names) > 60
    wrong = [f"{path}:{line}: {what}" for path in found for line, what in offences(ast.parse(path.read_text()))]
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "import pickle as p", "from _pickle import loads", "import marshal", "import a, shelve",
        "import_module('pickle')", "importlib.import_module('dill.source')", "__import__('os')", "eval(text)",
        "run = exec", "builtins.eval(text)", "from builtins import eval", "getattr(builtins, 'exec')(text)",
        "torch.load(path)", "compile(text, 'f', 'exec')", "find_spec('cloudpickle')",
    ],
)  # fmt: skip
def test_each_way_to_run_what_is_read_would_be_seen(text: str) -> None:
    assert list(offences(ast.parse(text)))
    assert not list(offences(ast.parse("import re, json\nre.compile(text)\njson.loads(text)\nstore.load()\nself.eval()")))


WITNESS = """
import os, sys
if sys.orig_argv[1:3] == ["-m", "liverun"]:
    HEARD = os.open(os.path.join(os.environ["WITNESS"], str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    KINDS = {"pickle.find_class", "marshal.loads", "exec", "compile"}
    def hear(event, args):
        if event in KINDS:
            frame = sys._getframe(1)
            os.write(HEARD, f"{event}\\t{frame.f_code.co_filename}\\n".encode())
    sys.addaudithook(hear)
    import pickle
    pickle.loads(pickle.dumps(os.getpid))  # that it is heard at all
"""
EVALUATE_THEIR_OWN = (
    "/dataclasses.py", "/collections/__init__.py", "/typing.py", "/inspect.py", "/attr/_make.py",
    "/typing_inspection/typing_objects.py", "<frozen importlib._bootstrap>", "<frozen runpy>",
)  # fmt: skip
"""What compiles, in any Python program: modules as they are imported, methods of classes, annotations in sources."""


def test_agents_of_two_nodes_at_work_never_unpickle_or_evaluate(bed: Bed) -> None:
    """Known complaint 43: the agent hangs because it cannot import the user's class."""
    heard = bed.folder / "heard"
    heard.mkdir()
    (bed.folder / "sitecustomize.py").write_text(WITNESS)
    python_path = os.pathsep.join([str(bed.folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": python_path, "WITNESS": str(heard)}
    nodes = Nodes(bed, "1:2", **environ)
    first, second = nodes.start(1), nodes.start(1)
    first.event("active")
    assert bed.cli("resize", "--workers", "1", **environ).returncode == 0
    bed.end_file.touch()
    assert [first.wait(), second.wait()] == [0, 0], first.stderr() + second.stderr()
    for agent in (first, second):
        lines = (heard / str(agent.process.pid)).read_text().splitlines()
        by_kind: dict[str, list[str]] = {}
        for kind, _, file in (line.partition("\t") for line in lines):
            by_kind.setdefault(kind, []).append(file)
        assert by_kind["pickle.find_class"] == [str(bed.folder / "sitecustomize.py")]
        assert set(by_kind["marshal.loads"]) == {"<frozen importlib._bootstrap_external>"}  # compiled modules
        assert len(by_kind["exec"]) > 100
        strange = [file for kind in ("exec", "compile") for file in by_kind[kind] if not file.endswith(EVALUATE_THEIR_OWN)]
        assert not strange, set(strange)
