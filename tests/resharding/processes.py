"""Processes that run one function each, at once: the ranks of a small real world, or several who write."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

LIMIT_S = 120.0
# Forked from a server that has done nothing but import, never from the process of the tests: in that one live process
# groups of earlier tests, and a fork has their locks but not their threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "megatron.core.dist_checkpointing", "megatron.core.models.gpt", "megatron.core.optimizer"]
)


def run_all(body: Callable[..., None], rows: Sequence[tuple[Any, ...]]) -> None:
    """Run ``body(*row)`` in a process for each row, all at once, and wait until all have ended well.

    What is handed over is pickled, so ``body`` is a function of a module.
    """
    processes = [CONTEXT.Process(target=body, args=row) for row in rows]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LIMIT_S)
        assert [process.exitcode for process in processes] == [0] * len(rows)
    finally:
        for process in processes:
            process.kill()
