"""The worker's end of the socket to its agent."""

from __future__ import annotations

import contextlib
import queue
import socket
from pathlib import Path
from typing import Any

import pytest

from liverun.link import Link
from liverun.messages import MAX_LINE_BYTES, Go, Message, Progress, Stop, Where

DEADLINE_S = 20.0


@pytest.fixture
def ends(tmp_path: Path) -> Any:
    server = socket.socket(socket.AF_UNIX)
    path = tmp_path / "agent.sock"
    server.bind(str(path))
    server.listen(1)
    said: queue.Queue[Any] = queue.Queue()
    link = Link(path, on_message=said.put, on_tick=lambda: None, on_lost=lambda: said.put("lost"))
    link.start()
    agent, _ = server.accept()
    yield agent, link, said
    agent.close()
    server.close()


def test_messages_arrive_whole_however_they_are_cut(ends: Any) -> None:
    agent, _, said = ends
    data = Go(generation=2, step=7).encode() + Where().encode() + Stop(reason="x" * 5000).encode()
    for start in range(0, len(data), 7):
        agent.sendall(data[start : start + 7])
    assert said.get(timeout=DEADLINE_S) == Go(generation=2, step=7)
    assert said.get(timeout=DEADLINE_S) == Where()
    assert said.get(timeout=DEADLINE_S) == Stop(reason="x" * 5000)


def test_what_is_sent_is_one_line_of_json(ends: Any) -> None:
    agent, link, _ = ends
    link.send(Progress(generation=1, step=3, report={"loss": 1.5}))
    line = agent.makefile("rb").readline()
    assert Message.decode(line) == Progress(generation=1, step=3, report={"loss": 1.5})


def test_an_agent_that_is_gone_is_told_once(ends: Any) -> None:
    agent, link, said = ends
    agent.close()
    assert said.get(timeout=DEADLINE_S) == "lost"
    link.send(Where())  # must not raise


def test_a_line_without_an_end_is_not_collected_for_ever(ends: Any) -> None:
    agent, _, said = ends
    agent.settimeout(DEADLINE_S)
    with contextlib.suppress(OSError):
        agent.sendall(b"x" * (MAX_LINE_BYTES + 70000))
    assert said.get(timeout=DEADLINE_S) == "lost"


def test_no_agent_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="no liverun agent answers at"):
        Link(tmp_path / "nobody.sock", on_message=print, on_tick=print, on_lost=print)
