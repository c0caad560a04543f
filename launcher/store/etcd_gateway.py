"""Requests to etcd's JSON gateway: places, login, time-outs, and what its errors mean."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from launcher.store.errors import ForbiddenError, StoreError, UnavailableError
from launcher.store.link import Place

REPLY_LIMIT_BYTES = 512 * 1024 * 1024
"""the fullest store, as base64"""
WATCH_LINE_LIMIT_BYTES = 64 * 1024 * 1024
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 2.0
CONNECT_S = 5.0
NOT_FOUND, RESOURCE_EXHAUSTED, UNAVAILABLE, UNAUTHENTICATED, PERMISSION = 5, 8, 14, 16, 7


@dataclass(frozen=True, kw_only=True)
class Login:
    """An etcd user."""

    user: str
    password: str = field(repr=False)


class GatewayError(Exception):
    """etcd answered with an error."""

    def __init__(self, code: int, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.code = code
        self.status = status

    @property
    def not_found(self) -> bool:
        """A lease that is not there."""
        return self.code == NOT_FOUND and "lease" in str(self)

    @property
    def full(self) -> bool:
        """No space left in its database."""
        return self.code == RESOURCE_EXHAUSTED and "space" in str(self)

    @property
    def token_over(self) -> bool:
        """The login has to be made again."""
        return self.code == UNAUTHENTICATED or "invalid auth token" in str(self)

    @property
    def passing(self) -> bool:
        """Nothing was done, and trying again may help: no leader yet, an election, another member."""
        return self.code == UNAVAILABLE and "etcdserver:" in str(self) and "timed out" not in str(self)

    def plain(self) -> StoreError:
        """Return the same as a store's error."""
        refused = self.code in (PERMISSION, UNAUTHENTICATED) or "user name is empty" in str(self)
        if refused or "authentication failed" in str(self):
            return ForbiddenError(f"{self}; check the user and password of etcd")
        return StoreError(f"etcd: {self}")


class Gateway:
    """One etcd cluster, through whichever of its members answers."""

    def __init__(
        self, places: Sequence[Place], *, login: Login | None, ssl_context: ssl.SSLContext | None, timeout_s: float,
        sleep: Callable[[float], Awaitable[object]],
    ) -> None:  # fmt: skip
        if not places:
            raise ValueError("no member of the etcd cluster is known; pass HOST:PORT (--rdzv-endpoint)")
        self._places = list(places)
        self._login = login
        self._ssl = ssl_context
        self._timeout_s = timeout_s
        self._sleep = sleep
        self._token: str | None = None
        self._http: aiohttp.ClientSession | None = None

    def next_place(self) -> None:
        """Turn to another member."""
        self._places.append(self._places.pop(0))

    async def ask(self, what: str, body: Mapping[str, Any], *, write: bool = False) -> dict[str, Any]:
        """Make one request. Raises ``GatewayError``, ``ForbiddenError`` or ``UnavailableError``.

        A read is tried again until the time is over. A write only where it cannot have been done.
        """
        last: Exception | None = None
        tries = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await self._once(what, body)
                    except aiohttp.ClientConnectorError as error:
                        last = error  # never sent
                    except (aiohttp.ClientError, OSError) as error:
                        last = error
                        if write:
                            break
                    except GatewayError as error:
                        last = error
                        if error.token_over and self._login is not None and self._token is not None:
                            self._token = None
                            continue
                        if not error.passing:
                            raise
                    self.next_place()
                    await self._sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(tries, 6)))
                    tries += 1
        except TimeoutError:
            pass
        where = " or ".join(map(str, self._places))
        why = f" ({last})" if last is not None else ""
        raise UnavailableError(f"etcd at {where} did not answer within {self._timeout_s:g} s{why}") from last

    async def stream(self, what: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Make one request whose answer goes on. Raises what a broken connection raises, or ``GatewayError``."""
        http, headers = await self._ready()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with http.post(self._url(what), data=json.dumps(body), headers=headers, timeout=timeout) as reply:
            if reply.status != 200:
                raise _error(await _whole(reply), reply.status).plain()
            async for line in _lines(reply.content):
                message = json.loads(line)
                if "error" in message:
                    raise _error(line, reply.status).plain()
                yield message.get("result", message)

    async def close(self) -> None:
        """Close every connection."""
        if self._http is not None:
            await self._http.close()

    async def _once(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        http, headers = await self._ready()
        async with http.post(self._url(what), data=json.dumps(body), headers=headers) as reply:
            data = await _whole(reply)
            if reply.status != 200:
                raise _error(data, reply.status)
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(data)
                if isinstance(answer, dict):
                    return answer
            raise GatewayError(0, f"no answer of etcd's gateway: {data[:200].decode(errors='replace')}", reply.status)

    async def _ready(self) -> tuple[aiohttp.ClientSession, dict[str, str]]:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                trust_env=False, cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl or True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )  # fmt: skip
        if self._login is None:
            return self._http, {}
        if self._token is None:
            name = {"name": self._login.user, "password": self._login.password}
            async with self._http.post(self._url("auth/authenticate"), data=json.dumps(name)) as reply:
                data = await _whole(reply)
                if reply.status != 200:
                    raise _error(data, reply.status).plain()
                self._token = str(json.loads(data)["token"])
        return self._http, {"Authorization": self._token}

    def _url(self, what: str) -> str:
        return f"{'http' if self._ssl is None else 'https'}://{self._places[0]}/v3/{what}"


async def _whole(reply: aiohttp.ClientResponse) -> bytes:
    """Read an answer up to the limit, whatever length it claims or leaves unsaid. Raises ``StoreError``."""
    if (reply.content_length or 0) > REPLY_LIMIT_BYTES:
        raise StoreError(f"etcd would answer with {reply.content_length} bytes; at most {REPLY_LIMIT_BYTES} are read")
    held = bytearray()
    async for piece in reply.content.iter_any():
        held += piece
        if len(held) > REPLY_LIMIT_BYTES:
            raise StoreError(f"etcd answers with more than {REPLY_LIMIT_BYTES} bytes, the most that are read")
    return bytes(held)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Give whole lines of any length up to the limit; aiohttp's own reader stops at 64 KiB."""
    held = bytearray()
    async for piece in content.iter_any():
        held += piece
        if len(held) > WATCH_LINE_LIMIT_BYTES:
            raise StoreError(f"etcd sent a line of more than {WATCH_LINE_LIMIT_BYTES} bytes")
        while (end := held.find(b"\n")) >= 0:
            line = bytes(held[:end])
            del held[: end + 1]
            if line.strip():
                yield line


def _error(data: bytes, status: int) -> GatewayError:
    try:
        values = json.loads(data)
        inner = values["error"] if isinstance(values.get("error"), dict) else values
        code = int(inner.get("code", inner.get("grpc_code", 0)))
        return GatewayError(code, str(inner.get("message") or inner.get("error") or inner), status)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return GatewayError(0, f"HTTP {status}: {data[:200].decode(errors='replace')}", status)


def to_base64(text: str) -> str:
    """Return text as etcd's gateway takes it."""
    return base64.b64encode(text.encode()).decode()


def text_of(data: str) -> str:
    """Return text that etcd's gateway gave."""
    return base64.b64decode(data).decode()


def after_prefix(prefix: str) -> str:
    """Return the end of the range of keys that begin with ``prefix``: its bytes plus one, base64."""
    data = bytearray(prefix.encode())
    while data and data[-1] == 0xFF:
        data.pop()
    data[-1] += 1
    return base64.b64encode(bytes(data)).decode()
