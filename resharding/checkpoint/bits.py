"""A tensor's elements as unsigned integers of their own width."""

from __future__ import annotations

import torch

from resharding.checkpoint.sums import BITS, Bits
from resharding.plan import Cut

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of_tensor(tensor: torch.Tensor) -> Bits:
    """Return a numpy view of a CPU tensor's storage, strides and all."""
    width = tensor.element_size()
    found: Bits = tensor.detach().view(_INTS[width]).numpy().view(BITS[width])
    return found


def cut_of(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return the part of a piece's tensor that a cut names."""
    for axis, (start, size) in enumerate(zip(cut.start, cut.shape, strict=True)):
        if size != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, size)
    return tensor
