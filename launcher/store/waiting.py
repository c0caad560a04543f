"""What a client of the store waits for: answers to calls, and changes for watches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from launcher.store.contract import Change
from launcher.store.errors import BY_CODE, CompactedError, StoreError

MOST_UNREAD = 10_000
"""batches of changes that a slow reader of a watch may leave lying"""


class Call:
    """One request that waits for its answer."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.message = message
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def take(self, message: Mapping[str, Any]) -> None:
        """Hear the answer."""
        if self.answer.done():
            return
        if "error" in message:
            self.answer.set_exception(as_error(message))
        else:
            self.answer.set_result(message.get("ok"))


class Watch:
    """One watch; ``after`` is the revision up to which everything has been put into ``ready``."""

    def __init__(self, prefix: str, after: int) -> None:
        self.prefix = prefix
        self.after = after
        self.over = False
        """whether an error has ended it"""
        self.ready: asyncio.Queue[list[Change] | StoreError | None] = asyncio.Queue()

    def take(self, message: Mapping[str, Any]) -> None:
        """Hear what is new, whole revisions at a time, or that the watch is over."""
        if self.over:
            return
        if "error" in message:
            self.over = True
            self.ready.put_nowait(as_error(message))
            return
        rows = message["changes"]
        following = [row[2] for row in rows[1:]] + [None]
        self.after = message["revision"]
        changes = [
            Change(key=key, value=value, revision=revision, last=revision != after)
            for (key, value, revision), after in zip(rows, following, strict=True)
        ]
        if self.ready.qsize() >= MOST_UNREAD:
            self.over = True
            self.ready.put_nowait(CompactedError(f"{MOST_UNREAD} batches of changes lie unread; list again"))
        elif changes:
            self.ready.put_nowait(changes)


def as_error(message: Mapping[str, Any]) -> StoreError:
    """Return the error that a server named."""
    return BY_CODE.get(str(message["error"]), StoreError)(str(message.get("say")))
