"""Errors as reasons that a person reads."""

from __future__ import annotations

import re

_SOURCE_PATH = re.compile(r"\[/\S+:\d+\]\s*")


def in_short(error: BaseException) -> str:
    """Put an error into one line: gloo's come with a source path before them and advice behind."""
    line = (str(error).strip() or "no message").splitlines()[0]
    line = _SOURCE_PATH.sub("", line).partition(" This is typically caused by")[0]
    return f"{type(error).__name__}: {line}"
