"""What a process forgets before it runs its script again, and which of the script's patches are found."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from liverun.patches import patched

ROOT = Path(__file__).resolve().parents[2]


def in_a_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], types.ModuleType]:
    """Makes modules out of files of the user's."""

    def make(name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        path = tmp_path / f"{name}.py"
        module.__file__ = str(path)
        exec(compile("def mine(): return 1\nclass Mine:\n    def own(self): ...\n", path, "exec"), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def test_a_script_that_patches_nothing_is_told_from_one_that_does(
    users: Callable[[str], types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    main, theirs = users("users_main"), users("users_module")
    before = frozenset(sys.modules) - {"users_main", "users_module"}
    assert patched(before, main) is None
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", vars(theirs)["mine"])
        assert patched(before, main) == "json.dumps"
    with monkeypatch.context() as patch:
        patch.setattr(json.JSONEncoder, "encode", staticmethod(vars(theirs)["mine"]))
        assert patched(before, main) == "json.encoder.JSONEncoder.encode"
    with monkeypatch.context() as patch:  # the main module is gone after a run: nobody may have its functions
        patch.setattr(theirs, "mine", vars(main)["mine"])
        assert patched(before, main) == "users_module.mine"
    with monkeypatch.context() as patch:  # the user's modules stay, and may have each other's
        patch.setattr(theirs, "mine", vars(users("users_other"))["mine"])
        assert patched(before, main) is None


def test_hooks_of_a_script_run_at_its_end_and_those_of_modules_stay(tmp_path: Path) -> None:
    (tmp_path / "registers.py").write_text("import atexit\natexit.register(print, 'of a module')\n")
    said = in_a_new_process(
        "import atexit, sys\n"
        "from liverun import again\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "hooks = again._Hooks()\n"
        "import registers\n"
        "atexit.register(print, 'first')\n"
        "atexit.register(lambda: 1 / 0)\n"
        "gone = lambda: print('never')\n"
        "atexit.register(gone)\n"
        "atexit.unregister(gone)\n"
        "atexit.register(print, 'second')\n"
        "hooks.run()\n"
        "print('the end of the run')\n"
        "atexit.register(print, 'of the next run')\n"
    )
    assert said.splitlines() == ["second", "first", "the end of the run", "of the next run", "of a module"]


def test_what_a_script_leaves_is_cleaned_away() -> None:
    in_a_new_process(
        "import faulthandler, gc, logging, signal, sys, threading\n"
        "from liverun import again\n"
        "before, path = again._Before(), list(sys.path)\n"
        "class Left: pass\n"
        "left = Left(); left.itself = left\n"
        "import weakref\n"
        "class Kept: gone = None\n"
        "sys.modules['kept'] = Kept\n"
        "Kept.gone = weakref.ref(left)\n"
        "gc.freeze()\n"  # as join() does
        "sys.path.insert(0, '/nowhere')\n"
        "sys.excepthook = threading.excepthook = print\n"
        "logging.basicConfig()\n"
        "faulthandler.register(signal.SIGUSR1)\n"
        "signal.signal(signal.SIGTERM, print)\n"
        "signal.setitimer(signal.ITIMER_REAL, 1000)\n"
        "def check(before, path, again, Kept):\n"
        "    import logging, signal, sys, threading\n"
        "    again.clean(before)\n"
        "    assert Kept.gone() is None\n"
        "    assert sys.path == path\n"
        "    assert sys.excepthook is sys.__excepthook__\n"
        "    assert threading.excepthook is threading.__excepthook__\n"
        "    assert not logging.root.handlers\n"
        "    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        "    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0\n"
        "    assert sorted(vars(sys.modules['__main__'])) == ['__builtins__', '__name__']\n"
        "check(before, path, again, Kept)\n"
    )
