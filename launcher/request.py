"""From the words of the command line to :class:`RunOptions`: what each of torchrun's options means here."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from launcher.notices import parse_notices
from launcher.options import (
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    Meeting,
    RunOptions,
    UsageError,
    ask_torch_for_devices,
    check_job_id,
    count_cpus,
    count_gpus,
    parse_bytes,
    parse_endpoint,
    parse_layout,
    parse_log_level,
    parse_nnodes,
    parse_nproc,
    parse_rdzv_conf,
    parse_run_id,
    parse_signals,
    refuse_if,
)
from launcher.rundir import resolve_root
from launcher.store.tls import Tls
from launcher.streams import StreamChoice, parse_filters, parse_ranks

START_METHODS = ("spawn", "fork", "forkserver")
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
VERIFY = ("full", "sample", "off")
KEEP = ("auto", "always", "never")
DEFER = ("nothing", "optimizer")
RESTART = ("keep", "fresh")
EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")
"""those of torch that are there without anyone registering one"""
BACKENDS = ("static", "c10d", "liverun", "etcd", "etcd-v2")
"""``static`` and ``c10d`` name the same store of our own here"""
DEFAULT_PORT = 29400
"""torch's for the c10d backend"""
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
    verify: str
    keep: str
    defer: str
    restart: str
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
    node_rank: int | None
    local_addr: str | None
    start_method: str | None
    role: str
    redirects: str
    tee: str
    local_ranks_filter: str
    ranks_filter: str
    keep_runs: int
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
    notices: str = "none"
    notice_file: str | None = None
    notice_signal: str | None = None


def read(words: RunWords, environ: Mapping[str, str], uid: int) -> tuple[RunOptions, list[str]]:
    """Return what was asked, and warnings about what is ignored. Raises ``UsageError``."""
    warnings: list[str] = []
    min_nodes, max_nodes = (1, 1) if words.standalone else parse_nnodes(words.nnodes)
    if words.standalone:
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
    _choose(words.verify, VERIFY, "--verify")
    _choose(words.keep, KEEP, "--keep")
    _choose(words.defer, DEFER, "--defer")
    _choose(words.restart, RESTART, "--restart")
    refuse_if(
        words.keep == "never" and words.defer != "nothing",
        f"--defer {words.defer} reads the old state after the commit, and --keep never gives it back before",
    )
    _choose(words.start_method, START_METHODS, "--start-method")
    _choose(words.numa_binding, NUMA_BINDINGS, "--numa-binding")
    _choose(words.event_log_handler, EVENT_HANDLERS, "--event-log-handler")
    _check_logs_specs(words.logs_specs)
    nproc = parse_nproc(
        words.nproc_per_node, num_cpus=count_cpus(), num_gpus=count_gpus(environ),
        ask_torch=ask_torch_for_devices,
    )  # fmt: skip
    _check_virtual_ranks(words, nproc, environ)
    layout = parse_layout(words.layout)
    misfit = layout.misfit(nproc) if layout is not None else None
    refuse_if(misfit is not None and max_nodes == 1, misfit or "")
    signals, strange = parse_signals(words.signals_to_handle)
    warnings += [f"--signals-to-handle: {name} cannot be handled, and is ignored" for name in strange]
    meeting = _meeting(words, min_nodes, max_nodes, warnings) if max_nodes > 1 else None
    host, port = _endpoint(words, warnings) if meeting is None else (words.local_addr or "", 0)
    redirects = _value(lambda: StreamChoice.parse(words.redirects, "--redirects"))
    tee = _value(lambda: StreamChoice.parse(words.tee, "--tee"))
    if (words.duplicate_stdout_filters or words.duplicate_stderr_filters) and not tee.any():
        warnings.append("duplicate filters look at what --tee tees, and nothing is; they are ignored")
    log_level, complaints = parse_log_level(environ.get("LOGLEVEL"))
    warnings += complaints
    refuse_if(words.keep_runs < 0, f"--keep-runs {words.keep_runs} is below 0")
    if environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") == "1":
        warnings.append("TORCH_DISABLE_SHARE_RDZV_TCP_STORE is ignored: the launcher serves the workers' first store")
    checkpoint_dir = _checkpoint_dir(words)
    log_dir = Path(words.log_dir).absolute() if words.log_dir else None
    refuse_if(log_dir is not None and log_dir.is_file(), f"--log-dir {log_dir} is a file")
    options = RunOptions(
        mode=_mode(words, environ), argv=(words.script, *(words.args or ())), nproc=nproc, standbys=words.standbys,
        layout=layout, job=check_job_id(words.job), root=resolve_root(words.run_dir, environ, uid),
        log_dir=log_dir, staging_bytes=parse_bytes(words.staging),
        verify=words.verify, keep=words.keep, defer=words.defer,
        restart=words.restart, max_restarts=words.max_restarts,
        shutdown_timeout_s=shutdown_timeout_s, host=host, port=port,
        rdzv_id="" if words.standalone or words.rdzv_id == "none" else parse_run_id(words.rdzv_id),
        meeting=meeting, preload=words.preload, monitor_interval_s=words.monitor_interval, environ=environ,
        role=words.role,
        fresh=words.start_method == "spawn", virtual_local_rank=words.virtual_local_rank,
        numa_binding=words.numa_binding, signals=tuple(signals), redirects=redirects, tee=tee,
        local_ranks=_value(lambda: parse_ranks(words.local_ranks_filter, "--local-ranks-filter")),
        ranks=_value(lambda: parse_ranks(words.ranks_filter, "--ranks-filter")),
        log_level=log_level, keep_runs=words.keep_runs,
        stdout_filters=parse_filters(words.duplicate_stdout_filters),
        stderr_filters=parse_filters(words.duplicate_stderr_filters),
        logs_specs=words.logs_specs, console_events=words.event_log_handler == "console",
        checkpoint_dir=checkpoint_dir, checkpoint_every=words.checkpoint_every, keep_last=words.keep_last,
        prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        notices=_value(lambda: parse_notices(words.notices, environ)),
        notice_file=Path(words.notice_file).absolute() if words.notice_file else None,
        notice_signal=_notice_signal(words.notice_signal),
    )  # fmt: skip
    return options, warnings


