"""The status object: what ``liverun status --json`` prints."""

from __future__ import annotations

from typing import Any

from launcher.model import JobState, Node
from launcher.nodes import JOIN_PATIENCE_S, has_joined

SCHEMA_VERSION = 1


def job_state(state: JobState, now: float) -> str:
    """Return ``starting``, ``running``, ``resizing`` or ``stopping``."""
    if state.phase == "ending" or state.stopping is not None:
        return "stopping"
    if state.world is not None:
        return "resizing" if state.proposal is not None else "running"
    plain = state.began is not None and now > state.began + JOIN_PATIENCE_S and not has_joined(state)
    return "running" if plain else "starting"


def status_object(state: JobState, *, job: str, now: float) -> dict[str, Any]:
    """Return the job as it is now."""
    world = state.world
    word = job_state(state, now)
    return {
        "schema_version": SCHEMA_VERSION,
        "job": job,
        "state": word,
        "reason": state.reason,
        "generation": world.generation if world else 0,
        "step": max(state.steps.values(), default=None),
        "report": dict(state.report),
        "world": world.as_dict() if world else None,
        "nodes": [_node(state, node, word) for node in sorted(state.nodes.values(), key=lambda node: node.place)],
        "restarts": {"used": state.restarts, "max": state.max_restarts},
        "last_restart": state.last_restart,
        "proposal": None
        if state.proposal is None
        else {"generation": state.proposal.generation, "phase": state.proposal.phase.value},
        "last_resize": state.last_resize,
        "last_checkpoint": state.last_checkpoint,
    }


def _node(state: JobState, node: Node, word: str) -> dict[str, Any]:
    """Return one node with its workers; its state is ``active``, ``spare`` or ``leaving``."""
    world = state.world
    ranks = {worker: rank for rank, worker in enumerate(world.ranks)} if world else {}
    rows = []
    for worker in state.workers.values():
        if worker.node == node.id:
            rank = ranks.get(worker.id, None if world else worker.boot_rank)
            rows.append({"id": worker.id, "pid": worker.pid, "rank": rank, "state": worker.state})
    rows.sort(key=lambda row: (row["rank"] is None, row["rank"] or 0))
    spare = node.id not in state.ranked_nodes()
    return {
        "id": node.id,
        "host": node.host,
        "state": "leaving" if word == "stopping" or node.leaving else "spare" if spare else "active",
        "workers": rows,
        "standbys": sum(row["state"] == "standby" for row in rows),
    }


def ended_status(status: dict[str, Any], *, state: str, reason: str, exit_code: int | None) -> dict[str, Any]:
    """Return the last status of a job that has ended."""
    nodes = [{**node, "state": "gone", "workers": [], "standbys": 0} for node in status.get("nodes", [])]
    return {**status, "state": state, "reason": reason, "exit_code": exit_code, "nodes": nodes}
