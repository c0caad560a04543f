"""``--redirects`` and ``--tee``: which streams of which local ranks, and what is shown of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template

OUT, ERR = 1, 2


@dataclass(frozen=True)
class StreamChoice:
    """Streams by local rank; the sum of ``OUT`` and ``ERR``."""

    default: int = 0
    ranks: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, option: str) -> StreamChoice:
        """Read ``3``, or ``0:1,10:3``; ranks may have any number of digits. Raises ``ValueError``."""
        word = text.strip()
        if re.fullmatch(r"[0-3]", word):
            return cls(default=int(word))
        if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", word):
            raise ValueError(
                f"{option} {text!r}: write 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or RANK:N,RANK:N"
            )
        pairs = [pair.split(":") for pair in word.split(",")]
        return cls(ranks={int(rank): int(value) for rank, value in pairs})

    def has(self, rank: int, stream: int) -> bool:
        """Whether a stream of a local rank is meant."""
        return bool(self.ranks.get(rank, self.default) & stream)

    def any(self) -> bool:
        """Whether anything is meant at all."""
        return bool(self.default) or any(self.ranks.values())


NO_STREAMS = StreamChoice()


def parse_ranks(text: str, option: str) -> frozenset[int] | None:
    """Read ``0,1,12``; nothing for no filter. Raises ``ValueError``."""
    if not text.strip():
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{option} {text!r} is no comma-separated list of ranks like 0,1,2")
    return frozenset(map(int, words))


def parse_filters(text: str) -> tuple[str, ...]:
    """Read ``apple,orange``; a doubled comma stands for one within a word."""
    if not text:
        return ()
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts)


def line_prefix(template: str | None, *, role: str, rank: int, local_rank: int) -> str:
    """Return what stands before a worker's lines: torch's ``[role0]:``, or what the template says."""
    if template is None:
        return f"[{role}{rank}]:"
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)
