"""etcd v3 as a job's store, through etcd's own JSON gateway.

Every key lies under ``<root>/<job>/``: ``k/`` the store's own keys, ``f`` the fence (twenty digits, so that text
order is number order). etcd's revisions are shared with every other user of the cluster; they still only grow, and
grow with every write here.

etcd has no memory of a request whose answer was lost: after ``UnavailableError`` a write may have been done. Leases
are whole seconds there, and at least two; ``ttl_s`` is rounded up.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from launcher.store import limits
from launcher.store.contract import Change, Entry, Listing
from launcher.store.errors import AheadError, CompactedError, FencedError, FullError, LeaseEndedError, StoreError
from launcher.store.etcd_gateway import Gateway, GatewayError, Login, after_prefix, text_of, to_base64
from launcher.store.link import Place

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 2.0
Operations = Sequence[dict[str, Any]]


class EtcdStore:
    """A :class:`launcher.store.contract.Store` in an etcd cluster."""

    def __init__(
        self, places: Sequence[Place], *, job: str, root: str = "/liverun", generation: int | None = None,
        login: Login | None = None, ssl_context: ssl.SSLContext | None = None, timeout_s: float = 30.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        self.generation = generation
        self._keys = f"{root}/{job}/k/"
        self._fence_key = f"{root}/{job}/f"
        self._gateway = Gateway(places, login=login, ssl_context=ssl_context, timeout_s=timeout_s, sleep=sleep)
        self._sleep = sleep
        self._closing = asyncio.Event()

    async def get(self, key: str) -> Entry | None:
        """One key, or ``None``."""
        limits.check_key(key)
        found = await self._ask("kv/range", {"key": to_base64(self._keys + key)})
        entries = [self._entry(row) for row in found.get("kvs", ())]
        return entries[0] if entries else None

    async def list(self, prefix: str) -> list[Entry]:
        """Every key that starts with ``prefix``, sorted."""
        return list((await self.scan(prefix)).entries)

    async def scan(self, prefix: str) -> Listing:
        """Return the same with the revision to watch from."""
        limits.check_prefix(prefix)
        start = self._keys + prefix
        found = await self._ask(
            "kv/range", {"key": to_base64(start), "range_end": after_prefix(start), "sort_target": "KEY"}
        )
        entries = sorted((self._entry(row) for row in found.get("kvs", ())), key=lambda entry: entry.key)
        return Listing(revision=int(found["header"]["revision"]), entries=tuple(entries))

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
        compare = [
            {
                "key": to_base64(self._keys + key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision),
            }
            for key, revision in expected.items()
        ]  # fmt: skip
        done = await self._guarded(compare, [self._write(key, value, lease) for key, value in writes.items()], lease)
        return int(done["header"]["revision"]) if done.get("succeeded") else None

    async def grant(self, ttl_s: float) -> int:
        """Open a lease."""
        limits.check_ttl(ttl_s)
        return int((await self._ask("lease/grant", {"TTL": str(math.ceil(ttl_s))}, write=True))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; false if it has ended already."""
        found = await self._ask("lease/keepalive", {"ID": str(lease)})
        return int(found.get("result", found).get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """End a lease and remove its keys now."""
        try:
            await self._gateway.ask("lease/revoke", {"ID": str(lease)}, write=True)
        except GatewayError as error:
            if not error.not_found:
                raise error.plain() from None

    async def fence(self, generation: int) -> None:
        """Refuse writers of earlier generations."""
        limits.check_revision(generation)
        text = _digits(generation)
        put = {"request_put": {"key": to_base64(self._fence_key), "value": to_base64(text)}}
        while True:
            key = to_base64(self._fence_key)
            later = {"key": key, "target": "VALUE", "result": "LESS", "value": to_base64(text)}
            if (await self._guarded([later], [put], None, present=True)).get("succeeded"):
                return
            if await self._fence() >= generation:
                return
            await self._make_fence()

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Change]:
        """Every change after ``from_revision`` under ``prefix``, in order, then the ones to come."""
        limits.check_prefix(prefix)
        limits.check_revision(from_revision)
        seen, tries = from_revision, 0
        now = await self._ask("kv/range", {"key": to_base64(self._fence_key)})
        reached = int(now["header"]["revision"])
        if from_revision > reached:
            raise AheadError(f"revision {from_revision} was asked for, this store is at {reached}; list again")
        while not self._closing.is_set():
            try:
                async for changes, revision in self._changes(prefix, seen):
                    tries = 0
                    for change in changes:
                        yield change
                    seen = max(seen, revision)
            except (aiohttp.ClientError, OSError, TimeoutError, json.JSONDecodeError):
                self._gateway.next_place()
            await self._sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(tries, 6)))
            tries += 1

    async def aclose(self) -> None:
        """Let go of the connections; watches end."""
        self._closing.set()
        await self._gateway.close()

    # --- inside -------------------------------------------------------------------------------------------

    async def _changes(self, prefix: str, seen: int) -> AsyncIterator[tuple[Sequence[Change], int]]:
        """Give the changes of whole revisions together, and the revision up to which nothing is missing."""
        start = self._keys + prefix
        ask = {
            "key": to_base64(start), "range_end": after_prefix(start), "start_revision": str(seen + 1),
            "fragment": False,
        }  # fmt: skip
        async for result in self._gateway.stream("watch", {"create_request": ask}):
            if result.get("compact_revision"):
                raise CompactedError(
                    f"changes before revision {result['compact_revision']} are no longer kept, "
                    f"{seen} was asked for; list again"
                )
            if result.get("canceled"):
                raise StoreError(f"etcd ended a watch: {result.get('cancel_reason', 'no reason given')}")
            events = [self._change(event) for event in result.get("events", ())]
            for index, change in enumerate(events[:-1]):
                if events[index + 1].revision == change.revision:
                    events[index] = Change(key=change.key, value=change.value, revision=change.revision, last=False)
            if events:
                yield events, events[-1].revision

    async def _guarded(
        self, compare: Operations, writes: Operations, lease: int | None, *, present: bool = False
    ) -> dict[str, Any]:
        """One transaction that a fenced generation cannot make; ``present``: the fence has to be there."""
        if self.generation is None and not present:
            return await self._transaction(compare, writes, [], lease)
        fence = {"key": to_base64(self._fence_key)}
        beyond = to_base64(_digits((self.generation or 0) + 1))
        bound = {**fence, "target": "VALUE", "result": "LESS", "value": beyond}
        guard = [] if self.generation is None else [bound]
        while True:
            done = await self._transaction([*compare, *guard], writes, [{"request_range": fence}], lease)
            if done.get("succeeded"):
                return done
            rows = done["responses"][0]["response_range"].get("kvs", ())
            if not rows:
                if present:
                    return done
                await self._make_fence()
                continue
            active = int(text_of(rows[0]["value"]))
            if self.generation is not None and self.generation < active:
                raise FencedError(f"generation {self.generation} is over; {active} is active")
            return done

    async def _ask(self, what: str, body: Mapping[str, Any], *, write: bool = False) -> dict[str, Any]:
        """Make a request of which no error has a meaning of its own. Raises ``StoreError``."""
        try:
            return await self._gateway.ask(what, body, write=write)
        except GatewayError as error:
            raise error.plain() from None

    async def _transaction(
        self, compare: Operations, success: Operations, failure: Operations, lease: int | None
    ) -> dict[str, Any]:
        body = {"compare": compare, "success": success, "failure": failure}
        try:
            return await self._gateway.ask("kv/txn", body, write=True)
        except GatewayError as error:
            if error.not_found and lease is not None:
                raise LeaseEndedError(f"lease {lease} has ended; grant another and write again") from None
            if error.full:
                raise FullError(f"etcd takes no more: {error}; compact and defragment it") from None
            raise error.plain() from None

    async def _make_fence(self) -> None:
        key = to_base64(self._fence_key)
        absent = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        put = {"request_put": {"key": key, "value": to_base64(_digits(0))}}
        await self._transaction([absent], [put], [], None)

    async def _fence(self) -> int:
        found = await self._ask("kv/range", {"key": to_base64(self._fence_key)})
        return max((int(text_of(row["value"])) for row in found.get("kvs", ())), default=-1)

    def _write(self, key: str, value: str | None, lease: int | None) -> dict[str, Any]:
        name = to_base64(self._keys + key)
        if value is None:
            return {"request_delete_range": {"key": name}}
        put = {"key": name, "value": to_base64(value)}
        return {"request_put": put if lease is None else {**put, "lease": str(lease)}}

    def _entry(self, row: Mapping[str, Any]) -> Entry:
        key = text_of(row["key"]).removeprefix(self._keys)
        return Entry(key=key, value=text_of(row.get("value", "")), revision=int(row["mod_revision"]))

    def _change(self, event: Mapping[str, Any]) -> Change:
        row = event["kv"]
        key = text_of(row["key"]).removeprefix(self._keys)
        value = None if event.get("type") == "DELETE" else text_of(row.get("value", ""))
        return Change(key=key, value=value, revision=int(row["mod_revision"]))


def _digits(number: int) -> str:
    return f"{number:020d}"
