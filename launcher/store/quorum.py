"""When a store that is carried by one of the job's own nodes may write, and when another may take its place.

Both rules count the same voters, the nodes of the active generation. The store needs half of them, who would take its
place needs more than half, so of two places at most one can write at a time:

* The store asks every voter, again and again, whether it is there. It writes while at least half have answered a
  question that it *asked* within ``horizon_s``, on its own clock. (Not more than half: of two nodes the one that has
  the store can go on when the other is lost.)
* While some of the former active generation's nodes may not have heard of the present one, and count by the former,
  the store needs half of both. A store that was brought back begins with the nodes by which its successor counted.
* A survivor brings the store back only when more than half of the voters, itself included, have each answered no
  question for ``horizon_s`` and the margin, on their own clocks, and have promised to answer none again
  (:meth:`launcher.store.client.RemoteStore.relocate` with the new term).

An answer is given after its question was asked, so the old store stopped counting such a voter before the voter
promised, however long an answer was on its way. No clocks are compared; what is assumed is that two clocks run at
the same rate to within the margin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

CLOCK_MARGIN = 0.05
"""how much two clocks may differ in rate, and then some"""


def majority(num_voters: int) -> int:
    """Return how many of so many are more than half."""
    return num_voters // 2 + 1


@dataclass
class _Former:
    """The nodes of a generation that was active, of which some may not know that it is over."""

    generation: int
    voters: frozenset[str]
    unsure: set[str]


class WriteGate:
    """The ``gate`` of an engine: says why the store may not write now, or ``None``.

    ``heard`` is :attr:`launcher.store.server.StoreServer.heard`; the store's own node is always in sight.
    """

    def __init__(
        self, own: str, heard: Mapping[str, float], *, voters: Collection[str], horizon_s: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._own = own
        self._heard = heard
        self._horizon_s = horizon_s
        self._clock = clock
        self._generation = 0
        self._voters = frozenset(voters)
        self._former: list[_Former] = []

    def set_voters(self, generation: int, voters: Collection[str]) -> None:
        """Take the nodes of a new active generation; those of the former count too until :meth:`knows` ends that."""
        if self._voters:
            self._former.append(_Former(self._generation, self._voters, set(self._voters)))
        self._generation, self._voters = generation, frozenset(voters)
        self._forget_former()

    def knows(self, generation: int, voter: str) -> None:
        """Hear that a node counts by this generation, or a later one."""
        for former in self._former:
            if former.generation < generation:
                former.unsure.discard(voter)
        self._forget_former()

    def _forget_former(self) -> None:
        """Drop those that can no longer bring the store back: too few count by them."""
        self._former = [former for former in self._former if len(former.unsure) >= majority(len(former.voters))]

    def __call__(self) -> str | None:
        """Return the reason not to write, or ``None``."""
        for voters in (self._voters, *(former.voters for former in self._former)):
            if voters and (reason := self._too_few(voters)) is not None:
                return reason
        return None

    def _too_few(self, voters: frozenset[str]) -> str | None:
        now = self._clock()
        seen = {node for node, at in self._heard.items() if now - at < self._horizon_s} & voters
        seen |= {self._own} & voters
        needed = len(voters) - majority(len(voters)) + 1
        if len(seen) >= needed:
            return None
        return f"{len(seen)} of {len(voters)} nodes in sight within {self._horizon_s:g} s; {needed} are needed"


def successor(
    voters: Collection[str], without_s: Mapping[str, float], *, horizon_s: float
) -> tuple[str | None, str]:
    """Return who brings the store back, or ``None``, and why.

    ``without_s`` says for each voter that can be reached, this node included, for how long it has not answered the
    old store (:attr:`launcher.store.client.RemoteStore.silent_s`). The lowest of them is it.
    """
    wait_s = horizon_s * (1 + CLOCK_MARGIN)
    ready = [node for node in voters if without_s.get(node, 0.0) >= wait_s]
    ready.sort(key=lambda node: (len(node), node))  # n10 comes after n2
    needed = majority(len(voters))
    if len(ready) < needed:
        say = f"{len(ready)} of {len(voters)} nodes have been without the store for {wait_s:g} s; {needed} are needed"
        return None, say
    return ready[0], f"{len(ready)} of {len(voters)} nodes have lost the store; {ready[0]} is the lowest of them"
