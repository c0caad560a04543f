"""Process groups of one generation: the world's own, and the bridge between the old world and the new.

The *bridge* is a group over everyone who takes part in a change of world: members that stay, leave and join. Plans
are agreed on over it, state streams over it, and the vote is taken over it. It lives from PREPARING to RETIRED.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from liverun import device as devices
from liverun import fence
from liverun.layout import Layout

_NAMES_OFFSETS = {"bridge": 50_000, "late": 60_000}
"""Names of bridge groups start here within a generation's range, clear of the world's own."""

_MAX_PAYLOAD_BYTES = 256 * 1024 * 1024


def connect_store(host: str, port: int, *, timeout: timedelta) -> Any:
    """Connect to the c10d store of a generation. Raises ``torch.distributed.DistStoreError``."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def open_bridge(
    store: Any, *, generation: int, rank: int, size: int, device: torch.device, timeout: timedelta,
    name: str = "bridge",
) -> fence.Globals:
    """Build the bridge; its group is ``default_pg`` of what is returned. Collective over all members.

    The one called ``late`` is for what still moves when the new world is active.
    """
    there = fence.new_globals(generation)
    there.group_count += _NAMES_OFFSETS[name]
    with fence.seen_by_this_thread(there):
        dist.init_process_group(
            devices.backend(device), store=dist.PrefixStore(name, store), rank=rank, world_size=size,
            timeout=timeout,
        )
    return there


def open_world(
    there: fence.Globals,
    *,
    layout: Layout,
    device: torch.device,
    timeout: timedelta,
    store: Any = None,
    rank: int = -1,
    size: int = -1,
) -> None:
    """Build the default group and Megatron's parallel groups of a world, in ``there``. Collective over the world.

    Without a ``store`` the rendezvous is torch's ``env://``.
    """
    with fence.seen_by_this_thread(there):
        if store is None:
            dist.init_process_group(devices.backend(device), init_method="env://", timeout=timeout)
        else:
            dist.init_process_group(
                devices.backend(device), store=dist.PrefixStore("world", store), rank=rank, world_size=size,
                timeout=timeout,
            )
        if there.parallel_state is not None:
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.expert_tp,
                distributed_timeout_minutes=timeout.total_seconds() / 60,
            )


def set_timeout(there: fence.Globals, timeout: timedelta) -> None:
    """Give every group of a world the time-out it trains with; while it is prepared it has a shorter one.

    gloo cannot abort an operation: a preparation that waits for a peer which never answers is over by its time-out.
    """
    for group in there.groups:
        c10d._set_pg_timeout(timeout, group)


def allgather_bytes(group: Any, payload: bytes, device: torch.device) -> list[bytes]:
    """Give every rank's ``payload`` to every rank of ``group``, in rank order."""
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(group.size())]
    group.allgather([lengths], [length]).wait()
    sizes = [int(size) for size in lengths]
    if max(sizes) > _MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {max(sizes)} bytes is over the limit of {_MAX_PAYLOAD_BYTES}")
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else mine[:0]
    mine = mine.to(device)
    gathered = [torch.empty_like(mine) for _ in sizes]
    group.allgather([gathered], [mine]).wait()
    return [bytes(data[:size].cpu().numpy()) for data, size in zip(gathered, sizes, strict=True)]


def allgather_json(group: Any, value: Any, device: torch.device) -> list[Any]:
    """Give every rank's JSON ``value`` to every rank of ``group``, in rank order."""
    return [json.loads(data) for data in allgather_bytes(group, json.dumps(value).encode(), device)]


def vote(group: Any, yes: bool, device: torch.device) -> bool:
    """Return true on every rank if every rank of ``group`` said yes. Raises ``RuntimeError`` if a peer is gone."""
    ballot = torch.tensor([int(yes)], dtype=torch.int32, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    group.allreduce([ballot], options).wait()
    return bool(int(ballot))
