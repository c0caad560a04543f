"""The template: a process that has imported everything, and that workers are forked from.

Started by the agent with one end of a socket pair as ``--fd``. It is single-threaded and never touches CUDA,
so that forking it is safe and takes milliseconds. Over the socket go JSON lines:

1. template -> agent ``{"ready": true, "import_s": 3.1}`` once everything is imported.
2. agent -> template ``{"id": 7, "op": "worker", ...}`` (fields of :class:`WorkerTask`) or
   ``{"id": 8, "op": "store", "host": "127.0.0.1", "port": 0, "used": "/path"}`` or ``{"id": 9, "op": "logs",
   ...}``, which asks a plug-in of torchrun where logs go.
3. template -> agent ``{"id": 7, "pid": 4711}``, for a store with its ``port`` too, or ``{"id": 8, "error":
   "..."}``.
4. agent -> template ``{"op": "ended", "pid": 4711}``: that worker was reaped; its pid may be another's from now on.
5. agent -> template ``{"op": "end"}``: the template is not needed any more.

A child is forked twice, so that it becomes a child of the agent (a subreaper), which reaps it itself:
workers live on when the template crashes, and die with their agent. When the agent is gone, the template
first kills whatever still carries this job's id in its environment or is in the session of one of its workers
(data-loading processes, for example), then ends.

Nothing here imports the launcher: a user's own ``launcher.py`` beside the script must keep working.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import importlib.util
import io
import json
import os
import random
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from liverun.again import run_until_done
from liverun.main_module import reset_signals
from liverun.messages import Again
from liverun.reinit import give_each_init_its_own_keys

PRELOAD_ALWAYS = ("torch", "megatron.core", "resharding", "liverun.job")
"""imported when installed, before what the user asks for"""
PR_SET_PDEATHSIG = 1
ADOPTION_TIMEOUT_S = 20.0
ROOT = Path(__file__).resolve().parent.parent
FRESH_CODE = (
    "import sys; sys.path[: bool(sys.path) and sys.path[0] == ''] = [{root!r}]; "
    "from liverun.main_module import run_as_main; del sys.path[0]; run_as_main({mode!r}, sys.argv[1:])"
)


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """What one forked worker is to do."""

    mode: str
    """``program`` (an executable), or one of :func:`liverun.main_module.run_as_main`"""
    argv: Sequence[str]
    """the script, module or program, then its arguments"""
    env: Mapping[str, str]
    """the whole environment"""
    cwd: str
    stdout: str
    """path of the file that standard output is appended to"""
    stderr: str
    fresh: bool = False
    """start a new interpreter instead of going on in this one"""
    numa: Mapping[str, Any] | None = None
    """``mode`` and ``gpu_index`` for torch's binding to the CPUs near a GPU"""

    def run(self, agent_pid: int) -> None:
        """Become the worker. Returns, or raises ``SystemExit``, when the script has ended."""
        os.setsid()
        self._take_place()
        adopt(agent_pid)
        if self.numa is not None:
            bind_to_cpus_near_gpu(self.numa)
        if self.mode == "program" or self.fresh:
            command = list(self.argv) if self.mode == "program" else self._command()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # what is ignored stays so in another program
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            try:
                os.execvpe(command[0], command, dict(self.env))  # noqa: S606
            except OSError as error:
                sys.stderr.write(f"liverun: cannot start {command[0]}: {error.strerror}\n")
                sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
        draw_other_random_numbers()
        give_each_init_its_own_keys()
        run_until_done(self.mode, list(self.argv), self._again)

    def _again(self, task: Again) -> None:
        """Be another worker, in the same process."""
        dataclasses.replace(
            self, argv=task.argv, env=task.env, cwd=task.cwd, stdout=task.stdout, stderr=task.stderr
        )._take_place()
        random.seed()  # a fork does so by itself
        draw_other_random_numbers()

    def _take_place(self) -> None:
        """Take over what one worker has and another has not: environment, files, folder, signals."""
        os.environ.clear()
        os.environ.update(self.env)
        self._redirect()
        os.chdir(self.cwd)
        reset_signals()

    def _command(self) -> list[str]:
        """Return what runs this task in an interpreter of its own."""
        python = [os.environ.get("PYTHON_EXEC") or sys.executable, "-u"]
        if self.mode == "script":
            return [*python, *self.argv]
        if self.mode == "module":
            return [*python, "-m", *self.argv]
        return [*python, "-c", FRESH_CODE.format(mode=self.mode, root=str(ROOT)), *self.argv]

    def _redirect(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        for fd, path, how in ((0, os.devnull, os.O_RDONLY), (1, self.stdout, flags), (2, self.stderr, flags)):
            opened = os.open(path, how, 0o600)
            os.dup2(opened, fd)
            os.close(opened)
        # as python -u has it: a file is block-buffered by default, a user would see a step's line minutes late
        for name, fd in (("stdout", 1), ("stderr", 2)):
            old = getattr(sys, name)
            raw = io.FileIO(fd, "w", closefd=False)
            new = io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, write_through=True)
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


