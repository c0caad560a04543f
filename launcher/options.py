"""What ``liverun run`` was asked, read once and checked once."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.streams import NO_STREAMS, StreamChoice
from liverun.layout import Layout

if TYPE_CHECKING:
    from launcher.store.tls import Tls

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
DEFAULT_SHUTDOWN_TIMEOUT_S = 30.0
DEFAULT_KEEP_RUNS = 20
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class UsageError(Exception):
    """The user's mistake, in one sentence; exit code 2."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How the nodes of a job find each other."""

    min_nodes: int
    max_nodes: int
    host: str
    """of the rendezvous store: as it was given, the same on every node"""
    port: int
    more: tuple[tuple[str, int], ...] = ()
    """further members of an etcd cluster: host and port"""
    backend: str = "liverun"
    """``liverun``: embedded in the agent that can listen there, or a ``liverun store`` there; or ``etcd``"""
    hosts: bool | None = None
    """whether this agent carries the store; ``None``: if the address is its own and nobody has it yet"""
    pin: int | None = None
    """``--node-rank``"""
    address: str | None = None
    """``--local-addr``: where others reach this node; ``None``: by which it reaches the store"""
    join_timeout_s: float = 600.0
    """how long the fewest nodes may take to come"""
    last_call_s: float = 5.0
    """how long the first world waits for more nodes once there are enough"""
    tls: Tls | None = None
    """for every connection between nodes, and to the store"""
    lost_after_s: float = 15.0
    """silence after which a node is given up"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Everything the agent of a job needs to know."""

    mode: str
    """``script``, ``module``, ``program``, ``path`` (runpy.run_path) or ``function`` (pickled, from Python)"""
    argv: tuple[str, ...]
    nproc: int
    """ranked workers of the first world"""
    standbys: int
    layout: Layout | None
    job: str | None
    root: Path
    """folder of all jobs"""
    log_dir: Path | None
    staging_bytes: int
    max_restarts: int
    shutdown_timeout_s: float
    host: str
    """the address that a world's store listens at"""
    port: int
    """port of the first world's store; 0 takes a free one"""
    rdzv_id: str
    preload: str
    monitor_interval_s: float
    environ: Mapping[str, str]
    """the environment workers start from"""
    meeting: Meeting | None = None
    """none for a job of one node"""
    verify: str = "full"
    """what a resize compares: ``full``, ``sample`` or ``off``"""
    keep: str = "auto"
    """the old state until a resize commits: ``auto``, ``always`` or ``never``"""
    defer: str = "nothing"
    """what moves after the commit of a resize: ``optimizer``, or ``nothing``"""
    restart: str = "keep"
    """what a restart does with processes that are well and have joined: ``keep`` or ``fresh``"""
    role: str = "default"
    fresh: bool = False
    """a new interpreter for every worker, instead of a fork of the template"""
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS
    """end the job, and are what workers are sent first"""
    redirects: StreamChoice = NO_STREAMS
    tee: StreamChoice = NO_STREAMS
    local_ranks: frozenset[int] | None = None
    """only these are shown on the console"""
    stdout_filters: tuple[str, ...] = ()
    """teed lines with one of these words are also written to ``filtered_stdout.log``"""
    stderr_filters: tuple[str, ...] = ()
    logs_specs: str | None = None
    """name of an entry point of the group ``torchrun.logs_specs``"""
    ranks: frozenset[int] | None = None
    """only these global ranks are shown on the console"""
    log_level: int = logging.WARNING
    """of what the agent says: above ``WARNING`` errors only, below it events too"""
    keep_runs: int = DEFAULT_KEEP_RUNS
    """run folders of jobs that have ended which are kept; the rest goes when a job starts"""
    prefix_template: str | None = None
    checkpoint_dir: Path | None = None
    checkpoint_every: int | None = None
    """steps between two checkpoints"""
    keep_last: int | None = None
    notices: tuple[str, ...] = ()
    """clouds whose metadata service is asked whether this node will go (:mod:`launcher.notices`)"""
    notice_file: Path | None = None
    """while it is there, this node will go"""
    notice_signal: signal.Signals | None = None
    """means a notice, and is neither forwarded nor a wish to end the job"""
    console_events: bool = False
    """torch's events, one JSON object a line, on stderr"""


def keeps_processes(options: RunOptions) -> bool:
    """Whether a worker may run its script again in the same process."""
    return options.restart == "keep" and options.max_restarts > 0 and not options.fresh and options.mode != "program"


def refuse_if(wrong: bool, sentence: str) -> None:
    """Raise ``UsageError`` if something is wrong."""
    if wrong:
        raise UsageError(sentence)


