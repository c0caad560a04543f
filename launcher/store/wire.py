"""What client and server say to each other: JSON objects in sealed frames, every field checked as it comes in.

A message larger than a frame goes as several; the first byte of a frame says whether more follow. No frame is
larger than ``MAX_FRAME_BYTES``, which is also all that a stranger can make the server hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from launcher.store.limits import MAX_KEYS_PER_WRITE, MAX_REVISION, MAX_WRITE_BYTES

MAX_FRAME_BYTES = 32 * 1024
MAX_HELLO_BYTES = 4 * 1024
MAX_REQUEST_BYTES = 6 * MAX_WRITE_BYTES + 64 * 1024
"""the largest write, every character of it escaped"""
MAX_REPLY_BYTES = 512 * 1024 * 1024
"""a listing of the fullest store, escaped; only read from a server that has proved itself"""
PIECE_BYTES = MAX_FRAME_BYTES - 64
LAST, MORE = b"\0", b"\1"

Message = dict[str, Any]
Check = Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_REVISION


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_request(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) is not None


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_expected(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= MAX_KEYS_PER_WRITE and all(map(_is_int, value.values()))


def _is_writes(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_KEYS_PER_WRITE
        and all(text is None or isinstance(text, str) for text in value.values())
    )


def _is_ttl(value: Any) -> bool:
    return type(value) in (int, float)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


REQUESTS: Mapping[str, Mapping[str, Check]] = {
    "get": {"key": _is_text},
    "scan": {"prefix": _is_text},
    "write": {
        "expected": _is_expected, "writes": _is_writes, "lease": _or_none(_is_int), "request": _is_request,
    },
    "grant": {"ttl_s": _is_ttl, "request": _is_request},
    "keep": {"lease": _is_int},
    "revoke": {"lease": _is_int},
    "watch": {"prefix": _is_text, "after": _is_int},
    "unwatch": {"watch": _is_int},
    "fence": {"generation": _is_int},
    "generation": {"generation": _or_none(_is_int)},
    "snapshot": {},
    "beat": {},
    "follow": {"seq": _is_int, "digest": _is_digest},
}  # fmt: skip
"""every request and its fields; each also has ``op`` and ``id``"""
WRITING = frozenset({"write", "grant", "keep", "revoke", "fence"})


def check_request(message: Message) -> tuple[str, int]:
    """Accept a request; its kind and number. Raises ``ValueError`` for one that is not of :data:`REQUESTS`."""
    kind, number = message.get("op"), message.get("id")
    if not isinstance(kind, str) or kind not in REQUESTS or not _is_int(number):
        raise ValueError("a request of no known kind, or without a number")
    fields = REQUESTS[kind]
    if message.keys() != fields.keys() | {"op", "id"}:
        raise ValueError(f"a {kind} request has the fields {sorted(fields)}")
    for name, check in fields.items():
        if not check(message[name]):
            raise ValueError(f"{name} of a {kind} request is not what it has to be")
    assert isinstance(number, int)
    return kind, number


def parse(data: bytes | str) -> Message:
    """Read one JSON object. Raises ``ValueError`` for anything else, NaN and deep nesting included."""
    try:
        value = json.loads(data, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("JSON, but no object")  # noqa: TRY004  (bad input, not a bad call)
    return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def dump(message: Mapping[str, Any]) -> bytes:
    """Write one JSON object."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()


def split(data: bytes) -> Iterator[bytes]:
    """Cut a message into frames."""
    for start in range(0, max(1, len(data)), PIECE_BYTES):
        end = start + PIECE_BYTES
        yield (LAST if end >= len(data) else MORE) + data[start:end]


class Joiner:
    """Puts frames together again, up to ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, frame: bytes) -> bytes | None:
        """Take one frame; the message if it is whole. Raises ``ValueError`` for one beyond the limit."""
        flag, piece = frame[:1], frame[1:]
        if flag not in (LAST, MORE):
            raise ValueError("a frame that is neither the last nor followed by more")
        self._size += len(piece)
        if self._size > self._limit:
            raise ValueError(f"a message of more than {self._limit} bytes")
        self._pieces.append(piece)
        if flag == MORE:
            return None
        data = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        return data
