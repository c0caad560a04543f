"""A function that a Python program launches as workers: written by the program, called in the workers, answered.

Function, arguments and results are pickled. Only two kinds of process read them: the workers that the program has
started, and the program itself, each from a folder of its own that only this user may enter. The agent between them
never does; nothing in ``launcher`` unpickles anything.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def write_call(payload: Path, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Write ``function(*args)`` for ``run_call``, with what a child has to know of this process to unpickle it."""
    spawn = importlib.import_module("multiprocessing.spawn")
    data = spawn.get_preparation_data("worker")
    del data["authkey"]  # a secret of this process
    payload.write_bytes(pickle.dumps(data) + pickle.dumps((function, args)))


def run_call(payload: str, folder: str) -> None:
    """Call what ``write_call`` wrote; the result goes into a file named like this rank in ``folder``."""
    spawn = importlib.import_module("multiprocessing.spawn")
    with Path(payload).open("rb") as file:
        spawn.prepare(pickle.load(file))  # noqa: S301  (written by the process that started this job)
        function, args = pickle.load(file)  # noqa: S301
    try:
        result = function(*args)
    except SystemExit as error:
        if error.code not in (0, None):
            raise
        result = None
    path = Path(folder) / os.environ["RANK"]
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps(result))
    new.replace(path)


def read_results(folder: Path) -> dict[int, Any]:
    """Return what each rank's function returned, by rank."""
    ranks = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    return {rank: pickle.loads((folder / str(rank)).read_bytes()) for rank in ranks}  # noqa: S301  (by our workers)
