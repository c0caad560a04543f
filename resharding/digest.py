"""A 64-bit digest of bytes, computed where they lie, at about the rate of memory.

In host memory it is XXH3. Elsewhere, where the bytes would have to be fetched first, it is a sum, modulo 2**64, of
every 64-bit word times an odd weight that depends on its position: one changed word always changes it, and words that
changed places do but for a chance of about ``2**-60``. So digests compare only between devices of one kind, as those
of a world are. Both tell apart accidents, not attacks.
"""

from __future__ import annotations

import functools
import hashlib

import torch
import xxhash

WORDS = 1 << 15
"""Words that share a factor: 256 KiB."""
_ROWS = 64
_WORD_BYTES = 8
_FACTOR = 0x9E3779B97F4A7C15


def digest(data: torch.Tensor) -> int:
    """Return a number below 2**64 for a contiguous 1-D uint8 tensor, on whatever device it lies."""
    if data.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(data.numpy())
    return weighted(data)


def weighted(data: torch.Tensor) -> int:
    """Return the sum that stands for XXH3 where the bytes lie on a device; it runs on any.

    Beside ``data`` it takes up to 16 MiB there.
    """
    weights, factors = _weights(data.device)
    total = (data.numel() * _FACTOR) % 2**64
    num_words = data.numel() // _WORD_BYTES
    whole = num_words // WORDS * WORDS
    step = WORDS * _ROWS if data.storage_offset() % _WORD_BYTES == 0 else WORDS
    for at in range(0, whole, step):
        rows = _words(data, at, min(at + step, whole)).view(-1, WORDS)
        sums = (rows * weights).sum(dim=1)
        total = total * pow(_FACTOR, len(rows), 2**64) + _number((sums * factors[-len(rows) :]).sum())
    if whole < num_words:
        rest = _words(data, whole, num_words)
        total = total * _FACTOR + _number((rest * weights[: len(rest)]).sum())
    tail = data[num_words * _WORD_BYTES :]
    if tail.numel():
        total = total * _FACTOR + int.from_bytes(bytes(tail.tolist()), "little")
    return int(total % 2**64)


def bound(value: int, key: str, place: tuple[object, ...]) -> int:
    """Return a digest that also covers which tensor and which place in it the bytes are for."""
    name = hashlib.blake2b(f"{key}{place}".encode(), digest_size=8).digest()
    return (value * _FACTOR ^ int.from_bytes(name, "little")) % 2**64


def _words(data: torch.Tensor, first: int, last: int) -> torch.Tensor:
    part = data[first * _WORD_BYTES : last * _WORD_BYTES]
    if part.storage_offset() % _WORD_BYTES:
        part = part.clone()
    return part.view(torch.int64)


def _number(total: torch.Tensor) -> int:
    return int(total) % 2**64


@functools.cache
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight for each word of a row, and the factors of the rows of a block."""
    numbers, factors = [], [1]
    state = 1
    for _ in range(WORDS):  # splitmix64
        state = (state + _FACTOR) % 2**64
        mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        numbers.append(mixed ^ (mixed >> 31) | 1)
    for _ in range(_ROWS - 1):
        factors.insert(0, factors[0] * _FACTOR % 2**64)
    signed = [[n - 2**64 if n >= 2**63 else n for n in column] for column in (numbers, factors)]
    return torch.tensor(signed[0], device=device), torch.tensor(signed[1], device=device)
