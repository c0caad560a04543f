"""A transport between threads of one process that buffers nothing: a send ends when its receive has taken the bytes."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from resharding.boxes import Holding
from resharding.plan import RankPlan
from resharding.stream import StreamReport, execute


class Post:
    """One posted send or receive."""

    def __init__(self, tensor: torch.Tensor, timeout_s: float) -> None:
        self.tensor = tensor
        self.done = threading.Event()
        self._timeout_s = timeout_s

    def wait(self) -> None:
        if not self.done.wait(self._timeout_s):
            raise TimeoutError("the peer never came")


class Network:
    """Posts of all ranks; a pair's posts match in order, and sizes have to agree."""

    def __init__(self, timeout_s: float = 60.0, *, serial: bool = False) -> None:
        """A post that has waited so long hangs: 64 ranks in one process are slow on a busy machine."""
        self._lock = threading.Lock()
        self._posts: dict[tuple[int, int, bool], deque[Post]] = defaultdict(deque)
        self._timeout_s = timeout_s
        self.serial = serial
        """every post blocks until it is done: the order of posts alone has to avoid a deadlock"""
        self.messages: list[tuple[int, int, int]] = []

    def post(self, source: int, target: int, tensor: torch.Tensor, *, is_send: bool) -> Post:
        mine = Post(tensor, self._timeout_s)
        with self._lock:
            self._posts[source, target, is_send].append(mine)
            sends, recvs = self._posts[source, target, True], self._posts[source, target, False]
            while sends and recvs:
                sent, received = sends.popleft(), recvs.popleft()
                assert sent.tensor.dtype == received.tensor.dtype == torch.uint8
                assert sent.tensor.dim() == 1
                assert sent.tensor.is_contiguous()
                self.messages.append((source, target, sent.tensor.numel()))
                self.deliver(sent.tensor, received.tensor)
                sent.done.set()
                received.done.set()
        if self.serial:
            mine.wait()
        return mine

    def deliver(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        received.copy_(sent)  # raises if sizes differ


class MemoryTransport:
    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank
        self.device = torch.device("cpu")

    def isend(self, tensor: torch.Tensor, peer: int) -> Post:
        return self._network.post(self._rank, peer, tensor, is_send=True)

    def irecv(self, tensor: torch.Tensor, peer: int) -> Post:
        return self._network.post(peer, self._rank, tensor, is_send=False)


def run_threads(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each body in a thread of its own; raises the first failure."""
    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def guarded(index: int, body: Callable[[], Any]) -> None:
        try:
            results[index] = body()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=item, daemon=True) for item in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def stream_all(
    plans: Sequence[RankPlan],
    sources: Sequence[Holding],
    targets: Sequence[Holding],
    staging_bytes: int,
    network: Network | None = None,
    **options: Any,
) -> list[StreamReport]:
    """Run ``execute`` of every rank at once."""
    shared = network or Network()
    return run_threads(
        [
            lambda rank=rank, plan=plan: execute(
                plan, sources[rank], targets[rank], MemoryTransport(shared, rank), staging_bytes, **options
            )
            for rank, plan in enumerate(plans)
        ]
    )
