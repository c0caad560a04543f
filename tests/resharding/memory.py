"""A transport between the ranks of one process that buffers nothing: a send ends when its receive has taken the bytes.

Ranks are greenlets: one runs until it waits for a post, then the next one. So the order of things is the same every
time, ranks that wait for each other for ever are found at once, and no thread waits for another one's interpreter lock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import greenlet
import torch

from resharding.boxes import Holding
from resharding.plan import RankPlan
from resharding.stream import StreamReport, execute


class Post:
    """One posted send or receive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.is_done = False

    def wait(self) -> None:
        """Let others run until it is done. Raises ``TimeoutError`` when nobody can run any more."""
        while not self.is_done:
            here = greenlet.getcurrent()
            if here.parent is None:
                raise TimeoutError("the peer never came")
            here.parent.switch(self)


class Network:
    """Posts of all ranks; a pair's posts match in order, and sizes have to agree."""

    def __init__(self, *, serial: bool = False) -> None:
        self._posts: dict[tuple[int, int, bool], deque[Post]] = defaultdict(deque)
        self.serial = serial
        """every post blocks until it is done: the order of posts alone has to avoid a deadlock"""
        self.messages: list[tuple[int, int, int]] = []

    def post(self, source: int, target: int, tensor: torch.Tensor, *, is_send: bool) -> Post:
        mine = Post(tensor)
        self._posts[source, target, is_send].append(mine)
        sends, recvs = self._posts[source, target, True], self._posts[source, target, False]
        while sends and recvs:
            sent, received = sends.popleft(), recvs.popleft()
            assert sent.tensor.dtype == received.tensor.dtype == torch.uint8
            assert sent.tensor.dim() == 1
            assert sent.tensor.is_contiguous()
            self.messages.append((source, target, sent.tensor.numel()))
            self.deliver(sent.tensor, received.tensor)
            sent.is_done = received.is_done = True
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


def run_together(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each body as a rank of its own; raises the first failure once all have come to their ends."""
    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def guarded(index: int, body: Callable[[], Any]) -> None:
        try:
            results[index] = body()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    ranks = [greenlet.greenlet(lambda item=item: guarded(*item)) for item in enumerate(bodies)]
    waiting: dict[Any, Post | None] = dict.fromkeys(ranks)
    with torch.no_grad():  # it is the thread's: what one rank finds and puts back is the same for all
        while waiting:
            ready = [rank for rank, post in waiting.items() if post is None or post.is_done]
            for rank in ready:
                waiting[rank] = rank.switch()
            if not ready:  # they wait for each other, or for one that has failed
                next(iter(waiting)).throw(TimeoutError("the peer never came"))
            waiting = {rank: post for rank, post in waiting.items() if not rank.dead}
    if errors:
        raise errors[0]
    return results


def stream_all(
    plans: Sequence[RankPlan],
    sources: Sequence[Holding],
    targets: Sequence[Holding],
    staging_bytes: int,
    network: Network | None = None,
    *,
    each: Callable[[int], dict[str, Any]] = lambda _rank: {},
    **options: Any,
) -> list[StreamReport]:
    """Run ``execute`` of every rank at once; ``each`` gives the options of one rank."""
    shared = network or Network()
    return run_together(
        [
            lambda rank=rank, plan=plan: execute(
                plan, sources[rank], targets[rank], MemoryTransport(shared, rank), staging_bytes, **options, **each(rank)
            )
            for rank, plan in enumerate(plans)
        ]
    )
