"""The node's unix socket: workers and the command line on one side, the controller behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from pathlib import Path
from typing import Protocol

from launcher.control import Control
from liverun.messages import MAX_LINE_BYTES, PROTOCOL_VERSION, Hello, Message


class Behind(Protocol):
    """Who is told what comes in."""

    async def expects(self, worker: str) -> bool:
        """Whether a process of that id was started; waits until its start is known."""
        ...

    def said(self, worker: str, message: Message) -> None:
        """Hear a worker's message."""
        ...

    async def asked(self, request: Control, writer: asyncio.StreamWriter) -> None:
        """Answer the command line; returns when the connection may close."""
        ...

    def trouble(self, sentence: str) -> None:
        """Something is wrong with a peer."""
        ...


class Link:
    """Serves the socket. Only processes of our own uid (or root) are heard."""

    def __init__(self, path: Path, behind: Behind, *, uid: int) -> None:
        self._path = path
        self._behind = behind
        self._uid = uid
        self._workers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, mode 0600."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        self._path.chmod(0o600)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_LINE_BYTES)

    def send(self, worker: str, message: Message) -> None:
        """Send to a worker; one that has closed its end is about to be seen to exit."""
        writer = self._workers.get(worker)
        if writer is not None and not writer.is_closing():
            writer.write(message.encode())

    async def close(self) -> None:
        """Close every connection and stop listening."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            peer = writer.get_extra_info("socket")
            pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (self._uid, 0):
                self._behind.trouble(f"refused a connection of uid {uid} (pid {pid})")
                return
            line = await reader.readline()
            if line:
                await self._first(line, pid, reader, writer)
        except ValueError as error:  # also what readline raises past the limit
            self._behind.trouble(f"closed a connection: {error}")
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _first(
        self, line: bytes, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            values = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"pid {pid} sent no JSON: {error}") from None
        if isinstance(values, dict) and str(values.get("type")) in Control.family:
            await self._behind.asked(Control.decode(line), writer)
            return
        hello = Message.decode(line)
        if not isinstance(hello, Hello):
            raise ValueError(f"pid {pid} sent {type(hello).__name__} before Hello")  # noqa: TRY004  (input)
        if hello.protocol != PROTOCOL_VERSION:
            raise ValueError(f"pid {pid} speaks protocol {hello.protocol}, this agent {PROTOCOL_VERSION}")
        if not await self._behind.expects(hello.worker):
            raise ValueError(
                f"pid {pid} says it is worker {hello.worker}, which was never started or has ended"
            )
        if hello.worker in self._workers:
            raise ValueError(f"pid {pid} says it is worker {hello.worker}, which is connected already")
        self._workers[hello.worker] = writer
        try:
            self._behind.said(hello.worker, hello)
            while line := await reader.readline():
                self._behind.said(hello.worker, Message.decode(line))
        finally:
            del self._workers[hello.worker]


def connect(path: str, timeout_s: float = 10.0) -> socket.socket:
    """Connect to an agent, as the command line does. Raises ``OSError``."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(os.fspath(path))
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    return connection