def _notice_signal(name: str | None) -> signal.Signals | None:
    if not name or name.lower() == "none":
        return None
    found, strange = parse_signals(name)
    wrong = bool(strange) or len(found) != 1
    refuse_if(wrong, f"--notice-signal {name!r} is not one signal that can be handled; write it like SIGUSR1")
    return found[0]


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


def _check_logs_specs(name: str | None) -> None:
    known = sorted(entry.name for entry in entry_points(group="torchrun.logs_specs")) if name else []
    refuse_if(
        bool(name) and name not in known,
        f"--logs-specs {name}: no package here registers it as an entry point of torchrun.logs_specs"
        + (f"; there are {', '.join(known)}" if known else ""),
    )


def _check_virtual_ranks(words: RunWords, nproc: int, environ: Mapping[str, str]) -> None:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if words.virtual_local_rank and visible is not None:
        count = len(visible.split(","))
        refuse_if(
            nproc + words.standbys > count,
            f"--virtual-local-rank: {nproc + words.standbys} workers, but CUDA_VISIBLE_DEVICES={visible}"
            f" names {count}",
        )


def _meeting(words: RunWords, min_nodes: int, max_nodes: int, warnings: list[str]) -> Meeting:
    """Return where several nodes meet. Raises ``UsageError`` if that was not said."""
    conf = parse_rdzv_conf(words.rdzv_conf)
    refuse_if(
        words.rdzv_backend not in BACKENDS, f"--rdzv-backend {words.rdzv_backend!r} is none of {', '.join(BACKENDS)}"
    )
    in_etcd = words.rdzv_backend.startswith("etcd")
    more: list[tuple[str, int | None]] = []
    if words.rdzv_endpoint:
        members = words.rdzv_endpoint.split(",") if in_etcd else [words.rdzv_endpoint]
        (host, port), *more = map(parse_endpoint, members)
    elif words.master_addr:
        host, port = words.master_addr, words.master_port
    else:
        raise UsageError(
            f"--nnodes {words.nnodes}: say where the nodes meet, with --rdzv-endpoint HOST:PORT on each of them;"
            " HOST is the address of one of them, or of a 'liverun store'"
        )
    where = words.rdzv_endpoint or words.master_addr
    unknown = 0 in (port, *(number for _, number in more))
    refuse_if(unknown, f"--rdzv-endpoint {where!r}: give a port that every node can know; 0 is anyone's guess")
    static = words.rdzv_backend == "static"
    refuse_if(
        words.node_rank is not None and not 0 <= words.node_rank < max_nodes,
        f"--node-rank {words.node_rank} is not from 0 to {max_nodes - 1}",
    )
    return Meeting(
        min_nodes=min_nodes, max_nodes=max_nodes, host=host, port=port or DEFAULT_PORT,
        more=tuple((other, number or DEFAULT_PORT) for other, number in more),
        backend="etcd" if in_etcd else "liverun",
        hosts=_yes_or_no(conf.pop("is_host"), "is_host") if "is_host" in conf else None,
        pin=words.node_rank if words.node_rank is not None else 0 if static and words.master_addr else None,
        address=words.local_addr,
        join_timeout_s=_conf_seconds(conf, ("join_timeout", "timeout"), 600.0),
        last_call_s=_conf_seconds(conf, ("last_call_timeout",), 5.0),
        tls=_tls(conf), lost_after_s=_lost_after(conf, warnings),
    )  # fmt: skip


