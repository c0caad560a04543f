"""Both kinds of messages on the socket: round trip, limits, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.control import Control, Outcome, ResizeRequest, StatusRequest
from launcher.courier import Courier
from launcher.hub import Hub, Remote
from launcher.link import Link
from launcher.orders import Enter, Order, Report
from launcher.store.auth import new_token
from launcher.store.door import bind_one
from launcher.store.link import Identity, Place, connect
from liverun.layout import Layout
from liverun.messages import MAX_LINE_BYTES, Arm, Hello, Member, Message, Prepare, Progress, Stop

SIZES = st.integers(1, 64)
LAYOUTS = st.builds(Layout, tp=SIZES, pp=SIZES, vpp=SIZES, cp=SIZES, ep=SIZES, etp=SIZES)
MEMBERS = st.builds(
    Member, worker=st.text(), host=st.text(), old_rank=st.none() | SIZES, rank=st.none() | SIZES
)


def strategy(kind: type[Message]) -> st.SearchStrategy[Message]:
    more: dict[str, Any] = {"layout": LAYOUTS} if kind.__name__ in ("Prepare", "Check") else {}
    if kind is Hello:
        more["layout"] = st.none() | LAYOUTS
    if kind is Prepare:
        more["members"] = st.lists(MEMBERS).map(tuple)
    if kind is Progress:
        more["report"] = st.dictionaries(st.text(), st.floats(allow_nan=False))
    plain = {
        "int": st.integers(0, 2**40),
        "str": st.text(),
        "bool": st.booleans(),
        "float": st.floats(0, 1e9),
    }
    plain |= {"list[str]": st.lists(st.text()), "dict[str, str]": st.dictionaries(st.text(), st.text())}
    plain |= {"str | None": st.none() | st.text(), "int | None": st.none() | st.integers()}
    own = {
        field.name: more[field.name] if field.name in more else plain[str(field.type)]
        for field in fields(kind)
    }
    return st.builds(kind, **own)


@pytest.mark.parametrize("name", sorted(Message.types))
@given(data=st.data())
def test_every_message_survives_the_wire(name: str, data: st.DataObject) -> None:
    message = data.draw(strategy(Message.types[name]))
    line = message.encode()
    assert line.count(b"\n") == 1
    assert Message.decode(line) == message


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\n", b"[]\n", b"17\n", b"{}\n", b'{"type": "Nothing"}\n', b'{"type": "Arm"}\n',
        b'{"type": "Arm", "generation": 1, "step": 2, "more": 3}\n', b" " * (MAX_LINE_BYTES + 1),
        b'{"type": []}\n', b"[" * 200_000, b'{"a":' * 200_000,
    ],
)  # fmt: skip
def test_what_is_no_message_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"message|JSON"):
        Message.decode(line)


def test_control_messages_survive_the_wire_and_are_not_workers_messages() -> None:
    for message in (
        StatusRequest(),
        ResizeRequest(workers=4, nodes=None, layout=None, replace=None, timeout_s=1.5, cause="resize"),
        Outcome(ok=False, outcome="refused", reason="no", fields={"a": 1}),
    ):
        assert Control.decode(message.encode()) == message
    assert not set(Control.family) & set(Message.types)
    for line in (b"\xff", b"[]", b'{"type": "Hello"}', b'{"type": "StopRequest", "x": 1}'):
        with pytest.raises(ValueError, match=r"request|StopRequest"):
            Control.decode(line)


VALUES: dict[str, Any] = {
    "none": None, "true": True, "seven": 7, "half": 0.5, "text": "x", "list": [], "nested": [[]], "object": {},
    "deep": {"a": []},
}  # fmt: skip
MAY_STAND_FOR = {
    "int": "seven", "str": "text", "bool": "true", "float": "seven half", "str | None": "none text",
    "int | None": "none seven", "list[str]": "list", "tuple[str, ...]": "list", "tuple[int, ...]": "list",
    "dict[str, str]": "object", "dict[str, float]": "object", "Mapping[str, int]": "object",
    "Mapping[str, str]": "object", "Mapping[str, Any]": "object deep", "dict[str, Any]": "object deep",
    "Layout": "object", "Layout | None": "none object", "tuple[Member, ...]": "list",
}  # fmt: skip


@pytest.mark.parametrize("family", [Message, Control, Order, Report])
def test_a_field_of_another_type_than_it_has_is_refused(family: Any) -> None:
    kinds = family.types if family is Message else family.family
    tried = 0
    for name, kind in kinds.items():
        allowed = {field.name: MAY_STAND_FOR[str(field.type)].split() for field in fields(kind)}
        usual = {"type": name} | {field: VALUES[words[0]] for field, words in allowed.items()}
        assert type(family.decode(json.dumps(usual).encode())) is kind
        for field, words in allowed.items():
            for word, value in VALUES.items():
                line = json.dumps(usual | {field: value}).encode()
                if word in words:
                    family.decode(line)
                else:
                    with pytest.raises(ValueError, match=f"{name} .*is malformed"):
                        family.decode(line)
                tried += 1
    assert tried > 100


def test_a_member_of_a_change_is_checked_field_by_field() -> None:
    good = {"worker": "w", "host": "h", "old_rank": None, "rank": 0}
    usual = {
        "type": "Prepare", "generation": 1, "layout": {"tp": 1}, "world_size": 1, "store_host": "h", "store_port": 1,
        "timeout_s": 1,
    }  # fmt: skip
    Message.decode(json.dumps(usual | {"members": [good]}).encode())
    for bad in (7, [], None, good | {"rank": "0"}, good | {"worker": 1}, good | {"more": 1}, {"worker": "w"}):
        with pytest.raises(ValueError, match="Prepare message is malformed"):
            Message.decode(json.dumps(usual | {"members": [bad]}).encode())
    for bad in ({"tp": "2"}, {"tp": True}, {"tp": 0}, {"zp": 1}, [], 7):
        with pytest.raises(ValueError, match="Prepare message is malformed"):
            Message.decode(json.dumps(usual | {"members": [good], "layout": bad}).encode())


class Desk:
    """Stands for the controller behind a hub."""

    def enter(self, post: Any, offer: Enter) -> str:
        return "n1"

    def seen(self, node: str, *, away: bool) -> None:
        pass

    def heard(self, node: str, report: Report) -> None:
        raise AssertionError(report)


def test_a_proven_agent_that_breaks_the_rules_is_cut_off_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    offer = {"host": "h", "nproc": 1, "standbys": 0, "pin": None}

    async def scene() -> None:
        token = new_token(secrets.token_bytes)
        hub = Hub(Desk(), token, job="j", term=1, lost_after_s=60.0, random=secrets.token_bytes)  # type: ignore[arg-type]
        place = Place(*await hub.start("127.0.0.1", bind_one("127.0.0.1", 0)))
        who = Identity(token=token, job="j", node="a", role="agent", random=secrets.token_bytes)

        async def say(*messages: dict[str, Any]) -> list[dict[str, Any]]:
            """Say them on a connection of its own; what comes until the hub closes it."""
            async with connect(http, place, who, generation=None, min_term=0, context=None) as link:
                for message in messages:
                    link.post(message)
                return [frame async for frame in link if frame.keys() != {"seen"}]

        async with asyncio.timeout(20.0), aiohttp.ClientSession() as http:
            hub._remotes["n0"] = Remote(secret="s", courier=Courier(), heard_at=time.monotonic(), node="n0")
            back = {"node": "n0", "secret": "s"}
            for first in (
                {}, {"enter": 7}, {"enter": None}, {"enter": []}, {"enter": {}}, {"enter": {"type": "Gone"}},
                {"enter": {**offer, "nproc": "1"}}, {"enter": {**offer, "pin": [0]}}, {"enter": {**offer, "more": 1}},
                back, {**back, "seen": "0"}, {**back, "seen": None}, {**back, "seen": [0]}, {**back, "seen": 0.5},
            ):  # fmt: skip
                answers = await say(first)
                assert not answers or list(answers[0]) == ["gone"], (first, answers)
            for frame in ({}, {"seen": "0"}, {"seen": 0, "number": 1, "body": {"type": "Cleared", "kept": ["1"]}}):
                await say({"enter": offer}, frame)
            assert hub.secrets.keys() == {"n0", "n1"}
        await hub.stop(0.0)

    asyncio.run(scene())
    assert not caplog.records, caplog.text


class Behind:
    """Stands for the controller."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Message]] = []
        self.troubles: list[str] = []
        self.news = asyncio.Event()

    async def expects(self, worker: str) -> bool:
        return worker in ("w0", "w1")

    def said(self, worker: str, message: Message) -> None:
        self.heard.append((worker, message))
        self.news.set()

    async def asked(self, request: Control, writer: asyncio.StreamWriter) -> None:
        writer.write(Outcome(ok=True, outcome="heard", reason=type(request).__name__).encode())

    def trouble(self, sentence: str) -> None:
        self.troubles.append(sentence)


