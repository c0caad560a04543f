"""Whether a script has put functions of its own into modules of others: then it cannot run a second time there.

A second run would wrap what the first has wrapped, and nobody would notice: ``lib.step = timed(lib.step)``.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(f"{ROOT / name}/" for name in ("liverun", "resharding"))
LIBRARIES = (*(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")), *OURS)

_WITHIN: dict[type, str] = {
    staticmethod: "__func__", classmethod: "__func__", types.MethodType: "__func__", property: "fget",
    functools.partial: "func",
}  # fmt: skip
"""where other things have the function they call"""


def patched(imported: frozenset[str], main: types.ModuleType) -> str | None:
    """Return the name of something that the script has replaced in a module that stays; ``None`` if there is none.

    Found are functions of the main module wherever they are, and functions of any file of the user's in a library:
    in what was ``imported`` before the script began, or is installed.
    """
    stay = imported - {"__main__"}
    files = {file for name in stay if (file := getattr(sys.modules.get(name), "__file__", None))}
    for name, module in list(sys.modules.items()):
        if module is main or not isinstance(module, types.ModuleType):
            continue
        is_library = name in imported or str(getattr(module, "__file__", None) or "").startswith(LIBRARIES)
        for path, function in _functions(module):
            if function.__globals__ is vars(main):
                return path
            file = function.__code__.co_filename
            if is_library and not file.startswith(("<", *LIBRARIES)) and file not in files:
                return path
    return None


def _functions(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions in a module and in the classes it defines, and where they are."""
    for name, value in list(vars(module).items()):
        if (function := _function(value)) is not None:
            yield f"{module.__name__}.{name}", function
        elif issubclass(type(value), type) and value.__module__ == module.__name__:
            for own, part in list(vars(value).items()):
                if (function := _function(part)) is not None:
                    yield f"{module.__name__}.{name}.{own}", function


def _function(value: Any) -> types.FunctionType | None:
    kind = type(value)  # isinstance() would ask a lazy object for its class, and wake it
    if kind is types.FunctionType:
        function: types.FunctionType = value
        return function
    within = _WITHIN.get(kind)
    return _function(getattr(value, within)) if within is not None else None
