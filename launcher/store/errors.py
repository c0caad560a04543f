"""What a store can answer instead of a value; every sentence says what, with which value, and what to do."""

from __future__ import annotations


class StoreError(Exception):
    """Base of everything a store refuses or fails at."""

    code = "error"
    """its name on the wire"""


class LeaseEndedError(StoreError, KeyError):
    """The lease has ended; grant another and write again."""

    code = "lease-ended"

    def __str__(self) -> str:
        return Exception.__str__(self)


class CompactedError(StoreError):
    """A watch asked for a revision whose changes are no longer kept: list again, and watch from there."""

    code = "compacted"


class AheadError(StoreError):
    """A watch asked for a revision this store never had: it was restored from an older copy. List again."""

    code = "ahead"


class LimitError(StoreError, ValueError):
    """A key, value, transaction or number is beyond what a store takes. Trying again cannot help."""

    code = "limit"


class FullError(StoreError):
    """The journal's disk or the store's own bound is full. Nothing of the write was kept; reads go on."""

    code = "full"


class FencedError(StoreError):
    """The writer's generation is over; a later one is active. Reading is still allowed."""

    code = "fenced"


class GateError(StoreError):
    """The store does not write now: it cannot see a majority of the nodes it speaks for. Ask again later."""

    code = "gate"


class MovedError(StoreError):
    """The store has moved, or was restored elsewhere under a later term. Nothing was done here."""

    code = "moved"


class ForbiddenError(StoreError):
    """The store and this client do not share a token, a job or a protocol, or the role may not do this."""

    code = "forbidden"


class UnavailableError(StoreError):
    """No answer within the time allowed. A write may or may not have been done: read before writing again."""

    code = "unavailable"


class JournalError(StoreError):
    """The journal is damaged and was not opened. ``offset`` is the byte where the damage begins."""

    code = "journal"

    def __init__(self, sentence: str, *, offset: int) -> None:
        super().__init__(sentence)
        self.offset = offset


BY_CODE: dict[str, type[StoreError]] = {
    kind.code: kind
    for kind in (
        StoreError, LeaseEndedError, CompactedError, AheadError, LimitError, FullError, FencedError, GateError,
        MovedError, ForbiddenError, UnavailableError,
    )
}  # fmt: skip
"""the errors that cross a wire; another code is read as :class:`StoreError`"""