async def exchange(path: Path, data: bytes) -> bytes:
    """Send, and return everything that comes until the other side closes."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


HELLO = Hello(worker="w0", pid=1, layout=None)


@pytest.mark.parametrize(
    ("data", "trouble"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent no JSON"),
        (Stop(reason="x").encode(), "sent Stop before Hello"),
        (Hello(worker="w9", pid=1, layout=None).encode(), "never started or has ended"),
        (Hello(worker="w0", pid=1, layout=None, protocol=99).encode(), "speaks protocol 99"),
        (HELLO.encode() + b"nonsense\n", "not JSON"),
        (b"x" * (MAX_LINE_BYTES + 10), "limit"),
        (b"[" * 200_000 + b"\n", "sent no JSON"),
        (b'{"type": []}\n', "no known type"),
        (HELLO.encode() + b'{"type": "Progress", "generation": "1", "step": 2}\n', "generation is str"),
        (HELLO.encode() + b"[" * 200_000 + b"\n", "not JSON"),
    ],
)
def test_a_stranger_or_a_broken_worker_is_cut_off_and_named(
    tmp_path: Path, data: bytes, trouble: str
) -> None:
    async def scene() -> None:
        behind = Behind()
        link = Link(tmp_path / "s", behind, uid=os.geteuid())
        await link.start()
        assert await exchange(tmp_path / "s", data) == b""
        await link.close()
        assert any(trouble in sentence for sentence in behind.troubles), behind.troubles

    asyncio.run(scene())


def test_workers_and_the_command_line_share_the_socket(tmp_path: Path) -> None:
    async def scene() -> None:
        behind = Behind()
        link = Link(tmp_path / "s", behind, uid=os.geteuid())
        await link.start()
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(HELLO.encode())
        await behind.news.wait()
        assert behind.heard == [("w0", HELLO)]
        link.send("w0", Arm(generation=2, step=3))
        assert Message.decode(await reader.readline()) == Arm(generation=2, step=3)
        assert (
            json.loads(await exchange(tmp_path / "s", StatusRequest().encode()))["reason"] == "StatusRequest"
        )
        await exchange(tmp_path / "s", HELLO.encode())  # a second w0
        assert "connected already" in behind.troubles[0]
        writer.close()
        await link.close()

    asyncio.run(scene())


OTHER_UID = 12345


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of the machine can reach; a test's own lies in one of mode 0700."""
    with tempfile.TemporaryDirectory(prefix="liverun-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def ask_as(uid: int, path: Path, waits: int, go: int) -> int:
    """Fork a child that turns into another user, waits for a byte of ``go``, asks for the status, and exits 0 if it is not told.

    A child of this process, because the interpreter may lie where another user cannot start it.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 9
    try:
        os.close(go)  # so that it also ends when nobody is left to write
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        os.read(waits, 1)
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(20.0)
            link.connect(str(path))
            with contextlib.suppress(BrokenPipeError):
                link.sendall(StatusRequest().encode())
            with contextlib.suppress(ConnectionResetError):
                if link.recv(100):
                    os._exit(1)
            code = 0
    finally:
        os._exit(code)


def test_another_users_process_is_refused(open_folder: Path) -> None:
    """It is one where the tests may change their user, else this process while the agent is another's."""
    path, root = open_folder / "s", os.geteuid() == 0
    waits, go = os.pipe()
    child = ask_as(OTHER_UID, path, waits, go) if root else 0

    async def scene() -> None:
        behind = Behind()
        link = Link(path, behind, uid=os.geteuid() + (not root))
        await link.start()
        path.chmod(0o666)  # only the check of the peer is left
        if root:
            os.write(go, b"x")
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, "it was answered"
            assert f"refused a connection of uid {OTHER_UID} (pid {child})" in behind.troubles
            assert await exchange(path, StatusRequest().encode()) != b""  # root may talk to anyone's agent
        else:
            assert await exchange(path, StatusRequest().encode()) == b""
            assert "refused a connection of uid" in behind.troubles[0]
        await link.close()

    try:
        asyncio.run(scene())
    finally:
        os.close(waits)
        os.close(go)


def test_a_socket_that_nobody_serves_is_an_os_error(tmp_path: Path) -> None:
    from launcher.link import connect

    with pytest.raises(OSError, match="No such file"):
        connect(str(tmp_path / "none"))
    lonely = socket.socket(socket.AF_UNIX)
    lonely.bind(str(tmp_path / "lonely"))
    with pytest.raises(ConnectionRefusedError):
        connect(str(tmp_path / "lonely"))
    lonely.close()
