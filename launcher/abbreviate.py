"""Long options cut short, as argparse allows: ``--redirect=3``, ``--nproc 2``. Also ``-r=3``, which it takes too.

A prefix that torchrun would understand means here what it means there: torchrun's options are looked at first,
ours only when none of its own begins that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class AmbiguousError(Exception):
    """A prefix of several options; the sentence names them."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One option as it can be written."""

    names: tuple[str, ...]
    takes_value: bool
    torchrun: bool
    """one of torchrun's own"""


def expand(words: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """Write every option before the script in full; the script and what follows it stay as they are.

    An option that is not known is left for the parser to complain about. Raises ``AmbiguousError``.
    """
    known = {name: flag for flag in flags for name in flag.names}
    done: list[str] = []
    rest = list(words)
    while rest:
        word = rest[0]
        if word in {"--", "-"} or not word.startswith("-"):
            break
        rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = resolve(name, flags, known)
            done.append(name + equals + value)
            wants_more = not equals and name in known and known[name].takes_value
        else:
            pieces, wants_more = short(word, known)
            done += pieces
        if wants_more and rest:
            done.append(rest.pop(0))
    return done + rest


def resolve(name: str, flags: Sequence[Flag], known: Mapping[str, Flag]) -> str:
    """Return the option that a name stands for, or the name itself if there is none."""
    if name in known:
        return name
    for torchrun in (True, False):
        found = [
            flag
            for flag in flags
            if flag.torchrun is torchrun and any(full.startswith(name) for full in flag.names)
        ]
        if len(found) == 1:
            return next(full for full in found[0].names if full.startswith(name))
        if found:
            could = ", ".join(next(full for full in flag.names if full.startswith(name)) for flag in found)
            raise AmbiguousError(f"{name} is ambiguous; it could be {could}")
    return name


def short(word: str, known: Mapping[str, Flag]) -> tuple[list[str], bool]:
    """Read a word like ``-m``, ``-r3``, ``-r=3`` or ``-mr3``; whether its value is the next word."""
    pieces: list[str] = []
    for place, letter in enumerate(word[1:], start=1):
        flag, after = known.get(f"-{letter}"), word[place + 1 :]
        if flag is None:
            return [word], False
        pieces.append(f"-{letter}")
        if flag.takes_value:
            if not after:
                return pieces, True
            return [*pieces, after.removeprefix("=")], False
    return pieces, False
