"""Processes that run at once: the ranks of a small real world, or several who write."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_S = 120.0
# Forked from a server that has done nothing but import, never from the process of the tests: in that one live process
# groups of earlier tests, and a fork has their locks but not their threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "megatron.core.dist_checkpointing", "megatron.core.models.gpt", "megatron.core.optimizer"]
)


def run_all(body: Callable[..., None], rows: Sequence[tuple[Any, ...]], limit_s: float = LIMIT_S) -> None:
    """Run ``body(*row)`` in a process for each row, all at once; each has to end well, within ``limit_s``.

    What is handed over is pickled, so ``body`` is a function of a module.
    """
    processes = [CONTEXT.Process(target=body, args=row) for row in rows]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(limit_s)
        assert [process.exitcode for process in processes] == [0] * len(rows)
    finally:
        for process in processes:
            process.kill()


def run_ranks(commands: Iterable[Sequence[object]], limit_s: float = LIMIT_S) -> list[str]:
    """Run an interpreter of its own for each rank's words, and return what each printed.

    All have to end well within ``limit_s``.
    """
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, words)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for words in commands
    ]
    try:
        with ThreadPoolExecutor(len(ranks)) as threads:  # so that none waits until another is read
            outputs = list(threads.map(lambda rank: rank.communicate(timeout=limit_s), ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), [errors[-4000:] for _, errors in outputs]
    return [out for out, _ in outputs]
