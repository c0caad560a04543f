"""Where other nodes come in: the store's port and the controller's, open as long as the job has a leader here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
from collections.abc import AsyncIterator

from launcher.controller import Controller
from launcher.entering import controller_value
from launcher.entry import Entry
from launcher.hub import Hub
from launcher.leading import CONTROLLER_KEY, Leadership
from launcher.model import HandOver, HandoverFailed
from launcher.options import Meeting
from launcher.orders import DoorsOpen, Follow, OpenDoors, TookOver
from launcher.store import EmbeddedStore
from launcher.store.engine import Engine
from launcher.store.link import Place
from launcher.store.quorum import WriteGate
from launcher.store.server import StoreServer
from launcher.succession import ask_where

LOOK_S = 1.0
HANDOVER_S = 10.0
"""how long the node that takes over may take for each answer"""
FOLLOW_S = 5.0
"""how long the others may take to go to it"""
BEAT_S = 0.5
"""how often the store asks every agent whether it is there"""


@contextlib.asynccontextmanager
async def doors(
    controller: Controller, entry: Entry, own: EmbeddedStore | None, meeting: Meeting, *, own_name: str,
    patience_s: float,
) -> AsyncIterator[None]:  # fmt: skip
    """Serve the controller, and the store if it is this agent's; agents leave first, the store last.

    ``own_name``: what this agent is called in the store's proofs. A store of this agent's writes only while enough of
    the active world's nodes are in sight (:mod:`launcher.store.quorum`).
    """
    assert entry.token is not None
    assert entry.door is not None
    context = meeting.tls.server() if meeting.tls is not None else None
    hub = Hub(
        controller, entry.token, job=entry.name, term=entry.term, lost_after_s=meeting.lost_after_s,
        random=secrets.token_bytes, ssl_context=context,
    )  # fmt: skip
    server, keeping = None, None
    if own is not None:
        value = controller_value(entry.host, entry.door, job=entry.job, term=entry.term)
        controller.lead_by(Leadership(own, value, revision=await own.put(CONTROLLER_KEY, value)))
        server = StoreServer(
            own.engine, entry.token, job=entry.name, random=secrets.token_bytes, beat_s=BEAT_S, ssl_context=context
        )
        gate = WriteGate(
            own_name, server.heard, voters=entry.voters, horizon_s=meeting.lost_after_s, clock=own.engine.clock
        )
        own.engine.gate = gate
        keeping = asyncio.create_task(_look_for_another(controller, own, gate, entry, meeting, own_name))
        controller.world_changed, controller.world_known = gate.set_voters, gate.knows
    if entry.taken is not None:
        hub.expect(entry.taken.remotes)
    await hub.start(entry.host, entry.door)
    if own is not None and server is not None:
        controller.on_hand_over = functools.partial(_hand_over, controller, hub, server, own.engine)
    try:
        if server is not None:
            assert entry.listener is not None
            host, port = entry.listener.getsockname()[:2]
            await server.start(host, port, listener=entry.listener)
        yield
    finally:
        if controller.end is None:
            hub.let_go()  # another controller acts for them
        await hub.stop(patience_s)
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        if server is not None:
            await server.stop()
        if entry.store is not None:
            await controller.resign()
            await entry.store.aclose()


async def _look_for_another(  # noqa: PLR0917  (a task of doors(), with what that has)
    controller: Controller, own: EmbeddedStore, gate: WriteGate, entry: Entry, meeting: Meeting, own_name: str
) -> None:
    """While too few nodes are in sight, ask those that can be reached whether the store is elsewhere by now."""
    assert entry.token is not None
    context = meeting.tls.client() if meeting.tls is not None else None
    while controller.superseded is None:
        await asyncio.sleep(LOOK_S)
        if gate() is None:
            continue
        records = [json.loads(item.value) for item in await own.list("node/") if item.key != "node/next"]
        places = [Place(node["host"], node["peers"]) for node in records if node["peers"]]
        found = await ask_where(places, entry.token, job=entry.name, agent=own_name, context=context)
        if found is not None and found.term > own.engine.term:
            controller.give_way(found.place)


async def _hand_over(
    controller: Controller, hub: Hub, server: StoreServer, engine: Engine, action: HandOver
) -> None:
    """Move controller and store to another node (:mod:`launcher.handover`)."""
    opened = await controller.ask_node(action.node, OpenDoors(), HANDOVER_S)
    if not isinstance(opened, DoorsOpen):
        controller.tell(HandoverFailed(node=action.node, reason=f"no answer in {HANDOVER_S:g} s"))
        return
    hub.freeze()
    await controller.idle()
    term = engine.term + 1
    copy = engine.seal(str(Place(opened.host, opened.store_port)), term=term).dumps().decode()
    taken = controller.handing(without=action.leaver, to=action.node, copy=copy, term=term, secrets=hub.secrets)
    answer = await controller.ask_node(action.node, taken, HANDOVER_S)
    if isinstance(answer, TookOver) and answer.failure:
        engine.begin_term(term + 1)
        hub.thaw()
        controller.tell(HandoverFailed(node=action.node, reason=answer.failure))
        return
    # Without an answer the successor may serve already: a store that went on here would be a second one. This agent
    # is to leave in any case; if the successor is not there, the others bring the store back.
    await server.send_away()
    controller.left(action, confirmed=answer is not None)
    for node in taken.remotes:
        controller.post(node, Follow(host=opened.host, port=opened.port, term=term))
    await hub.emptied(FOLLOW_S)
    hub.let_go()
    controller.leave(action)
