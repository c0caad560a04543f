"""Whether what arrived is what was sent: digests of slices, taken at both ends and compared."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from resharding.boxes import Box
from resharding.digest import bound, digest
from resharding.plan import Copy, Cut
from resharding.slots import Part

SAMPLE = 8
"""``verify="sample"`` looks at one in so many slices."""
Verify = Literal["full", "sample", "off"]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Damaged(RuntimeError):  # noqa: N818 - reads as what it is
    """What arrived is not what was sent; the message names the tensor."""


class Checks:
    """Digests of what was sent and what arrived, by peer and in the order of the plan."""

    def __init__(self, verify: Verify) -> None:
        self._every = {"full": 1, "sample": SAMPLE, "off": 0}[verify]
        self.seconds = 0.0
        self.num_bytes = 0
        self.num_digests: dict[tuple[int, int, bool], int] = defaultdict(int)
        """by layer and peer, and whether this rank sends them"""
        self._sent: dict[int, list[int]] = defaultdict(list)
        self._arrived: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._damaged: list[str] = []
        self._num_copies = 0

    def plan(self, layer: int, peer: int, parts: Iterable[Part], *, is_send: bool) -> None:
        """Note how many digests of a layer will go to a peer, or come from it."""
        if self._every:
            self.num_digests[layer, peer, is_send] += sum(part.number % self._every == 0 for part in parts)

    def next_layer(self) -> None:
        """Begin with a layer: digests are compared layer by layer."""
        self._sent.clear()
        self._arrived.clear()

    def wants(self, part: Part) -> bool:
        """Tell whether a part is looked at; both ends say the same."""
        return bool(self._every) and part.number % self._every == 0

    def sent(self, peer: int, part: Part, box: Box, data: torch.Tensor) -> None:
        """Take the digest of what is sent; ``data`` is 1-D uint8."""
        started = time.perf_counter()
        self._sent[peer].append(bound(digest(data), box.key, _place(box, part.transfer.cut, part.first)))
        self.seconds += time.perf_counter() - started

    def arrived(self, peer: int, part: Part, box: Box, data: torch.Tensor) -> None:
        """Take the digest of what arrived, as it lies now."""
        started = time.perf_counter()
        cut = part.transfer.cut
        found = bound(digest(data), box.key, _place(box, cut, part.first))
        self._arrived[peer].append((found, _named(box, cut)))
        self.num_bytes += part.nbytes
        self.seconds += time.perf_counter() - started

    def copied(self, copy: Copy, here: torch.Tensor, there: torch.Tensor, box: Box) -> None:
        """Compare a local copy with what it was copied from, bit for bit."""
        self._num_copies += 1
        if not self._every or (self._num_copies - 1) % self._every:
            return
        started = time.perf_counter()
        bits = _BITS[here.element_size()]
        if not torch.equal(here.view(bits), there.view(bits)):
            self._damaged.append(f"{_named(box, copy.target)} was not copied as it is")
        self.num_bytes += copy.nbytes
        self.seconds += time.perf_counter() - started

    def digests_for(self, peer: int) -> list[int]:
        """Return what was sent of this layer to a peer, in the order in which it arrives there."""
        return self._sent[peer]

    def compare(self, peer: int, sent: Sequence[int]) -> None:
        """Compare what arrived of this layer from a peer with its digests."""
        for value, (found, name) in zip(sent, self._arrived[peer], strict=True):
            if value != found:
                self._damaged.append(f"{name} did not arrive from rank {peer} of the bridge as it was sent")

    def raise_if_damaged(self) -> None:
        """Raise ``Damaged`` for the first difference, with the number of further ones."""
        if self._damaged:
            more = f" (and {len(self._damaged) - 1} more)" if len(self._damaged) > 1 else ""
            raise Damaged(self._damaged[0] + more)


def _place(box: Box, cut: Cut, first: int) -> tuple[object, ...]:
    """Return what both ends call a slice, whatever pieces they have it in."""
    return (*(o + s for o, s in zip(box.offset, cut.start, strict=True)), cut.shape, first)


def _named(box: Box, cut: Cut) -> str:
    offset = tuple(o + s for o, s in zip(box.offset, cut.start, strict=True))
    return f"{box.key}: the slice at {offset} of shape {cut.shape}"