# --- the child's side ---------------------------------------------------------------------------------------


def adopt(agent_pid: int) -> None:
    """Wait until the agent is the parent, then ask to be killed with it. Ends if the agent is gone."""
    first_parent = os.getppid()
    deadline = time.monotonic() + ADOPTION_TIMEOUT_S
    while os.getppid() != agent_pid:
        if os.getppid() not in (first_parent, agent_pid) or time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    die_with_parent()
    if os.getppid() != agent_pid:
        os._exit(1)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends (prctl(2), Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def draw_other_random_numbers() -> None:
    """Seed what would otherwise be the same in every fork, as it is different in every fresh interpreter."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:  # python's own does so itself in a fork
        numpy_random.seed()


def bind_to_cpus_near_gpu(numa: Mapping[str, Any]) -> None:
    """Bind this process as torch's ``--numa-binding`` does; ends it, with the reason, where that fails."""
    binding = importlib.import_module("torch.numa.binding")
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(numa["mode"]))
    try:
        binding._maybe_apply_numa_binding_to_current_process(
            gpu_index=numa["gpu_index"], numa_options=options
        )
    except Exception as error:  # noqa: BLE001  (whatever torch or the driver raise, the worker cannot start)
        sys.stderr.write(f"liverun: --numa-binding {numa['mode']}: {type(error).__name__}: {error}\n")
        sys.exit(1)


def serve_store(listener: socket.socket, agent_pid: int, used: str | None) -> None:
    """Be the c10d store of a world. It starts with its first client: a script without one pays nothing.

    ``used`` is a file that is made when that client comes: from then on the script is under way.
    """
    os.setsid()
    adopt(agent_pid)
    reset_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    select.select([listener], [], [])
    if used is not None:
        with contextlib.suppress(OSError):
            Path(used).touch()
    torch_distributed = importlib.import_module("torch.distributed")
    host, port = listener.getsockname()[:2]
    store = torch_distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, use_libuv=True, master_listen_fd=listener.detach()
    )
    while store is not None:
        signal.pause()


# --- the template's side ------------------------------------------------------------------------------------


