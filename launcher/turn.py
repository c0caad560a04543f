"""One decision in the making: the state as it becomes, and the actions gathered on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.model import Action, Decision, Fork, JobState, Proposal, Record, Send, Worker
from liverun.messages import Message

MAX_BARREN = 3
"""standbys of a node in a row that may end before they join, before no more are started there"""


class Turn:
    """Mutable only while one event is decided."""

    def __init__(self, now: float, state: JobState) -> None:
        self.now = now
        self.state = state
        self.actions: list[Action] = []

    def decision(self) -> Decision:
        """Return what was decided."""
        return Decision(state=self.state, actions=tuple(self.actions), reason=self.state.reason)

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **changes)

    def set_proposal(self, **changes: Any) -> Proposal:
        """Change fields of the present proposal."""
        assert self.state.proposal is not None
        proposal = replace(self.state.proposal, **changes)
        self.set(proposal=proposal)
        return proposal

    def set_worker(self, worker: str, **changes: Any) -> None:
        """Change fields of a worker."""
        workers = dict(self.state.workers)
        workers[worker] = replace(workers[worker], **changes)
        self.set(workers=workers)

    def drop_worker(self, worker: str) -> Worker:
        """Forget a worker that has ended."""
        workers = dict(self.state.workers)
        dropped = workers.pop(worker)
        self.set(workers=workers)
        return dropped

    def do(self, action: Action) -> None:
        """Ask the shell for something."""
        self.actions.append(action)

    def send(self, worker: str, message: Message) -> None:
        """Send to a worker that is there and listens."""
        known = self.state.workers.get(worker)
        if known is not None and known.joined:
            self.do(Send(worker=worker, message=message))

    def send_ranks(self, message: Message) -> None:
        """Send to every rank of the world."""
        assert self.state.world is not None
        for worker in self.state.world.ranks:
            self.send(worker, message)

    def record(
        self,
        kind: str,
        reason: str,
        *,
        generation: int | None = None,
        wish: int | None = None,
        fields: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Write an event; its reason becomes the job's. ``wish``: who sees it, if not the proposer."""
        proposal = self.state.proposal
        if generation is None:
            generation = self.state.world.generation if self.state.world else 0
        if (
            wish is None
            and proposal is not None
            and proposal.generation == generation
            and proposal.wish is not None
        ):
            wish = proposal.wish.id
        self.set(reason=reason)
        self.do(
            Record(
                kind=kind, generation=generation, reason=reason, fields={**(fields or {}), **more}, wish=wish
            )
        )

    def set_node(self, node: str, **changes: Any) -> None:
        """Change fields of a node."""
        self.set(nodes={**self.state.nodes, node: replace(self.state.nodes[node], **changes)})

    def fill_pool(self) -> None:
        """Ask for standbys up to each node's slots, once the script is known to join."""
        if not self.state.standbys_started or self.state.phase == "ending":
            return
        for node in self.state.in_order():
            present = sum(worker.node == node.id for worker in self.state.workers.values())
            present += list(self.state.done_ranks.values()).count(node.id)
            missing = node.nproc + node.standbys - present - node.forks_to_come - node.boot_to_come
            if node.barren < MAX_BARREN and missing > 0:
                self.set_node(node.id, forks_to_come=node.forks_to_come + missing)
                self.do(Fork(node=node.id, count=missing))

    def name(self, worker: str) -> str:
        """Write a worker as people should read it, with its rank if it has one."""
        world, proposal = self.state.world, self.state.proposal
        if world is not None and worker in world.ranks:
            return f"worker {worker} (rank {world.ranks.index(worker)})"
        if proposal is not None and proposal.target is not None and worker in proposal.target.ranks:
            return f"worker {worker} (to be rank {proposal.target.ranks.index(worker)})"
        return f"worker {worker}"
