"""Both kinds of messages on the socket: round trip, limits, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.control import Control, Outcome, ResizeRequest, StatusRequest
from launcher.link import Link
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


def test_another_users_process_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        behind = Behind()
        link = Link(tmp_path / "s", behind, uid=os.geteuid() + 1)
        await link.start()
        if os.geteuid() == 0:  # root may talk to anyone's agent, so what root sees here is an answer
            assert await exchange(tmp_path / "s", StatusRequest().encode()) != b""
        else:
            assert await exchange(tmp_path / "s", StatusRequest().encode()) == b""
            assert "refused a connection of uid" in behind.troubles[0]
        await link.close()

    asyncio.run(scene())


def test_a_socket_that_nobody_serves_is_an_os_error(tmp_path: Path) -> None:
    from launcher.link import connect

    with pytest.raises(OSError, match="No such file"):
        connect(str(tmp_path / "none"))
    lonely = socket.socket(socket.AF_UNIX)
    lonely.bind(str(tmp_path / "lonely"))
    with pytest.raises(ConnectionRefusedError):
        connect(str(tmp_path / "lonely"))
    lonely.close()