class Template:
    """Serves requests. Returns to the caller in a forked worker, which runs with a clean stack."""

    def __init__(self, connection: socket.socket, agent_pid: int) -> None:
        self._connection = connection
        self._agent_pid = agent_pid
        self._logs_specs: Any = None
        self.workers: set[int] = set()
        """pids of workers that were forked here and have not been reaped"""

    def serve(self) -> WorkerTask | None:
        """Answer requests. Returns the task in a child that is to be a worker, ``None`` at the end.

        Raises ``EOFError`` when the agent is gone without a word.
        """
        for line in self._lines():
            request = json.loads(line)
            if request["op"] == "end":
                return None
            if request["op"] == "ended":
                self.workers.discard(request["pid"])
                continue
            if request["op"] == "worker":
                names = {field.name for field in fields(WorkerTask)}
                task = WorkerTask(**{name: value for name, value in request.items() if name in names})
                pid = self._fork()
                if pid is None:
                    self._connection.close()
                    return task
                self.workers.add(pid)
                self._say({"id": request["id"], "pid": pid})
            elif request["op"] == "logs":
                self._logs(request)
            else:
                self._store(request)
        raise EOFError

    def _store(self, request: dict[str, Any]) -> None:
        try:
            family = socket.getaddrinfo(request["host"], None, type=socket.SOCK_STREAM)[0][0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((request["host"], request["port"]))
            listener.listen(1024)
        except OSError as error:
            where = f"{request['host']}:{request['port']}"
            self._say({"id": request["id"], "error": f"cannot listen at {where}: {error.strerror or error}"})
            return
        pid = self._fork()
        if pid is None:
            self._connection.close()
            try:
                serve_store(listener, self._agent_pid, request.get("used"))
            finally:
                os._exit(1)
        self._say({"id": request["id"], "pid": pid, "port": listener.getsockname()[1]})
        listener.close()

    def _logs(self, request: dict[str, Any]) -> None:
        """Ask a ``torchrun.logs_specs`` plug-in where the logs of an attempt go."""
        try:
            if self._logs_specs is None:
                run = importlib.import_module("torch.distributed.run")
                std = importlib.import_module("torch.distributed.elastic.multiprocessing").Std
                pick = {
                    name: {int(rank): std(value) for rank, value in request[name].items()}
                    for name in ("redirects", "tee")
                }
                ranks = request["local_ranks"]
                self._logs_specs = run._get_logs_specs_class(request["name"])(
                    log_dir=request["log_dir"], local_ranks_filter=None if ranks is None else set(ranks), **pick
                )
            envs = {int(rank): environ for rank, environ in request["envs"].items()}
            dest = dataclasses.asdict(self._logs_specs.reify(envs))
        except Exception as error:  # noqa: BLE001  (a plug-in's own failure is told, whatever it is)
            self._say({"id": request["id"], "error": f"--logs-specs {request['name']}: {error}"})
            return
        self._say({"id": request["id"], "dest": dest})

    def _fork(self) -> int | None:
        """Fork twice; the pid of the grandchild, or ``None`` in it."""
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # a BLAS may hold idle threads; it re-makes them
            middle = os.fork()
            if middle == 0:
                pid = os.fork()
                if pid == 0:
                    os.close(reading)
                    os.close(writing)
                    return None
                os.write(writing, str(pid).encode())
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            text = pipe.read()
        os.waitpid(middle, 0)
        return int(text)

    def _lines(self) -> Iterator[bytes]:
        with self._connection.makefile("rb") as stream:
            yield from stream

    def _say(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")


def kill_left_behind(job: str, workers: Collection[int]) -> None:
    """Kill every process, but for this one, that has this job's id in its environment or is in a worker's session."""
    mark = f"LIVERUN_JOB={job}".encode()
    for _ in range(20):
        found = False
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                pid = int(entry.name)
                if os.getsid(pid) in workers or mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
                    found |= (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
        if not found:
            return
        time.sleep(0.02)


def preload(names: str) -> float:
    """Import what workers need; the seconds it took. With ``none`` among the names, only the other names."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    started = time.monotonic()
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    # What imports leave is soon garbage or never: looking through all there is, over and over, takes a seventh of the
    # time. The young are still looked at, else what stays is spread over more pages, and forks copy those.
    usual = gc.get_threshold()
    gc.set_threshold(usual[0], usual[1], 10**6)
    if "none" not in wanted:
        for name in PRELOAD_ALWAYS:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                importlib.import_module(name)
    for name in wanted:
        if name != "none":
            importlib.import_module(name)
    gc.set_threshold(*usual)
    gc.collect()
    gc.freeze()
    return time.monotonic() - started


def main() -> None:
    """Entry of the template process; in a forked worker it goes on as the worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--agent", type=int, required=True)
    parser.add_argument("--job", required=True)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # the agent decides; it closes the socket
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=options.fd)
    connection.set_inheritable(False)
    import_s = preload(os.environ.get("LIVERUN_PRELOAD", ""))
    template = Template(connection, options.agent)
    try:
        connection.sendall(json.dumps({"ready": True, "import_s": round(import_s, 3)}).encode() + b"\n")
        task = template.serve()
    except (EOFError, ConnectionError):
        kill_left_behind(options.job, template.workers)
        return
    if task is not None:
        task.run(options.agent)


if __name__ == "__main__":
    main()
