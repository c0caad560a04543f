"""The store's port as strangers see it.

Bounds on who has not proved to hold the token: ``MAX_UNPROVEN`` connections at once (the one that has waited longest
goes first), ``HANDSHAKE_S`` to prove oneself, one frame and a few KiB of headers held for each, and no line of the
log that they can fill.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

HANDSHAKE_S = 5.0
MAX_UNPROVEN = 1024
HEADER_BYTES = 1024
READ_BYTES = 2**14

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Strangers:
    """The connections that have not proved themselves yet, oldest first."""

    def __init__(self) -> None:
        self.refused = 0
        """connections that never did"""
        self._waiting: OrderedDict[Visit, None] = OrderedDict()

    def arrived(self, visit: Visit) -> None:
        """Count one in; drop the oldest when there are too many."""
        self._waiting[visit] = None
        if len(self._waiting) > MAX_UNPROVEN:
            oldest, _ = self._waiting.popitem(last=False)
            oldest.drop()

    def left(self, visit: Visit) -> None:
        """Forget one: it has proved itself, or is gone."""
        self._waiting.pop(visit, None)


class Visit(RequestHandler):
    """One connection; has to prove itself in time, whatever it sends or does not send meanwhile."""

    __slots__ = ("_deadline", "_strangers")

    def __init__(self, manager: Door, strangers: Strangers, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._strangers = strangers
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._strangers.arrived(self)
        self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_S, self.drop)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the clock."""
        self.prove()
        super().connection_lost(exc)

    def prove(self) -> None:
        """Be a stranger no longer."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._strangers.left(self)

    def drop(self) -> None:
        """Cut the connection."""
        self._strangers.refused += 1
        if self.transport is not None:
            self.transport.abort()


class Door(web.Server):
    """Makes a :class:`Visit` of every connection."""

    def __init__(self, handler: Handler, strangers: Strangers) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._strangers = strangers

    def __call__(self) -> Visit:
        """Return the protocol of a new connection."""
        return Visit(
            self, self._strangers, loop=self._loop, access_log=None, logger=_http_log, keepalive_timeout=HANDSHAKE_S,
            max_line_size=HEADER_BYTES, max_field_size=HEADER_BYTES, lingering_time=0.0, read_bufsize=READ_BYTES,
        )  # fmt: skip


def bind_one(host: str, port: int) -> socket.socket:
    """Bind one address. Raises ``ValueError`` for one that means all of them, and ``OSError``."""
    family, kind, number, _, address = socket.getaddrinfo(host or "::", port, type=socket.SOCK_STREAM)[0]
    found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    if found.is_unspecified or (mapped is not None and mapped.is_unspecified):
        raise ValueError(f"{host!r} is every address of this machine; give the one that the nodes reach")
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Strangers' broken requests are not worth a line each; a fault of ours is."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return error is not None and not isinstance(error, HttpProcessingError | ConnectionError)


_http_log = logging.getLogger("liverun.store.http")
_http_log.addFilter(_is_our_fault)
