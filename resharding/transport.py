"""What moves bytes between ranks: the interface, and torch's process groups."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed import ProcessGroup


class Work(Protocol):
    """A send or receive under way."""

    def wait(self) -> object:
        """Block until the buffer may be used again; raise if the transfer failed."""


class Transport(Protocol):
    """Moves 1-D uint8 tensors between ranks of the bridge group; messages of a pair keep their order."""

    @property
    def device(self) -> torch.device:
        """Where the tensors it is given have to lie."""

    def isend(self, tensor: torch.Tensor, peer: int) -> Work:
        """Start to send; the tensor is not changed until the work is done."""

    def irecv(self, tensor: torch.Tensor, peer: int) -> Work:
        """Start to receive exactly as many bytes as the tensor has."""


class ProcessGroupTransport:
    """Transport over a process group of its own; ranks are those of the group, no default group is needed."""

    def __init__(self, group: ProcessGroup, device: torch.device | str = "cpu", tag: int = 0) -> None:
        """Use ``group`` for tensors on ``device``; ``tag`` keeps these messages apart from others."""
        self._group = group
        self._device = torch.device(device)
        self._tag = tag

    @property
    def device(self) -> torch.device:
        """Where the tensors it is given have to lie."""
        return self._device

    def isend(self, tensor: torch.Tensor, peer: int) -> Work:
        """Start to send to ``peer``, a rank of the group."""
        work: Work = self._group.send([tensor], peer, self._tag)
        return work

    def irecv(self, tensor: torch.Tensor, peer: int) -> Work:
        """Start to receive from ``peer``, a rank of the group."""
        work: Work = self._group.recv([tensor], peer, self._tag)
        return work
