from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launcher_bed import Bed, closing


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    """Agents and commands of one test; fails the test that leaves a process behind."""
    yield from closing(Bed(tmp_path, f"LIVERUN_TEST_MARK={uuid.uuid4().hex}"))
