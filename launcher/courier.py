"""Each message exactly once and in order, across connections that come and go.

What goes out is numbered and kept until the other side has said that it has it. After a new connection each side says
how far it has come, and the other sends the rest again; what comes twice is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

MAX_KEPT = 100_000
"""messages that the other side has not confirmed; more mean that it is not there, however it looks"""


class Courier:
    """One end of such a link; knows nothing of connections."""

    def __init__(self) -> None:
        self.seen = 0
        """the last message of the other side that has come"""
        self._last = 0
        self._kept: deque[tuple[int, dict[str, Any]]] = deque()

    def renewed(self) -> Courier:
        """Return one for another peer: what this one's has not confirmed goes to that, counted anew."""
        other = Courier()
        for _, body in self._kept:
            other.pack(body)
        return other

    def kept(self) -> list[dict[str, Any]]:
        """Return the messages that were not confirmed."""
        return [body for _, body in self._kept]

    @property
    def waiting(self) -> int:
        """Messages that the other side has not confirmed."""
        return len(self._kept)

    def pack(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the frame for a message, which is kept. Raises ``ConnectionError`` when too many are."""
        if len(self._kept) >= MAX_KEPT:
            raise ConnectionError(f"{MAX_KEPT} messages were never confirmed")
        self._last += 1
        self._kept.append((self._last, body))
        return {"number": self._last, "body": body, "seen": self.seen}

    def unpack(self, frame: dict[str, Any]) -> dict[str, Any] | None:
        """Take a frame; its message, or ``None`` for a mere sign of life and for what has come before.

        Raises ``ValueError`` for what is no frame, or leaves one out.
        """
        seen, number, body = frame.get("seen"), frame.get("number"), frame.get("body")
        if type(seen) is not int:
            raise ValueError("a frame that does not say how far its sender has come")
        self.confirmed(seen)
        if number is None:
            return None
        if type(number) is not int or not isinstance(body, dict):
            raise ValueError("a frame without a number or a message")
        if number <= self.seen:
            return None
        if number != self.seen + 1:
            raise ValueError(f"message {number} came after {self.seen}")
        self.seen = number
        return body

    def confirmed(self, seen: int) -> None:
        """Forget what the other side has."""
        while self._kept and self._kept[0][0] <= seen:
            self._kept.popleft()

    def sign(self) -> dict[str, Any]:
        """Return a frame without a message: a sign of life that confirms what has come."""
        return {"seen": self.seen}

    def again(self) -> Iterator[dict[str, Any]]:
        """Return the frames the other side has not confirmed."""
        for number, body in self._kept:
            yield {"number": number, "body": body, "seen": self.seen}
