"""That nothing is left out in silence where everything is to be run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import MISSING

TESTS = f"""
import pytest

@pytest.mark.skipif(True, reason={MISSING + "a thing"!r})
def test_marked(): ...

@pytest.fixture
def thing(): pytest.skip({MISSING + "a thing"!r})

def test_with(thing): ...

def test_other(): pytest.skip("nothing to do")
"""


@pytest.mark.parametrize(("ci", "counts"), [("", "3 skipped"), ("true", "1 skipped, 2 errors")])
def test_what_is_skipped_for_want_of_something_fails_in_ci(tmp_path: Path, ci: str, counts: str) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert counts in done.stdout.splitlines()[-1], done.stdout
    assert (done.returncode == 0) == (not ci)
