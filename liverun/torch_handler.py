"""Where torchrun finds ``--rdzv-backend=liverun``: an entry point of the group ``torchrun.handlers``.

torch loads every such entry point wherever its rendezvous package is imported, in workers too, where ``launcher`` may
be a file of the user's. So nothing is imported here until torchrun asks for a handler, which only its agents do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parent.parent)


def handler() -> Callable[[Any], Any]:
    """Return what makes a handler from torch's ``RendezvousParameters``."""
    return make


def make(params: Any) -> Any:
    """Make the handler. Raises ``ValueError`` for wrong parameters, ``ImportError`` if ``launcher`` is not ours."""
    sys.path.insert(0, ROOT)  # python -m torch.distributed.run has the current folder first
    try:
        ours = import_module("launcher")
        if not str(ours.__file__).startswith(ROOT):
            raise ImportError(f"--rdzv-backend=liverun: {ours.__file__} is another launcher; rename it")
        return import_module("launcher.torch_rendezvous").make_handler(params)
    finally:
        sys.path.remove(ROOT)
