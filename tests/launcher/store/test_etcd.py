"""What is particular to etcd: users and TLS, members that go, its own compaction and leases."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_bed import HOST, EtcdServer, cluster, running, secure

from launcher.store.errors import CompactedError, ForbiddenError, UnavailableError
from launcher.store.etcd import EtcdStore
from launcher.store.etcd_gateway import Login, after_prefix, to_base64
from launcher.store.link import Place

LOGIN = Login(user="liverun", password="not-a-secret")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[EtcdServer]:
    for server in running(tmp_path_factory.mktemp("etcd-secure"), certificates):
        secure(server, LOGIN)
        yield server


def trusting(certificates: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificates / "cert.pem"))


def test_a_user_with_its_password_over_tls_is_served(secured: EtcdServer, certificates: Path) -> None:
    async def scene() -> None:
        async with secured.bed(login=LOGIN, ssl_context=trusting(certificates)) as bed:
            store = await bed.client(generation=1)
            lease = await store.grant(10.0)
            before = await store.put("a", "1", lease=lease)
            assert await store.keep_alive(lease)
            watch = store.watch("", before)
            await store.put("b", "2")
            assert (await anext(watch)).value == "2"
            await store.fence(1)
            store._gateway._token = "stale.1"
            assert (await store.get("a")).value == "1"  # type: ignore[union-attr]
            await watch.aclose()  # type: ignore[attr-defined]

    asyncio.run(scene())


@pytest.mark.parametrize("login", [None, Login(user="liverun", password="wrong"), Login(user="who", password="x")])
def test_nobody_and_a_wrong_password_are_refused(
    secured: EtcdServer, certificates: Path, login: Login | None
) -> None:
    async def scene() -> None:
        async with secured.bed(login=login, ssl_context=trusting(certificates)) as bed:
            store = await bed.client()
            for asked in (store.put("a", "1"), store.get("a"), store.scan(""), store.fence(1), anext(store.watch("", 0))):
                with pytest.raises(ForbiddenError, match="check the user and password of etcd"):
                    await asked

    asyncio.run(scene())
    assert "wrong" not in repr(login)


def test_keys_outside_the_users_role_are_refused(secured: EtcdServer, certificates: Path) -> None:
    async def scene() -> None:
        async with secured.bed(login=LOGIN, ssl_context=trusting(certificates), root="/elsewhere") as bed:
            with pytest.raises(ForbiddenError, match="permission denied"):
                await (await bed.client()).put("a", "1")

    asyncio.run(scene())


def test_a_server_nobody_vouches_for_is_not_spoken_to(secured: EtcdServer) -> None:
    async def scene() -> None:
        async with secured.bed(login=LOGIN, ssl_context=ssl.create_default_context(), timeout_s=0.3) as bed:
            with pytest.raises(UnavailableError, match=r"(?i)certificate"):
                await (await bed.client()).get("a")

    asyncio.run(scene())


def test_a_member_killed_and_started_again_costs_no_change_a_watch_should_see(tmp_path: Path) -> None:
    async def scene(server: EtcdServer) -> None:
        async with server.bed() as bed:
            store = await bed.client(timeout_s=20.0)
            before = await store.put("a", "0")
            watch = store.watch("", before)
            await store.put("a", "1")
            assert (await anext(watch)).value == "1"
            waiting = asyncio.create_task(anext(watch))
            server.stop()
            asked = asyncio.create_task(store.put("a", "2"))
            await asyncio.to_thread(server.start)
            assert await asked > before
            assert (await waiting).value == "2"
            await watch.aclose()  # type: ignore[attr-defined]

    for server in running(tmp_path):
        asyncio.run(scene(server))


def test_any_one_of_three_members_may_be_lost_and_a_minority_answers_nobody(tmp_path: Path) -> None:
    async def scene(members: list[EtcdServer]) -> None:
        places = [member.place for member in members]
        store = EtcdStore(places, job="of-three", generation=1, timeout_s=20.0)
        lease = await store.grant(60.0)
        before = await store.put("a", "0", lease=lease)
        watch = store.watch("", before)
        waiting = asyncio.ensure_future(anext(watch))
        await store.fence(1)
        members[0].stop()  # the one that was asked so far
        assert (await store.get("a")).value == "0"  # type: ignore[union-attr]
        assert await store.compare_and_set({"a": before}, {"a": "1"}, lease=lease) is not None
        assert (await waiting).value == "1"
        assert await store.keep_alive(lease)
        members[1].stop()
        lost = EtcdStore(places, job="of-three", timeout_s=1.0)
        with pytest.raises(UnavailableError, match=f"etcd at .*{places[2]}.* did not answer within 1 s"):
            await lost.put("a", "2")
        for one in (watch, lost, store):
            await one.aclose()  # type: ignore[attr-defined]

    with cluster(tmp_path) as members:
        asyncio.run(scene(members))


def test_a_compacted_revision_is_told(etcd: EtcdServer) -> None:
    async def scene() -> None:
        async with etcd.bed() as bed:
            store = await bed.client()
            first = await store.put("a", "0")
            last = [await store.put("a", str(number)) for number in range(5)][-1]
            await store._gateway.ask("kv/compaction", {"revision": str(last)})
            with pytest.raises(CompactedError, match="list again"):
                await anext(store.watch("", first))

    asyncio.run(scene())


def test_a_job_sees_nothing_of_another(etcd: EtcdServer) -> None:
    """Complaint 21: jobs are isolated."""

    async def scene() -> None:
        async with etcd.bed() as one, etcd.bed() as other:
            first, second = await one.client(generation=1), await other.client(generation=1)
            before = (await second.scan("")).revision
            await first.put("a", "1")
            await first.fence(1)
            assert await second.list("") == []
            watch = second.watch("", before)
            await second.put("b", "2")
            assert (await anext(watch)).key == "b"
            await watch.aclose()  # type: ignore[attr-defined]

    asyncio.run(scene())


def test_a_member_that_is_not_there_is_passed_over(etcd: EtcdServer) -> None:
    async def scene() -> None:
        store = EtcdStore([Place(HOST, 1), etcd.place], job="passed-over", timeout_s=10.0)
        await store.put("a", "1")
        await store.aclose()
        lost = EtcdStore([Place(HOST, 1)], job="lost", timeout_s=0.2)
        with pytest.raises(UnavailableError, match=r"etcd at 127.0.0.1:1 did not answer within 0.2 s \(Cannot"):
            await lost.put("a", "1")
        await lost.aclose()

    asyncio.run(scene())


def test_the_end_of_a_prefix_is_the_next_key_after_all_of_it() -> None:
    assert after_prefix("a/") == to_base64("a0")
    assert after_prefix("\U0010ffff") > to_base64("\U0010ffff")
