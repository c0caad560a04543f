"""Processes of a node: the template, what it forks, and how all of it ends.

The agent is a subreaper, so every descendant whose parent has ended becomes its child: whatever a worker
leaves behind can be found, killed and reaped here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
MAX_TEMPLATE_CRASHES = 3
TEMPLATE_CODE = (
    "import sys\n"
    "if sys.path and sys.path[0] == '': del sys.path[0]\n"  # the user's folder must not stand before ours
    "from liverun.template import main\n"
    "main()\n"
)


class TemplateError(Exception):
    """The template cannot be started, or refuses; one sentence."""


class Reaper:
    """Reaps every child of this process and tells who asked about it."""

    def __init__(self) -> None:
        self._waiting: dict[int, Callable[[int], None]] = {}
        self._unclaimed: dict[int, int] = {}

    def start(self) -> None:
        """Become a subreaper; from here on children are reaped when SIGCHLD says so."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)

    def expect(self, pid: int, ended: Callable[[int], None]) -> None:
        """Call ``ended`` with a child's exit code (negative: its signal), even if it has ended already."""
        code = self._unclaimed.pop(pid, None)
        if code is None:
            self._waiting[pid] = ended
        else:
            ended(code)

    def reap(self) -> None:
        """Reap whatever has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            ended = self._waiting.pop(pid, None)
            if ended is not None:
                ended(code)
            else:
                self._unclaimed[pid] = code
                if len(self._unclaimed) > 1000:
                    self._unclaimed.pop(next(iter(self._unclaimed)))


class TemplateClient:
    """Keeps one template running and asks it for workers and stores. A crashed template is replaced."""

    def __init__(self, reaper: Reaper, *, job: str, environ: Mapping[str, str], log: Path) -> None:
        self._reaper = reaper
        self._job = job
        self._environ = dict(environ)
        self._log = log
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._crashes = 0
        self._closed = False
        self._warming: asyncio.Task[None] | None = None
        self.pid: int | None = None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return its answer. Raises ``TemplateError``."""
        async with self._lock:
            while True:
                try:
                    answer = await self._exchange(request)
                except (EOFError, ConnectionError, asyncio.IncompleteReadError):
                    self._drop()
                    self._crashes += 1
                    if self._crashes >= MAX_TEMPLATE_CRASHES:
                        tail = last_lines(self._log, 20)
                        raise TemplateError(
                            f"the template process ended {self._crashes} times; last of {self._log}:\n{tail}"
                        ) from None
                    continue
                self._crashes = 0
                if "error" in answer:
                    raise TemplateError(str(answer["error"]))
                return answer

    async def _warm(self) -> None:
        """Replace a crashed template before anyone asks: it also guards against our own death."""
        async with self._lock:
            if self.pid is None and not self._closed:
                self._drop()
                with contextlib.suppress(EOFError, ConnectionError, TemplateError):
                    await self._start()

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._streams is None:
            await self._start()
        assert self._streams is not None
        reader, writer = self._streams
        number = next(self._ids)
        writer.write(json.dumps({"id": number, **request}).encode() + b"\n")
        await writer.drain()
        while True:
            answer = await self._read(reader)
            if answer.get("id") == number:
                return answer

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        python = self._environ.get("PYTHON_EXEC") or sys.executable
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        arguments = ["--fd", str(theirs.fileno()), "--agent", str(os.getpid()), "--job", self._job]
        try:
            process = subprocess.Popen(  # noqa: ASYNC220  (forks and returns; our own reaper waits for it)
                [python, "-c", TEMPLATE_CODE, *arguments],
                env=self._environ, pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise TemplateError(f"cannot start {python}: {error.strerror}") from None
        finally:
            theirs.close()
            os.close(log)
        self.pid = process.pid
        started = False

        def ended(code: int) -> None:  # ``started`` is read when the end comes
            process.returncode = code  # ours was the waitpid; Popen must not look for it
            if self.pid == process.pid:
                self.pid = None
                if started and not self._closed:
                    self._warming = asyncio.create_task(self._warm())

        self._reaper.expect(process.pid, ended)
        ours.setblocking(False)
        self._streams = await asyncio.open_connection(sock=ours)
        try:
            await self._read(self._streams[0])
        except (EOFError, ConnectionError):
            self._drop()
            raise TemplateError(
                f"the template process ended before it was ready; last of {self._log}:\n"
                f"{last_lines(self._log, 20)}"
            ) from None
        started = True

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _drop(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    def forget(self, pid: int) -> None:
        """Tell the template that a worker was reaped."""
        if self._streams is not None and not self._streams[1].is_closing():
            self._streams[1].write(json.dumps({"op": "ended", "pid": pid}).encode() + b"\n")

    def close(self) -> None:
        """Tell the template to end."""
        self._closed = True
        if self._streams is not None and not self._streams[1].is_closing():
            self._streams[1].write(b'{"op": "end"}\n')
        self._drop()


def last_lines(path: Path, count: int) -> str:
    """Return the last lines of a log, whatever bytes are in it; at most 16 KiB are read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 16 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])


def session_members(leader: int) -> list[int]:
    """Descendants of this process that are in a worker's session, or descend from it; the worker first."""
    import psutil  # type: ignore[import-untyped]

    found = [leader]
    with contextlib.suppress(psutil.Error):
        found += [child.pid for child in psutil.Process(leader).children(recursive=True)]
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            if child.pid not in found and os.getsid(child.pid) == leader:
                found.append(child.pid)
    return found


def kill_session(leader: int, *, spare_leader: bool = False) -> None:
    """SIGKILL a worker and whatever it started."""
    for pid in session_members(leader)[1 if spare_leader else 0 :]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def sweep(timeout_s: float = 10.0) -> list[int]:
    """Kill and reap every descendant of this process; the ones that could not be killed in time."""
    import psutil

    deadline = time.monotonic() + timeout_s
    left: list[int] = []
    while time.monotonic() < deadline:
        left = [child.pid for child in psutil.Process().children(recursive=True)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        time.sleep(0.005)
    return left


def describe_os_error(error: OSError) -> str:
    """Return ``/there: No space left on device``."""
    words = error.strerror or str(error)
    return f"{os.fsdecode(error.filename)}: {words}" if error.filename else words


def describe_exit(code: int) -> str:
    """Return ``exit code 7``, or ``killed by SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
