"""The environment of a worker: torchrun's variables, and ours."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.options import RunOptions, keeps_processes

PRIVATE = (
    "LIVERUN_TOKEN", "LIVERUN_TOKEN_FILE", "LIVERUN_PRELOAD", "LIVERUN_OUTCOME", "LIVERUN_FUNCTION",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""not handed on from the launcher's own environment"""


CHECKPOINT_VARIABLES = ("LIVERUN_CHECKPOINT_DIR", "LIVERUN_CHECKPOINT_EVERY", "LIVERUN_KEEP_LAST")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A first world, as one node starts its part of it."""

    host: str
    """of the c10d store"""
    port: int
    first_rank: int = 0
    """of this node"""
    size: int
    """workers of all nodes"""
    count: int
    """workers of this node"""
    node_rank: int = 0
    num_nodes: int = 1
    restarts: int = 0


def worker_environ(
    options: RunOptions,
    *,
    job: str,
    folder: Path,
    socket: Path,
    worker: str,
    slot: int,
    ranked: bool,
    threads: int | None,
    attempt: Attempt,
    error_file: Path | None,
) -> dict[str, str]:
    """Everything a worker finds in ``os.environ``. A standby has no rank, and is told of none."""
    environ = {name: value for name, value in options.environ.items() if name not in PRIVATE}
    environ["LIVERUN_SOCKET"] = str(socket)
    environ["LIVERUN_WORKER"] = worker
    environ["LIVERUN_SLOT"] = str(slot)
    environ["LIVERUN_JOB"] = job
    environ["LIVERUN_RUN_DIR"] = str(folder)
    environ["LIVERUN_STAGING_BYTES"] = str(options.staging_bytes)
    environ["LIVERUN_VERIFY_MODE"], environ["LIVERUN_KEEP_MODE"] = options.verify, options.keep
    environ["LIVERUN_DEFER_MODE"] = options.defer
    environ["LIVERUN_RESTART_MODE"] = "keep" if keeps_processes(options) else "fresh"
    for name in CHECKPOINT_VARIABLES:
        environ.pop(name, None)
    if options.checkpoint_dir is not None:
        environ["LIVERUN_CHECKPOINT_DIR"] = str(options.checkpoint_dir)
        numbers = (options.checkpoint_every, options.keep_last)
        environ.update({n: str(v) for n, v in zip(CHECKPOINT_VARIABLES[1:], numbers, strict=True) if v is not None})
    environ.pop("LIVERUN_LAYOUT", None)
    if options.layout is not None:
        environ["LIVERUN_LAYOUT"] = str(options.layout)
    environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environ["TORCHELASTIC_ERROR_FILE"] = str(error_file or "")
    environ["TORCHELASTIC_RUN_ID"] = options.rdzv_id or job
    if options.virtual_local_rank:
        environ["CUDA_VISIBLE_DEVICES"] = visible_device(options.environ.get("CUDA_VISIBLE_DEVICES"), slot)
    if options.meeting is not None and (interface := interface_of(options.host)):
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else gloo asks for the address of the host's name
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    if ranked:
        environ.update(ranked_environ(options, local_rank=slot, attempt=attempt))
    return environ


def ranked_environ(options: RunOptions, *, local_rank: int, attempt: Attempt) -> Mapping[str, str]:
    """Return what torchrun tells a worker of its place."""
    size, rank = str(attempt.size), str(attempt.first_rank + local_rank)
    return {
        "RANK": rank,
        "LOCAL_RANK": "0" if options.virtual_local_rank else str(local_rank),
        "GROUP_RANK": str(attempt.node_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": options.role,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(attempt.count),
        "GROUP_WORLD_SIZE": str(attempt.num_nodes),
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": attempt.host,
        "MASTER_PORT": str(attempt.port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in options.signals),
    }


@functools.cache
def interface_of(address: str) -> str | None:
    """Return the network interface that has an address of this node; ``None`` for a name, or someone else's."""
    import psutil  # type: ignore[import-untyped]

    for name, found in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in found):
            return str(name)
    return None


def visible_device(visible: str | None, slot: int) -> str:
    """Return the one device of a worker under ``--virtual-local-rank``, out of those the launcher sees."""
    if visible is None:
        return str(slot)
    names = visible.split(",")
    return names[slot].strip() if slot < len(names) else ""


def with_local_rank(argv: Iterable[str], local_rank: int) -> list[str]:
    """Put the local rank for ``${local_rank}`` in arguments: the one macro torchrun has."""
    return [word.replace("${local_rank}", str(local_rank)) for word in argv]
