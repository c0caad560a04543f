"""The worker's end of the socket to its agent: one thread that reads, and a lock around writing."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from liverun.messages import MAX_LINE_BYTES, Message

_TICK_S = 1.0


class Link:
    """Typed messages to and from the agent.

    ``on_message`` and ``on_tick`` (about once a second) run in the link's own thread and must not block; ``on_lost``
    runs there once when the agent is gone.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_message: Callable[[Message], None],
        on_tick: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(os.fspath(path))
        except OSError as error:
            self._socket.close()
            raise ConnectionError(f"no liverun agent answers at {path} ({error.strerror})") from None
        self._on_message = on_message
        self._on_tick = on_tick
        self._on_lost = on_lost
        self._writing = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._read, name="liverun-link", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send one message; an agent that is gone is noticed by the reading side."""
        try:
            with self._writing:
                self._socket.sendall(message.encode())
        except OSError:
            return

    def close(self) -> None:
        """Stop reading and hang up; ``on_lost`` is not called for it. Not from the link's own thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        pending = bytearray()
        while True:
            ready, _, _ = select.select([self._socket], [], [], _TICK_S)
            if not ready:
                self._on_tick()
                continue
            try:
                received = self._socket.recv(65536)
            except OSError:
                received = b""
            if not received:
                if not self._closing:
                    self._on_lost()
                return
            pending += received
            while (end := pending.find(b"\n")) >= 0:
                line = bytes(pending[: end + 1])
                del pending[: end + 1]
                self._on_message(Message.decode(line))
            if len(pending) > MAX_LINE_BYTES:
                self._on_lost()
                return
