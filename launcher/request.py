"""From the words of the command line to :class:`RunOptions`: what each of torchrun's options means here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from launcher.options import (
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    RunOptions,
    UsageError,
    ask_torch_for_devices,
    check_job_id,
    check_rdzv_conf,
    count_cpus,
    count_gpus,
    parse_bytes,
    parse_endpoint,
    parse_layout,
    parse_nnodes,
    parse_nproc,
    parse_run_id,
    parse_signals,
    refuse_if,
)
from launcher.rundir import resolve_root
from launcher.streams import StreamChoice, parse_filters, parse_ranks

START_METHODS = ("spawn", "fork", "forkserver")
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")
"""those of torch that are there without anyone registering one"""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunWords:
    """The options of ``liverun run`` as they were given."""

    script: str
    args: list[str] | None
    nnodes: str
    nproc_per_node: str
    standbys: int
    layout: str | None
    job: str | None
    run_dir: str | None
    staging: str
    preload: str
    max_restarts: int
    shutdown_timeout: float | None
    monitor_interval: float
    log_dir: str | None
    module: bool
    no_python: bool
    run_path: bool
    standalone: bool
    master_addr: str | None
    master_port: int | None
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_conf: str
    node_rank: int
    local_addr: str | None
    start_method: str | None
    role: str
    redirects: str
    tee: str
    local_ranks_filter: str
    duplicate_stdout_filters: str
    duplicate_stderr_filters: str
    event_log_handler: str
    logs_specs: str | None
    numa_binding: str | None
    signals_to_handle: str
    virtual_local_rank: bool
    checkpoint_dir: str | None = None
    checkpoint_every: int | None = None
    keep_last: int | None = None


def read(words: RunWords, environ: Mapping[str, str], uid: int) -> tuple[RunOptions, list[str]]:
    """Return what was asked, and warnings about what is ignored. Raises ``UsageError``."""
    warnings: list[str] = []
    parse_nnodes(words.nnodes)
    refuse_if(
        words.module and words.no_python and not words.run_path,
        "--module and --no-python exclude each other",
    )
    shutdown_timeout_s = _shutdown_timeout(words.shutdown_timeout, environ)
    negative = words.standbys < 0 or words.max_restarts < 0 or shutdown_timeout_s < 0
    refuse_if(negative, "--standbys, --max-restarts and --shutdown-timeout are not below 0")
    refuse_if(
        words.monitor_interval <= 0, f"--monitor-interval {words.monitor_interval:g} is no time at all"
    )
    _choose(words.start_method, START_METHODS, "--start-method")
    _choose(words.numa_binding, NUMA_BINDINGS, "--numa-binding")
    _choose(words.event_log_handler, EVENT_HANDLERS, "--event-log-handler")
    nproc = parse_nproc(
        words.nproc_per_node, num_cpus=count_cpus(), num_gpus=count_gpus(environ),
        ask_torch=ask_torch_for_devices,
    )  # fmt: skip
    _check_virtual_ranks(words, nproc, environ)
    layout = parse_layout(words.layout)
    misfit = layout.misfit(nproc) if layout is not None else None
    refuse_if(misfit is not None, misfit or "")
    signals, strange = parse_signals(words.signals_to_handle)
    warnings += [f"--signals-to-handle: {name} cannot be handled, and is ignored" for name in strange]
    host, port = _endpoint(words, warnings)
    redirects = _value(lambda: StreamChoice.parse(words.redirects, "--redirects"))
    tee = _value(lambda: StreamChoice.parse(words.tee, "--tee"))
    if (words.duplicate_stdout_filters or words.duplicate_stderr_filters) and not tee.any():
        warnings.append("duplicate filters look at what --tee tees, and nothing is; they are ignored")
    checkpoint_dir = _checkpoint_dir(words)
    log_dir = Path(words.log_dir).absolute() if words.log_dir else None
    refuse_if(log_dir is not None and log_dir.is_file(), f"--log-dir {log_dir} is a file")
    options = RunOptions(
        mode=_mode(words, environ), argv=(words.script, *(words.args or ())), nproc=nproc, standbys=words.standbys,
        layout=layout, job=check_job_id(words.job), root=resolve_root(words.run_dir, environ, uid),
        log_dir=log_dir, staging_bytes=parse_bytes(words.staging), max_restarts=words.max_restarts,
        shutdown_timeout_s=shutdown_timeout_s, host=host, port=port,
        rdzv_id="" if words.standalone or words.rdzv_id == "none" else parse_run_id(words.rdzv_id),
        preload=words.preload, monitor_interval_s=words.monitor_interval, environ=environ, role=words.role,
        fresh=words.start_method == "spawn", virtual_local_rank=words.virtual_local_rank,
        numa_binding=words.numa_binding, signals=tuple(signals), redirects=redirects, tee=tee,
        local_ranks=_value(lambda: parse_ranks(words.local_ranks_filter, "--local-ranks-filter")),
        stdout_filters=parse_filters(words.duplicate_stdout_filters),
        stderr_filters=parse_filters(words.duplicate_stderr_filters),
        logs_specs=words.logs_specs, console_events=words.event_log_handler == "console",
        checkpoint_dir=checkpoint_dir, checkpoint_every=words.checkpoint_every, keep_last=words.keep_last,
        prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
    )  # fmt: skip
    return options, warnings


def _checkpoint_dir(words: RunWords) -> Path | None:
    for name, number in (("--checkpoint-every", words.checkpoint_every), ("--keep-last", words.keep_last)):
        refuse_if(number is not None and number < 1, f"{name} {number} is not at least 1")
        refuse_if(number is not None and not words.checkpoint_dir, f"{name} needs --checkpoint-dir")
    if not words.checkpoint_dir:
        return None
    folder = Path(words.checkpoint_dir).absolute()
    refuse_if(folder.exists() and not folder.is_dir(), f"--checkpoint-dir {folder} is not a folder")
    return folder


def _value(parse: Callable[[], T]) -> T:
    try:
        return parse()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _choose(word: str | None, choices: tuple[str, ...], option: str) -> None:
    refuse_if(
        word is not None and word not in choices, f"{option} {word!r} is none of {', '.join(choices)}"
    )


def _mode(words: RunWords, environ: Mapping[str, str]) -> str:
    if environ.get("LIVERUN_FUNCTION"):
        return "function"
    if words.run_path:
        return "path"
    return "module" if words.module else "program" if words.no_python else "script"


def _shutdown_timeout(given: float | None, environ: Mapping[str, str]) -> float:
    if given is not None:
        return given
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or str(DEFAULT_SHUTDOWN_TIMEOUT_S)
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text!r} is not a number of seconds") from None


def _check_virtual_ranks(words: RunWords, nproc: int, environ: Mapping[str, str]) -> None:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if words.virtual_local_rank and visible is not None:
        count = len(visible.split(","))
        refuse_if(
            nproc + words.standbys > count,
            f"--virtual-local-rank: {nproc + words.standbys} workers, but CUDA_VISIBLE_DEVICES={visible}"
            f" names {count}",
        )


def _endpoint(words: RunWords, warnings: list[str]) -> tuple[str, int]:
    """Return where the first world's store listens: what was given, and loopback otherwise."""
    check_rdzv_conf(words.rdzv_conf)
    if words.rdzv_conf:
        warnings.append("--rdzv-conf is ignored: one node has nobody to wait for")
    if words.node_rank != 0:
        warnings.append(f"--node-rank {words.node_rank} is ignored: the job has one node")
    if words.rdzv_backend not in ("static", "c10d"):
        warnings.append(f"--rdzv-backend {words.rdzv_backend} is ignored by this version")
    host, port = words.master_addr or words.local_addr or "127.0.0.1", words.master_port or 0
    if words.rdzv_endpoint and not words.standalone:
        given_host, given_port = parse_endpoint(words.rdzv_endpoint)
        if words.rdzv_backend != "static":
            warnings.append("--rdzv-endpoint is ignored: the job has one node")
        elif given_port is None:
            raise UsageError(f"--rdzv-endpoint {words.rdzv_endpoint!r}: the port is missing")
        else:
            host, port = given_host, given_port
    return host.removeprefix("[").removesuffix("]"), port