def _tls(conf: dict[str, str]) -> Tls | None:
    """Read ``tls_ca``, ``tls_cert``, ``tls_key``; torch calls them ``cacert``, ``ssl_cert`` and ``ssl_cert_key``."""
    found = {}
    for ours, torchs in (("tls_ca", "cacert"), ("tls_cert", "ssl_cert"), ("tls_key", "ssl_cert_key")):
        for name in (ours, torchs):
            if name in conf:
                found[ours] = Path(conf.pop(name)).absolute()
                refuse_if(not found[ours].is_file(), f"--rdzv-conf {name}={found[ours]}: there is no such file")
    conf.pop("protocol", None)  # torch's, for etcd: said by tls_ca here
    if not found:
        return None
    refuse_if("tls_ca" not in found, "--rdzv-conf tls_cert and tls_key go with tls_ca: whom this node trusts")
    refuse_if(("tls_cert" in found) != ("tls_key" in found), "--rdzv-conf tls_cert and tls_key go together")
    return Tls(ca=found["tls_ca"], cert=found.get("tls_cert"), key=found.get("tls_key"))


def _lost_after(conf: dict[str, str], warnings: list[str]) -> float:
    """Read the last of ``--rdzv-conf``, and warn about what has no meaning here."""
    interval_s = _conf_seconds(conf, ("keep_alive_interval",), 5.0)
    attempts = _conf_seconds(conf, ("keep_alive_max_attempt",), 3.0)
    for name in ("read_timeout", "close_timeout", "heartbeat_timeout", "store_type", "use_agent_store", "rank"):
        conf.pop(name, None)  # torch's own, of no consequence here
    warnings += [f"--rdzv-conf {name} has no meaning here, and is ignored" for name in conf]
    return interval_s * attempts


def _conf_seconds(conf: dict[str, str], names: tuple[str, ...], default: float) -> float:
    value = default
    for name in names:
        text = conf.pop(name, None)
        if text is not None:
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            refuse_if(not 0 <= value < float("inf"), f"--rdzv-conf {name}={text} is not a number of seconds")
    return value


def _yes_or_no(text: str, name: str) -> bool:
    word = text.lower()
    yes, no = ("1", "true", "yes"), ("0", "false", "no")
    refuse_if(word not in (*yes, *no), f"--rdzv-conf {name}={text} is neither true nor false")
    return word in yes


def _endpoint(words: RunWords, warnings: list[str]) -> tuple[str, int]:
    """Return where the first world's store listens: what was given, and loopback otherwise."""
    parse_rdzv_conf(words.rdzv_conf)
    if words.rdzv_conf:
        warnings.append("--rdzv-conf is ignored: one node has nobody to wait for")
    if words.node_rank:
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
