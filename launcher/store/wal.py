"""Looks at SQLite's write-ahead log before SQLite does.

SQLite checks a frame's checksum and takes everything up to the first bad frame as the log, without a word: right for
a log that was cut while it was written, wrong for one whose middle has rotted, since the good frames that follow
hold writes that were acknowledged. This tells the two apart. File format: https://sqlite.org/fileformat2.html#walformat.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from launcher.store.errors import JournalError

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
MAGICS = {0x377F0682: "<", 0x377F0683: ">"}
WORD = 0xFFFFFFFF


def check_wal(path: Path) -> None:
    """Accept a log that is whole, or cut at its end. Raises ``JournalError`` for one damaged before its end."""
    try:
        log = path.read_bytes()
    except FileNotFoundError:
        return
    if len(log) < HEADER_BYTES + FRAME_HEADER_BYTES:
        return  # no frame was ever complete
    magic, _, page_bytes, _, *salts = struct.unpack(">6I", log[:24])
    order = MAGICS.get(magic)
    sums = None if order is None else _add((0, 0), log[:24], order)
    if order is None or sums != struct.unpack(">2I", log[24:32]) or page_bytes < 512:
        if any(log):
            raise JournalError(f"{path}: the header of the write-ahead log is damaged, at byte 0", offset=0)
        return
    frame_bytes = FRAME_HEADER_BYTES + page_bytes
    offset = HEADER_BYTES
    while offset + frame_bytes <= len(log):
        found = _frame(log, offset, frame_bytes, order=order, salts=salts, sums=sums)
        if found is None:
            break
        sums = found
        offset += frame_bytes
    for later in range(offset + frame_bytes, len(log) - frame_bytes + 1, frame_bytes):
        _, commit_pages, *found_salts = struct.unpack(">4I", log[later : later + 16])
        if found_salts == salts and commit_pages:
            raise JournalError(
                f"{path}: damaged at byte {offset}, and committed writes follow; restore a copy of the store, or "
                "open it with salvage to go on from the writes before the damage",
                offset=offset,
            )


def _frame(
    log: bytes, offset: int, frame_bytes: int, *, order: str, salts: Sequence[int], sums: tuple[int, int]
) -> tuple[int, int] | None:
    page, _, salt_1, salt_2, *want = struct.unpack(">6I", log[offset : offset + FRAME_HEADER_BYTES])
    if [salt_1, salt_2] != list(salts) or page == 0:
        return None
    sums = _add(sums, log[offset : offset + 8], order)
    sums = _add(sums, log[offset + FRAME_HEADER_BYTES : offset + frame_bytes], order)
    return sums if list(sums) == want else None


def _add(sums: tuple[int, int], piece: bytes, order: str) -> tuple[int, int]:
    first, second = sums
    words = struct.unpack(f"{order}{len(piece) // 4}I", piece)
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & WORD
        second = (second + words[index + 1] + first) & WORD
    return first, second
