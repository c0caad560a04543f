"""The controller and the embedded store move to another node while the job trains: what is said, and in which order.

1. leader ``OpenDoors``  -> the successor listens, for a store and for a controller: ``DoorsOpen``
2. the leader seals its store, which from here on only tells where it has gone, and writes down the job's state.
   Reports that come now are neither heard nor confirmed: their senders keep them.
3. leader ``TakeOver``   -> the successor begins the next term with store and state, and says ``TookOver``
4. leader ``Follow``     -> every other node goes to the new controller, with what was not confirmed; then the
   leader's agent ends.

No worker notices. If the successor says that it cannot take over, the leader begins a term of its own and goes on.
If it says nothing it may have taken over: the leader writes no more, and goes as if it had been told so. Where the
successor is not there after all, the others bring the store back (:mod:`launcher.succession`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from launcher.model import JobState, Node, Worker, World
from liverun.layout import Layout


def dump_state(state: JobState, *, without: str) -> dict[str, Any]:
    """Write down a state in which nothing is under way, without a node that leaves."""
    assert state.proposal is None
    assert state.retiring is None
    assert state.saving is None
    values = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(JobState)
        if field.name not in ("proposal", "retiring", "queued", "stopping", "saving")
    }
    return {
        **values,
        **{
            name: None if (layout := getattr(state, name)) is None else layout.as_dict()
            for name in ("layout", "layout_before")
        },
        "failing": {},
        "nodes": [
            {**dataclasses.asdict(node), "retry_at": 0.0, "away": False}
            for node in state.nodes.values()
            if node.id != without
        ],
        "handing_over": False,
        "no_heirs": [],
        "workers": [dataclasses.asdict(worker) for worker in state.workers.values() if worker.node != without],
        "world": dataclasses.asdict(state.world) if state.world is not None else None,
        "booted": list(state.booted),
        "clearing": [],
        "began": None,
        "gathering_since": None,
        "last_arrival": 0.0,  # another host's clock is nothing to compare with
    }


def load_state(values: Mapping[str, Any], *, leads: str, now: float) -> JobState:
    """Read what :func:`dump_state` wrote. Raises ``ValueError`` for anything else."""
    try:
        nodes = [Node(**{**node, "leads": node["id"] == leads, "retry_at": 0.0}) for node in values["nodes"]]
        workers = [
            Worker(**{**worker, "layout": Layout(**worker["layout"]) if worker["layout"] else None})
            for worker in values["workers"]
        ]
        world = values["world"]
        if world is not None:
            world = World(
                generation=world["generation"], layout=Layout(**world["layout"]), ranks=tuple(world["ranks"])
            )
        return JobState(
            **{
                **values,
                **{
                    name: Layout(**values[name]) if values[name] else None for name in ("layout", "layout_before")
                },
                "nodes": {node.id: node for node in nodes},
                "workers": {worker.id: worker for worker in workers},
                "world": world,
                "booted": tuple(values["booted"]),
                "clearing": frozenset(values["clearing"]),
                "no_heirs": frozenset(values["no_heirs"]),
                "began": now,
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the state of a job is malformed: {error}") from None
