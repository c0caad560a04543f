"""How state moves at a change of world: what a job was told, and what its members make of it together."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, cast, get_args

from resharding.verify import Verify

Keep = Literal["auto", "always", "never"]
Defer = Literal["nothing", "optimizer"]

DEFAULT_STAGING_BYTES = 64 * 1024 * 1024
SHARE_TO_KEEP = 0.5
"""``auto`` keeps the old state if the new one takes at most so much of what its host can still give"""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the state of a job moves."""

    verify: Verify = "full"
    """how much of what arrived is compared with what was sent"""
    keep: Keep = "auto"
    """whether the old state is kept until the commit: then every failure before it leads back"""
    defer: Defer = "nothing"
    """what moves after the commit, beside the first step of the new world"""
    staging_bytes: int = DEFAULT_STAGING_BYTES

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read what the launcher was told. Raises ``ValueError`` for a word that is none of the choices."""
        verify = environ.get("LIVERUN_VERIFY_MODE") or "full"
        keep = environ.get("LIVERUN_KEEP_MODE") or "auto"
        defer = environ.get("LIVERUN_DEFER_MODE") or "nothing"
        for name, word, choices in (
            ("VERIFY", verify, get_args(Verify)), ("KEEP", keep, get_args(Keep)), ("DEFER", defer, get_args(Defer)),
        ):  # fmt: skip
            if word not in choices:
                raise ValueError(f"LIVERUN_{name}_MODE={word!r} is none of {', '.join(choices)}")
        return cls(
            verify=cast("Verify", verify),
            keep=cast("Keep", keep),
            defer=cast("Defer", defer),
            staging_bytes=int(environ.get("LIVERUN_STAGING_BYTES") or DEFAULT_STAGING_BYTES),
        )

    @property
    def keeps(self) -> bool:
        """Whether the old state is kept; only of what ``agree`` returned."""
        assert self.keep != "auto", "members have not agreed yet"
        return self.keep == "always"

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON carries."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one member of a change says of its memory."""

    host: str
    needed_bytes: int
    """its share of the new state"""
    available_bytes: int
    """what its host can still give, to all members there together; 0 where it does not say"""
    frees: bool
    """whether it can give its old state back layer by layer"""

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON carries."""
        return asdict(self)


def agree(wishes: Sequence[Choice], rooms: Sequence[Room]) -> Choice:
    """Return what all members do, the same on each of them: in the order of members, what they wish and have.

    The first member's word counts, and the smallest staging. ``auto`` becomes ``always`` where every host has room
    for the new state beside the old, or where somebody could not give the old one back; else ``never``. What is
    given back cannot be deferred.

    Raises ``ValueError`` for ``never`` where somebody cannot give memory back.
    """
    first = wishes[0]
    staging_bytes = min(wish.staging_bytes for wish in wishes)
    stuck = [room.host for room in rooms if not room.frees]
    if first.keep == "never" and stuck:
        raise ValueError(
            f"--keep never: a worker on {stuck[0]} cannot give its state back layer by layer, since it is not in the "
            f"memory of the host or belongs to both worlds; start the job with --keep auto or --keep always"
        )
    keep = first.keep
    if keep == "auto":
        keep = "always" if stuck or _fits(rooms, staging_bytes) else "never"
    defer = first.defer if keep == "always" else "nothing"
    return replace(first, keep=keep, defer=defer, staging_bytes=staging_bytes)


def _fits(rooms: Sequence[Room], staging_bytes: int) -> bool:
    needed: dict[str, int] = defaultdict(int)
    for room in rooms:
        needed[room.host] += room.needed_bytes + staging_bytes
    return all(needed[room.host] <= room.available_bytes * SHARE_TO_KEEP for room in rooms)
