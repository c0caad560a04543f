"""Boxes into files, by several who write at once."""

from __future__ import annotations

import errno
import fcntl
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
from processes import CONTEXT, run_all

from resharding.checkpoint import files, folder
from resharding.checkpoint.files import Files, lay_out

SHAPE = (3, 2000, 30)
(ENTRY,), HEADERS = lay_out([("weight/a", "int32", SHAPE, False)])
WHOLE = np.arange(1, 3 * 2000 * 30 + 1, dtype=np.uint32).reshape(SHAPE)


def write(folder: Path, columns: tuple[int, int], rows: tuple[int, int], begin=lambda: 0) -> None:
    with Files(folder, writing=True, one_disk=True) as opened:
        box = WHOLE[:, rows[0] : rows[1], columns[0] : columns[1]]
        if begin() == 0:  # one of them, while the others have begun
            opened.create(ENTRY.file, HEADERS[ENTRY.file], ENTRY.begin + ENTRY.nbytes)
        opened.write(ENTRY, (0, rows[0], columns[0]), np.ascontiguousarray(box))


def content(folder: Path) -> np.ndarray:
    with Files(folder) as opened:
        found = np.zeros(SHAPE, dtype=np.uint32)
        opened.read(ENTRY, (0, 0, 0), found)
        return found


BOXES = [((0, 7), (0, 2000)), ((7, 8), (0, 2000)), ((8, 30), (0, 13)), ((8, 30), (13, 2000))]


def write_in_blocks(folder: Path, columns: tuple[int, int], rows: tuple[int, int], together: Barrier) -> None:
    files.STAGING_BYTES = 700  # blocks that begin at other rows
    write(folder, columns, rows, together.wait)


def test_parts_of_rows_written_by_several_at_once_make_up_the_rows(tmp_path: Path) -> None:
    together = CONTEXT.Barrier(len(BOXES))
    run_all(write_in_blocks, [(tmp_path, *box, together) for box in BOXES], limit_s=60.0)
    assert np.array_equal(content(tmp_path), WHOLE)
    assert (tmp_path / ENTRY.file).stat().st_size == ENTRY.begin + ENTRY.nbytes


def test_a_file_system_without_locks_gets_run_after_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    for box in BOXES:
        write(tmp_path, *box)
    assert np.array_equal(content(tmp_path), WHOLE)


def test_a_disk_of_the_machine_is_told_from_one_over_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = folder.own_disk(tmp_path)
    assert found is not None
    assert found == folder.own_disk(tmp_path / "not" / "there")
    assert folder.own_disk(Path("/proc/self")) is None
    monkeypatch.setattr(folder, "_OWN_KINDS", {"nfs4"})
    assert folder.own_disk(tmp_path) is None