def parse_nnodes(text: str) -> tuple[int, int]:
    """Read ``N`` or ``MIN:MAX``. Raises ``UsageError``."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        raise UsageError(f"--nnodes {text!r} is neither N nor MIN:MAX")
    low, high = int(match[1]), int(match[2] or match[1])
    if low < 1 or high < low:
        raise UsageError(f"--nnodes {text} asks for no possible number of nodes")
    return low, high


def parse_nproc(
    text: str, *, num_cpus: int, num_gpus: int, ask_torch: Callable[[str], int] = lambda _: 0
) -> int:
    """Read ``--nproc-per-node``: a number, ``auto``, ``cpu``, ``gpu`` or a kind of device that torch knows.

    Raises ``UsageError``.
    """
    word = text.strip().lower()
    if word == "auto":
        return num_gpus or num_cpus
    if word == "cpu":
        return num_cpus
    if word == "gpu":
        if num_gpus == 0:
            raise UsageError("--nproc-per-node gpu: no GPU is visible on this node")
        return num_gpus
    if word.isdecimal() and int(word) >= 1:
        return int(word)
    if word.isidentifier() and (found := ask_torch(word)):
        return found
    raise UsageError(
        f"--nproc-per-node {text!r} is neither a number of at least 1 nor auto, cpu or gpu"
        + (f"; torch finds no device called {word} here" if word.isidentifier() else "")
    )


def parse_run_id(text: str) -> str:
    """Accept an id that can stand in the name of a folder. Raises ``UsageError``."""
    if "/" in text or "\0" in text or len(text.encode()) > 200:
        raise UsageError(f"--rdzv-id {text!r}: use up to 200 characters, and no '/'")
    return text


def ask_torch_for_devices(kind: str) -> int:
    """Count devices of a kind only torch knows (``xpu``, or one of a plug-in), in an interpreter of its own."""
    code = (
        "import sys, torch\n"
        "module = getattr(torch, sys.argv[1], None)\n"
        "names = ('xpu', 'mps', 'mtia', torch._C._get_privateuse1_backend_name())\n"
        "there = sys.argv[1] in names and module is not None and module.is_available()\n"
        "print(module.device_count() if there else 0)\n"
    )
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    try:
        done = subprocess.run(
            [python, "-c", code, kind], capture_output=True, text=True, check=True, timeout=120
        )
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def parse_bytes(text: str) -> int:
    """Read ``512MiB``, ``2GB`` or plain bytes. Raises ``UsageError``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise UsageError(f"{text!r} is not a size; write it like 512MiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse_duration(text: str) -> float:
    """Read ``30s``, ``2m``, ``1h`` or plain seconds. Raises ``UsageError``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|s|m|min|h)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{text!r} is no duration; write it like 30s or 2m")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}[match[2]]


def parse_layout(text: str | None) -> Layout | None:
    """Read ``--layout``. Raises ``UsageError``."""
    if not text:
        return None
    try:
        return Layout.parse(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_job_id(text: str | None) -> str | None:
    """Accept an id that can name a folder. Raises ``UsageError``."""
    if not text:
        return None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise UsageError(f"--job {text!r}: use up to 64 letters, digits, '.', '_' and '-'")
    return text


def parse_signals(text: str) -> tuple[list[signal.Signals], list[str]]:
    """Read ``--signals-to-handle``; the signals, and the names that are none or cannot be handled."""
    found: list[signal.Signals] = []
    strange: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        number = signal.Signals.__members__.get(word)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            strange.append(word)
        else:
            found.append(number)
    return found, [word for word in strange if word]


def parse_rdzv_conf(text: str) -> dict[str, str]:
    """Read ``KEY=VALUE,KEY=VALUE``. Raises ``UsageError``."""
    found = {}
    text = text.strip().strip("'\"")  # a shell's quotes, where no shell took them away
    for pair in text.split(",") if text else ():
        key, _, value = pair.partition("=")
        if not key.strip() or not value.strip():
            raise UsageError(f"--rdzv-conf {text!r}: write KEY=VALUE,KEY=VALUE")
        found[key.strip()] = value.strip()
    return found


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """Read ``HOST[:PORT]``, an IPv6 address in brackets or bare. Raises ``UsageError``."""
    word = text.strip()
    host, colon, port = word.rpartition(":")
    if not colon or word.endswith("]"):
        host, port = word, ""
    host = host.removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[\w.:-]+", host) or (port and (not port.isdecimal() or int(port) > 65535)):
        raise UsageError(f"--rdzv-endpoint {text!r} is not HOST:PORT")
    return host, int(port) if port else None


def parse_log_level(text: str | None) -> tuple[int, list[str]]:
    """Read ``LOGLEVEL`` as torch does, a name or a number; the level, and a warning if it is none."""
    word = (text or "").strip()
    if not word:
        return logging.WARNING, []
    known = logging.getLevelNamesMapping()
    if word.isdecimal():
        return int(word), []
    if word.upper() not in known:
        return logging.WARNING, [f"LOGLEVEL={text!r} is ignored: it is none of {', '.join(known)}"]
    return known[word.upper()], []


def count_cpus(cgroup: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores this process may use: affinity, and the quota of its cgroup and of all above it, version 1 or 2."""
    return min(len(os.sched_getaffinity(0)), *cgroup_quotas(cgroup, own), sys.maxsize)


def cgroup_quotas(cgroup: Path, own: Path) -> Iterator[int]:
    """Every CPU quota that binds this process, in cores, rounded up."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = cgroup / controllers if (cgroup / controllers).is_dir() else cgroup / "cpu"
        folder = top.joinpath(path.lstrip("/"))
        # in a container the path may be the host's, which is not there: then the top is our own
        for level in (folder, *folder.parents):
            if (quota := _quota_of(level)) is not None:
                yield quota
            if level == top:
                break


def _quota_of(folder: Path) -> int | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return max(1, math.ceil(int(quota) / int(period))) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def count_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs of this node that ``CUDA_VISIBLE_DEVICES`` lets through, without loading a driver library."""
    present = sum(1 for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdecimal())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [part for part in visible.split(",") if part.strip() and part.strip() != "-1"]
    return min(present, len(chosen))


def omp_threads(environ: Mapping[str, str], num_workers: int, num_cpus: int) -> int | None:
    """Threads for each worker when ``OMP_NUM_THREADS`` is not set: the node's cores, shared out."""
    if environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, num_cpus // num_workers)
