"""With a store that no agent carries: one controller and one world, however long an agent stands still or how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from typing import Any

import psutil
import pytest
from launcher_bed import Agent, Bed, until
from test_many_nodes import Nodes, StandingStore, ranks, with_store

from launcher.store.auth import read_token_file
from launcher.store.client import RemoteStore
from launcher.store.link import Place

pytestmark = pytest.mark.timeout(120)


def read(store: StandingStore, key: str) -> Any:
    """What the store says, as somebody who only looks on sees it."""

    async def look() -> Any:
        async with RemoteStore(
            [Place("127.0.0.1", store.port)], read_token_file(store.token, uid=os.geteuid()), job="standing",
            node="test", role="observer", random=secrets.token_bytes,
        ) as seen:  # fmt: skip
            entry = await seen.get(key)
            return None if entry is None else json.loads(entry.value)

    return asyncio.run(look())


def status(bed: Bed, agent: Agent) -> dict[str, Any]:
    return json.loads(bed.cli("status", agent.folder.name, "--json").stdout)


def pids(bed: Bed, agent: Agent) -> list[int]:
    return [row["pid"] for node in status(bed, agent)["nodes"] for row in node["workers"]]


def stood_still(store: StandingStore, nodes: Nodes) -> Agent:
    """Start a job of one node, and stop its agent until the store has ended its lease."""
    first = nodes.start(1)
    first.event("world")
    assert read(store, "controller") is not None
    first.signal(signal.SIGSTOP)
    until("the lease to end", lambda: read(store, "controller") is None)
    return first


def test_a_leader_that_stood_still_is_the_leader_again_and_no_step_is_lost(bed: Bed) -> None:
    store = StandingStore(bed, "standing")
    nodes = with_store(bed, store, "--max-restarts", "2")
    first = stood_still(store, nodes)
    first.signal(signal.SIGCONT)
    until("it to lead again", lambda: read(store, "controller") is not None)
    before = pids(bed, first)
    second = nodes.start(1)
    first.event("active")
    now = status(bed, first)
    assert ranks(now) == {0: "n0", 1: "n1"}
    assert (now["restarts"]["used"], now["generation"], read(store, "job/active")) == (0, 2, 2)
    assert set(before) <= set(pids(bed, first))
    assert "controller_lost" not in first.kinds() + second.kinds()
    assert first.finish() == 0
    assert second.wait() == 0
    store.kill()


def test_a_leader_that_another_has_taken_the_place_of_ends_its_workers_and_comes_to_it(bed: Bed) -> None:
    store = StandingStore(bed, "standing")
    nodes = with_store(bed, store, "--max-restarts", "2")
    first = stood_still(store, nodes)
    old = psutil.Process(first.process.pid).children(recursive=True)
    second = nodes.start(1)
    second.event("world")
    first.signal(signal.SIGCONT)
    until("it to give way", lambda: "another agent has led the job" in first.stderr())
    second.event("active")
    until("its old processes to end", lambda: [p.cmdline() for p in old if p.is_running()] == [], 5.0)
    now = status(bed, second)
    assert set(ranks(now).values()) == {"n1", "n2"}
    assert now["restarts"]["used"] == 1
    worlds = [event["generation"] for event in first.events() if event["kind"] in ("world", "active")]
    assert worlds == [1, read(store, "job/active")]  # what became active without it, it has no part in
    assert second.finish() == 0, second.stderr()
    assert first.wait() == 0, first.stderr()
    store.kill()


def test_an_agent_that_finds_the_place_of_a_dead_controller_takes_it_over_in_seconds(bed: Bed) -> None:
    store = StandingStore(bed, "standing")
    nodes = with_store(bed, store, "--max-restarts", "1")
    first = nodes.start(1)
    first.event("world")
    first.signal(signal.SIGKILL)
    first.wait()
    assert read(store, "controller") is not None
    second = nodes.start(1)
    until("its world", lambda: "world" in second.kinds(), 45.0)
    assert "this node offers 1 workers to the job at" in second.stderr()  # it had believed what it read
    assert status(bed, second)["restarts"]["used"] == 1
    assert second.finish() == 0, second.stderr()
    store.kill()
