"""A store reached over the network: connects when first asked, and again, with back-off, whenever it is cut off.

A request outlives the connection it was made on: it is sent again on the next one. Writes carry a number of their
own, so that one whose answer was lost is not done twice. A watch goes on after the last revision it was given whole.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

import aiohttp

from launcher.store import limits
from launcher.store.auth import Token
from launcher.store.contract import Change, Entry, Listing
from launcher.store.errors import StoreError, UnavailableError
from launcher.store.link import Connection, Identity, Moved, Place, backoff_s, connect
from launcher.store.snapshot import Snapshot
from launcher.store.waiting import Call, Watch

REQUEST_ID_BYTES = 16


class RemoteStore:
    """A :class:`launcher.store.contract.Store` at one of ``places``."""

    def __init__(
        self, places: Sequence[Place], token: Token, *, job: str, node: str, role: str,
        random: Callable[[int], bytes], generation: int | None = None, timeout_s: float = 30.0,
        ssl_context: ssl.SSLContext | None = None, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if not places:
            raise ValueError("no place of the store is known; pass HOST:PORT (--rdzv-endpoint)")
        self.timeout_s = timeout_s
        self.connected = asyncio.Event()
        self.last_error: Exception | None = None
        self._places = list(places)
        self._identity = Identity(token=token, job=job, node=node, role=role, random=random)
        self._generation = generation
        self._ssl = ssl_context
        self._sleep = sleep
        self._clock = clock
        self._last_beat = clock()
        self._term = 0
        self._calls: dict[int, Call] = {}
        self._watches: dict[int, Watch] = {}
        self._count = 0
        self._link: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def term(self) -> int:
        """The latest term of the store this client has seen; servers of earlier ones are not listened to."""
        return self._term

    @property
    def silent_s(self) -> float:
        """For how long this client has not told the store that it is there."""
        return self._clock() - self._last_beat

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the store is looked for, first choice first."""
        return tuple(self._places)

    @property
    def generation(self) -> int | None:
        """The generation this client acts for."""
        return self._generation

    @generation.setter
    def generation(self, generation: int | None) -> None:
        self._generation = generation
        self._post(Call({"op": "generation", "generation": generation}), keep=False)

    def relocate(self, place: Place, *, term: int) -> None:
        """Go to another place, and never again to a store of an earlier term."""
        self._term = max(self._term, term)
        self._places = [place, *(other for other in self._places if other != place)]
        if self._link is not None:
            self._link.drop()

    # --- the contract -------------------------------------------------------------------------------------

    async def get(self, key: str) -> Entry | None:
        """One key, or ``None``."""
        limits.check_key(key)
        found = await self._ask({"op": "get", "key": key})
        return None if found is None else Entry(key=found[0], value=found[1], revision=found[2])

    async def list(self, prefix: str) -> list[Entry]:
        """Every key that starts with ``prefix``, sorted."""
        return list((await self.scan(prefix)).entries)

    async def scan(self, prefix: str) -> Listing:
        """Return the same with the revision to watch from."""
        limits.check_prefix(prefix)
        found = await self._ask({"op": "scan", "prefix": prefix})
        entries = tuple(Entry(key=key, value=value, revision=number) for key, value, number in found["entries"])
        return Listing(revision=found["revision"], entries=entries)

    async def put(self, key: str, value: str, *, lease: int | None = None) -> int:
        """Write one key whatever it was; the new revision."""
        revision = await self.compare_and_set({}, {key: value}, lease=lease)
        assert revision is not None
        return revision

    async def compare_and_set(
        self, expected: Mapping[str, int], writes: Mapping[str, str | None], *, lease: int | None = None
    ) -> int | None:
        """Write all of ``writes`` if every key of ``expected`` still has that revision (0: absent)."""
        limits.check_write(expected, writes)
        done: int | None = await self._ask(
            {
                "op": "write", "expected": dict(expected), "writes": dict(writes), "lease": lease,
                "request": self._request_id(),
            }
        )  # fmt: skip
        return done

    async def grant(self, ttl_s: float) -> int:
        """Open a lease."""
        limits.check_ttl(ttl_s)
        return int(await self._ask({"op": "grant", "ttl_s": ttl_s, "request": self._request_id()}))

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; false if it has ended already."""
        return bool(await self._ask({"op": "keep", "lease": lease}))

    async def revoke(self, lease: int) -> None:
        """End a lease and remove its keys now."""
        await self._ask({"op": "revoke", "lease": lease})

    async def fence(self, generation: int) -> None:
        """Refuse writers of earlier generations."""
        limits.check_revision(generation)
        await self._ask({"op": "fence", "generation": generation})

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Change]:
        """Every change after ``from_revision`` under ``prefix``, in order, then the ones to come."""
        limits.check_prefix(prefix)
        limits.check_revision(from_revision)
        self._count += 1
        number, watch = self._count, Watch(prefix, from_revision)
        self._watches[number] = watch
        try:
            self._start()
            if self._link is not None:
                await self._begin_watch(self._link, number, watch)
            while (found := await watch.ready.get()) is not None:
                if isinstance(found, StoreError):
                    raise found
                for change in found:
                    yield change
        finally:
            self._watches.pop(number, None)
            self._post(Call({"op": "unwatch", "watch": number}), keep=False)

    async def snapshot(self) -> Snapshot:
        """Copy the whole store."""
        return Snapshot.loads(str(await self._ask({"op": "snapshot"})).encode())

    async def records_after(self, seq: int, digest: bytes) -> Sequence[tuple[int, bytes]] | None:
        """Return some of the store's records after ``seq``, or ``None`` for a copy that has to begin anew."""
        found = await self._ask({"op": "follow", "seq": seq, "digest": digest.hex()})
        return None if found is None else [(number, body.encode()) for number, body in found]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of the connection; waiting calls fail, watches end."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(UnavailableError("this client of the store was closed"))
        for watch in self._watches.values():
            watch.ready.put_nowait(None)

    # --- calls --------------------------------------------------------------------------------------------

    def _request_id(self) -> str:
        return self._identity.random(REQUEST_ID_BYTES).hex()

    async def _ask(self, message: dict[str, Any]) -> Any:
        if self._closed:
            raise UnavailableError("this client of the store was closed")
        self._start()
        call = Call(message)
        number = self._post(call, keep=True)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await call.answer
        except TimeoutError:
            why = f" ({self.last_error})" if self.last_error is not None else ""
            raise UnavailableError(
                f"store at {' or '.join(map(str, self._places))} did not answer within {self.timeout_s:g} s{why}"
            ) from self.last_error
        finally:
            self._calls.pop(number, None)

    def _start(self) -> None:
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(UnavailableError(f"the client of the store broke: {type(error).__name__}: {error}"))
            self._closed = True

    def _post(self, call: Call, *, keep: bool) -> int:
        self._count += 1
        call.message["id"] = self._count
        if keep:
            self._calls[self._count] = call
        if self._link is not None:
            self._link.post(call.message)
        return self._count

    def _fail(self, error: StoreError) -> None:
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(error)

    # --- the connection -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        tries = 0
        async with aiohttp.ClientSession(
            trust_env=False, cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=2, ttl_dns_cache=10),
        ) as http:  # fmt: skip
            while True:
                place = self._places[tries % len(self._places)]
                try:
                    async with connect(
                        http, place, self._identity, generation=self._generation, min_term=self._term,
                        context=self._ssl,
                    ) as link:  # fmt: skip
                        tries = 0
                        self._term = link.term
                        self._places = [place, *(other for other in self._places if other != place)]
                        await self._talk(link)
                except Moved as moved:
                    self.relocate(moved.place, term=moved.term)
                    continue
                except StoreError as error:
                    self.last_error = error
                    self._fail(error)
                except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
                    self.last_error = error
                await self._sleep(backoff_s(tries, self._identity.random))
                tries += 1

    async def _talk(self, link: Connection) -> None:
        self._link = link
        self.connected.set()
        try:
            for call in list(self._calls.values()):
                link.post(call.message)
            for number, watch in list(self._watches.items()):
                await self._begin_watch(link, number, watch)
            async for message in link:
                self._heard(message)
        finally:
            self._link = None
            self.connected.clear()

    async def _begin_watch(self, link: Connection, number: int, watch: Watch) -> None:
        link.post({"op": "watch", "id": number, "prefix": watch.prefix, "after": watch.after})

    def _heard(self, message: dict[str, Any]) -> None:
        if message.get("moved"):
            raise Moved.read(message["moved"])
        if "beat" in message:
            if self._link is not None:
                self._last_beat = self._clock()
                self._link.post({"op": "beat", "id": message["beat"]})
            return
        if "watch" in message:
            if (watch := self._watches.get(message["watch"])) is not None:
                watch.take(message)
            return
        number = message.get("id")
        if number in self._watches:
            if "error" in message:
                self._watches[number].take(message)
            return
        if isinstance(number, int) and (call := self._calls.get(number)) is not None:
            call.take(message)

