"""Every bound on what a store keeps or reads, made small: what is beyond it is refused, and the rest goes on."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from store_bed import HOST, JOB, TOKEN, ServedBed, served

from launcher.store import door, etcd_gateway, limits, session, wire
from launcher.store.errors import CompactedError, FullError, LimitError, StoreError
from launcher.store.etcd import EtcdStore
from launcher.store.etcd_gateway import Login
from launcher.store.link import Identity, Place, connect

Scene = Callable[[ServedBed], Awaitable[None]]
Play = Callable[[Scene], None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Scene) -> None:
        async def whole() -> None:
            async with asyncio.timeout(30.0), served(tmp_path) as bed:
                await scene(bed)

        asyncio.run(whole())

    return run


def test_a_store_takes_so_many_bytes_and_more_once_keys_are_gone(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STORE_BYTES", 1000)

    async def scene(bed: ServedBed) -> None:
        store = await bed.client()
        await store.put("a", "x" * 600)
        with pytest.raises(FullError, match="holds 601 bytes and takes 1000; remove keys"):
            await store.put("b", "x" * 399)
        assert await store.get("b") is None
        await store.put("b", "x" * 398)
        await store.put("a", "x" * 600)  # a full one still takes what makes it no larger
        await store.compare_and_set({}, {"a": None})
        await store.put("c", "x" * 600)

    play(scene)


def test_a_store_takes_so_many_leases_and_more_once_one_has_ended(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LEASES", 2)

    async def scene(bed: ServedBed) -> None:
        store = await bed.client()
        first, _ = await store.grant(10.0), await store.grant(10.0)
        with pytest.raises(FullError, match="2 leases are open; a store takes 2"):
            await store.grant(10.0)
        await store.revoke(first)
        await store.grant(10.0)

    play(scene)


def test_a_connection_takes_so_many_watches_and_serves_those_it_has(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_WATCHES", 2)

    async def scene(bed: ServedBed) -> None:
        store, other = await bed.client(), await bed.client()
        watches = [store.watch("", 0) for _ in range(2)]
        seen = [asyncio.ensure_future(anext(watch)) for watch in watches]
        await store.put("a", "1")
        assert [(await one).value for one in seen] == ["1", "1"]
        with pytest.raises(LimitError, match="2 watches on one connection; a store takes 2"):
            await anext(store.watch("", 0))
        assert (await anext(other.watch("", 0))).value == "1"
        await watches[0].aclose()  # type: ignore[attr-defined]
        again = store.watch("", 0)
        assert (await anext(again)).value == "1"

    play(scene)


def test_changes_kept_for_watches_take_so_many_bytes(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HISTORY_BYTES", 5000)

    async def scene(bed: ServedBed) -> None:
        store = await bed.client()
        for number in range(20):
            await store.put("a", str(number) * 700)
            assert bed.engine.machine._history_bytes <= 5000
        with pytest.raises(CompactedError, match="list again"):
            await anext(store.watch("", 0))
        assert (await anext(store.watch("", 19))).revision == 20

    play(scene)


def test_a_message_in_many_frames_is_cut_off_at_its_bound(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_REQUEST_BYTES", 100_000)
    held = []
    add = wire.Joiner.add

    def noted(joiner: wire.Joiner, frame: bytes) -> bytes | None:
        try:
            return add(joiner, frame)
        finally:
            held.append(sum(map(len, joiner._pieces)))

    monkeypatch.setattr(wire.Joiner, "add", noted)

    async def scene(bed: ServedBed) -> None:
        store = await bed.client()
        who = Identity(token=TOKEN, job=JOB, node="n", role="agent", random=secrets.token_bytes)
        async with aiohttp.ClientSession() as http, connect(
            http, bed.place, who, generation=None, min_term=0, context=None
        ) as link:  # fmt: skip
            link.post({"op": "get", "id": 1, "key": "x" * 1_000_000})
            assert [answer async for answer in link] == []  # it is closed, without an answer
        assert 60_000 < max(held) <= 100_000
        assert await store.get("a") is None

    play(scene)


def test_only_so_many_strangers_wait_and_the_oldest_goes_first(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_UNPROVEN", 3)

    async def scene(bed: ServedBed) -> None:
        store = await bed.client()
        await store.put("a", "1")  # one that has proved itself is not counted
        waiting = []
        for _ in range(5):
            waiting.append(await asyncio.open_connection(bed.place.host, bed.place.port))
            async with asyncio.timeout(5.0):
                while len(bed.server.strangers._waiting) < min(3, len(waiting)):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        for reader, _ in waiting[:2]:
            assert await reader.read() == b""
        assert len(bed.server.strangers._waiting) == 3
        _, writer = waiting[2]
        reader, _ = waiting[2]
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert (await store.get("a")) is not None
        for _, writer in waiting:
            writer.transport.abort()

    play(scene)


# --- what an etcd may answer ----------------------------------------------------------------------------------


@asynccontextmanager
async def gateway(chunks: int, *, declared: int | None = None, status: int = 200) -> AsyncIterator[tuple[Place, list[int]]]:
    """Something at etcd's address that answers everything with so many KiB; how many it could send."""
    sent: list[int] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        reply = web.StreamResponse(status=status)
        if declared is None:
            reply.enable_chunked_encoding()
        else:
            reply.content_length = declared
        await reply.prepare(request)
        for number in range(chunks):
            await reply.write(b"x" * 1024)
            sent.append(number)
        return reply

    server = await asyncio.get_running_loop().create_server(web.Server(answer), HOST, 0)
    try:
        yield Place(HOST, server.sockets[0].getsockname()[1]), sent
    finally:
        server.close()


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        ({}, "get"), ({"declared": 2**40}, "get"), ({"status": 500}, "get"), ({}, "login"), ({}, "watch"),
        ({"status": 500}, "watch"),
    ],
)  # fmt: skip
def test_an_answer_of_etcd_is_read_up_to_its_bound_whatever_length_it_claims(
    settings: dict[str, Any], asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_gateway, "REPLY_LIMIT_BYTES", 64 * 1024)
    monkeypatch.setattr(etcd_gateway, "WATCH_LINE_LIMIT_BYTES", 64 * 1024)

    async def scene() -> None:
        async with asyncio.timeout(20.0), gateway(100_000, **settings) as (place, sent):
            login = Login(user="u", password="p") if asks == "login" else None
            store = EtcdStore([place], job="j", login=login, timeout_s=10.0)
            asking = anext(store._gateway.stream("watch", {})) if asks == "watch" else store.get("a")
            with pytest.raises(StoreError, match=r"65536 bytes|would answer with 1099511627776 bytes"):
                await asking
            await store.aclose()
            assert len(sent) < 20_000  # sockets hold some

    asyncio.run(scene())


@pytest.mark.parametrize("data", [b"<html>login</html>", b"[]", b"7", b"[" * 100_000, b"\xff", b'{"error":' * 50_000])
@pytest.mark.parametrize("status", [200, 404])
def test_what_is_no_answer_of_etcd_is_told_as_a_store_error(data: bytes, status: int) -> None:
    async def scene() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            return web.Response(body=data, status=status)

        server = await asyncio.get_running_loop().create_server(web.Server(answer), HOST, 0)
        store = EtcdStore([Place(HOST, server.sockets[0].getsockname()[1])], job="j", timeout_s=10.0)
        for asked in (store.get("a"), store.put("a", "1")):
            with pytest.raises(StoreError, match=f"etcd: .*{'no answer of' if status == 200 else 'HTTP 404'}"):
                await asked
        await store.aclose()
        server.close()

    asyncio.run(scene())
