"""How large anything may be. Checked at both ends: by the client before it sends, by the store before it writes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from launcher.store.errors import LimitError

MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 256 * 1024
MAX_KEYS_PER_WRITE = 64
"""compared and written keys together; etcd takes 128 operations in a transaction"""
MAX_WRITE_BYTES = 1024 * 1024
"""keys and values of one write together; etcd takes 1.5 MiB in a request"""
MAX_TTL_S = 24 * 3600.0
MAX_REVISION = 2**62
MAX_STORE_BYTES = 64 * 1024 * 1024
"""keys and values of a whole store"""
MAX_LEASES = 100_000
HISTORY_KEPT = 10_000
"""changes a watch can still go back to"""
HISTORY_BYTES = 16 * 1024 * 1024
"""what those may take in memory"""
REQUESTS_REMEMBERED = 4_096
"""writes whose outcome is kept, so that a client that lost the answer is given it again"""


def check_key(key: str) -> int:
    """Accept a key; its size in bytes. Raises :class:`LimitError`."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise LimitError(f"key {key[:40]!r} is not text that UTF-8 can carry") from None
    if size == 0:
        raise LimitError("a key may not be empty")
    if size > MAX_KEY_BYTES:
        raise LimitError(f"key {key[:40]!r}… has {size} bytes; a store takes {MAX_KEY_BYTES}")
    if "\0" in key:
        raise LimitError(f"key {key[:40]!r} holds a zero character; leave it out")
    return size


def check_prefix(prefix: str) -> None:
    """Accept a prefix. Raises :class:`LimitError`."""
    if prefix:
        check_key(prefix)


def check_value(key: str, value: str) -> int:
    """Accept a value; its size in bytes. Raises :class:`LimitError`."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise LimitError(f"value of {key!r} is not text that UTF-8 can carry") from None
    if size > MAX_VALUE_BYTES:
        raise LimitError(f"value of {key!r} has {size} bytes; a store takes {MAX_VALUE_BYTES}")
    return size


def check_write(expected: Mapping[str, int], writes: Mapping[str, str | None]) -> None:
    """Accept one transaction. Raises :class:`LimitError`."""
    if not writes:
        raise LimitError("a write names no key")
    if len(expected) + len(writes) > MAX_KEYS_PER_WRITE:
        raise LimitError(f"{len(expected) + len(writes)} keys in one write; a store takes {MAX_KEYS_PER_WRITE}")
    total = 0
    for key, revision in expected.items():
        total += check_key(key)
        check_revision(revision)
    for key, value in writes.items():
        total += check_key(key) + (0 if value is None else check_value(key, value))
    if total > MAX_WRITE_BYTES:
        raise LimitError(f"one write of {total} bytes; a store takes {MAX_WRITE_BYTES}")


def check_revision(revision: int) -> None:
    """Accept a revision, 0 included. Raises :class:`LimitError`."""
    if not 0 <= revision <= MAX_REVISION:
        raise LimitError(f"{revision} is no revision; give one that a store returned, or 0")


def check_ttl(ttl_s: float) -> None:
    """Accept a lease's time to live. Raises :class:`LimitError`."""
    if not math.isfinite(ttl_s) or not 0 < ttl_s <= MAX_TTL_S:
        raise LimitError(f"a lease of {ttl_s} s; give more than 0 and at most {MAX_TTL_S:.0f} s")
