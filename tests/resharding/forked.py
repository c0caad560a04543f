"""Processes forked from a test's own, which has imported everything."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

LIMIT_S = 120.0


def run_forked(body: Callable[..., None], rows: Sequence[tuple[Any, ...]]) -> None:
    """Run ``body(*row)`` in a process for each row, all at once, and wait until all have ended well."""
    gc.collect()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_run, args=(body, row)) for row in rows]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LIMIT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()


def _run(body: Callable[..., None], row: tuple[Any, ...]) -> None:
    # a process group that an earlier test has left would join its threads when it is collected: they are not here
    gc.freeze()
    body(*row)
