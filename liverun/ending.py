"""The end of an interpreter that gloo has worked in. Needs no torch."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

GLOO_THREAD = "pt_gloo_runloop"
"""as torch calls the threads in which gloo's collectives run"""
_LOOK_S = 0.005
"""between two looks at the threads; the interpreter's lock is free meanwhile"""


def let_gloo_finish(limit_s: float = 1.0) -> None:
    """Wait until gloo's threads of this process have nothing left to do, at most ``limit_s``. For ``atexit``.

    A collective counts as done shortly before its thread drops the tensors, for which torch 2.13 takes the
    interpreter's lock. A thread that asks for it in an interpreter that ends is ended by Python, within C++ that may
    not be left so: the process would be aborted, and a script that had done all its work have failed.
    """
    deadline = time.monotonic() + limit_s
    before: dict[str, tuple[str, str]] = {}
    while (now := _gloo_threads()) and time.monotonic() < deadline:
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now
        time.sleep(_LOOK_S)


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Return by thread its state, and how often it has waited for something."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has just ended
            rows = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
            if rows["Name"] == GLOO_THREAD:
                found[task.name] = (rows["State"][0], rows["voluntary_ctxt_switches"])
    return found
