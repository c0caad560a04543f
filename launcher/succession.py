"""When the node with the embedded store is lost: the survivors agree on one of them that brings it back.

Every agent keeps a copy of the store in memory (:mod:`launcher.store.mirror`) and answers at a port of its own:

``{"op": "silence"}``                 -> ``{"silent_s"}``: for how long it has not answered the store;
                                         or ``{"moved": {"to", "term"}}`` once it knows where the store is now
``{"op": "promise", "term", "world"}`` -> ``{"ok": true, "generation"}``: it answers no store of an earlier term any
                                         more (false: it has promised as much to another, or knows of a later world
                                         than the asker, by whose nodes it counts), and the highest generation it
                                         knows of
``{"op": "moved", "to", "term"}``     -> ``{"ok": true}``: it goes there

Who may take over is said in :mod:`launcher.store.quorum`: more than half of the nodes of the active generation, of
which the lowest that can be reached acts. A minority waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import WSMsgType, web

from launcher.store import wire
from launcher.store.auth import Claim, Seal, Token
from launcher.store.client import RemoteStore
from launcher.store.errors import StoreError
from launcher.store.guard import Guard
from launcher.store.link import Identity, Place, connect
from launcher.store.mirror import Mirror
from launcher.store.quorum import majority, successor
from launcher.store.tls import Tls

ASK_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Moved:
    """Where the store is now."""

    place: Place
    term: int


@dataclass(frozen=True)
class Chosen:
    """The agent that asked is to bring the store back."""

    term: int
    generation: int
    """the highest that any of those who promised has heard of"""
    others: tuple[Place, ...]
    """the peers that promised, to be told"""
    voters: tuple[str, ...]
    """the agents of the last world's nodes, this one and those that are lost included"""


class Succession(Guard):
    """One agent's part in it."""

    def __init__(
        self, store: RemoteStore, token: Token, *, job: str, agent: str, horizon_s: float,
        voters: Callable[[], tuple[int, Mapping[str, Any]]], generation: Callable[[], int], tls: Tls | None = None,
    ) -> None:  # fmt: skip
        """``agent``: what this one is called in the store's proofs.

        ``voters`` gives the active world's generation and nodes, each as ``{"host", "agent", "peers"}``, and
        ``generation`` the highest that was heard of here: both may be ahead of the copy, which is half a second old.
        """
        server = tls.server() if tls is not None else None
        super().__init__(token, job=job, random=secrets.token_bytes, ssl_context=server)
        self._client_ssl = tls.client() if tls is not None else None
        self.mirror = Mirror(store)
        self.moved: Moved | None = None
        self._store = store
        self._agent = agent
        self._horizon_s = horizon_s
        self._voters = voters
        self._generation = generation
        self._promised = 0
        self._open: set[web.WebSocketResponse] = set()
        self._mirroring: asyncio.Task[None] | None = None

    async def start(self, host: str, door: socket.socket) -> None:
        """Answer peers, and keep the copy."""
        await self.listen(host, listener=door)
        self._mirroring = asyncio.create_task(self.mirror.run())

    async def retire(self, moved: Moved | None) -> None:
        """Keep no copy any more; go on telling peers that were cut off where the store is."""
        self.moved = moved or self.moved
        if self._mirroring is not None:
            self._mirroring.cancel()
            await asyncio.gather(self._mirroring, return_exceptions=True)

    async def stop(self) -> None:
        """Do neither any more."""
        await self.retire(None)
        await self.close()

    # --- answering ------------------------------------------------------------------------------------------

    @property
    def connections(self) -> list[web.WebSocketResponse]:
        """See :class:`Guard`."""
        return list(self._open)

    def judge(self, claim: Claim) -> dict[str, Any]:
        """See :class:`Guard`."""
        if claim.role != "agent":
            return {"error": "forbidden", "say": "this door is for agents"}
        return {"term": self._store.term}

    async def serve(self, claim: Claim, ws: web.WebSocketResponse) -> None:
        """See :class:`Guard`."""
        incoming, outgoing = Seal(self._token, claim, "to server"), Seal(self._token, claim, "to client")
        joiner = wire.Joiner(wire.MAX_HELLO_BYTES)
        self._open.add(ws)
        try:
            async for frame in ws:
                if frame.type is not WSMsgType.BINARY:
                    raise ValueError("a frame that is not binary")
                data = joiner.add(incoming.open(frame.data))
                if data is not None:
                    for piece in wire.split(wire.dump(self._reply(wire.parse(data)))):
                        await ws.send_bytes(outgoing.close(piece))
        finally:
            self._open.discard(ws)

    def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.get("op") == "silence":
            if self.moved is not None:
                return {"moved": {"to": str(self.moved.place), "term": self.moved.term}}
            return {"silent_s": self._store.silent_s}
        term = message.get("term")
        if type(term) is not int:
            raise ValueError("a request without a term")
        if message.get("op") == "promise":
            world = message.get("world")
            if type(world) is not int:
                raise ValueError("a promise asked for no world")
            ok = world >= self._voters()[0] and self._promise(term)
            return {"ok": ok, "generation": self._generation()}
        if message.get("op") == "moved":
            if term >= self._promised:
                self.moved = Moved(Place.parse(str(message.get("to"))), term)
            return {"ok": self.moved is not None}
        raise ValueError("a request of no known kind")

    def _promise(self, term: int) -> bool:
        if term <= self._promised or self._store.silent_s < self._horizon_s:
            return False
        self._promised = term
        self._store.relocate(self._store.places[0], term=term)
        return True

    # --- asking ---------------------------------------------------------------------------------------------

    async def look(self) -> Moved | Chosen | None:
        """Ask the others once; what follows, or ``None``: wait, and look again."""
        if self.moved is not None:
            return self.moved
        world, nodes = self._voters()
        voters = {
            name: (str(node["agent"]), Place(str(node["host"]), int(node["peers"])) if node["peers"] else None)
            for name, node in nodes.items()
        }
        if not voters:
            return None
        async with aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar()) as http:
            mine = [name for name, (agent, _) in voters.items() if agent == self._agent]
            others = {name: place for name, (agent, place) in voters.items() if agent != self._agent and place}
            asked = await asyncio.gather(*(self._ask(http, place, {"op": "silence"}) for place in others.values()))
            answers = dict(zip(others, asked, strict=True))
            for answer in answers.values():
                if answer is not None and "moved" in answer:
                    return Moved(Place.parse(str(answer["moved"]["to"])), int(answer["moved"]["term"]))
            silent = {name: float(answer["silent_s"]) for name, answer in answers.items() if answer is not None}
            silent |= dict.fromkeys(mine, self._store.silent_s)
            chosen, _ = successor(voters, silent, horizon_s=self._horizon_s)
            if chosen is None or [chosen] != mine:
                return None
            return await self._stand(http, world, voters, {name: others[name] for name in silent if name in others})

    async def _stand(
        self, http: aiohttp.ClientSession, world: int, voters: dict[str, Any], others: dict[str, Place]
    ) -> Chosen | None:
        """Collect promises for a new term, by the nodes of a world."""
        term = max(self._store.term, self._promised) + 1
        if not self._promise(term):
            return None
        request = {"op": "promise", "term": term, "world": world}
        answers = await asyncio.gather(*(self._ask(http, place, request) for place in others.values()))
        said = [(place, answer) for place, answer in zip(others.values(), answers, strict=True) if answer is not None]
        promised = [(place, int(answer["generation"])) for place, answer in said if answer["ok"]]
        if len(promised) + 1 < majority(len(voters)):
            return None
        generation = max([self._generation(), *(number for _, number in promised)])
        agents = tuple(agent for agent, _ in voters.values())
        return Chosen(term, generation, tuple(place for place, _ in promised), agents)

    async def announce(self, chosen: Chosen, place: Place) -> None:
        """Tell those that promised where the store is now; the others ask."""
        self.moved = Moved(place, chosen.term)
        request = {"op": "moved", "to": str(place), "term": chosen.term}
        async with aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar()) as http:
            await asyncio.gather(*(self._ask(http, other, request) for other in chosen.others))

    async def _ask(self, http: aiohttp.ClientSession, place: Place, message: dict[str, Any]) -> dict[str, Any] | None:
        identity = Identity(
            token=self._token, job=self._job, node=self._agent, role="agent", random=secrets.token_bytes
        )
        return await _ask(http, place, identity, message, self._client_ssl)


async def _ask(
    http: aiohttp.ClientSession, place: Place, identity: Identity, message: dict[str, Any],
    context: ssl.SSLContext | None,
) -> dict[str, Any] | None:  # fmt: skip
    """Ask one peer; ``None`` if it does not answer in time."""
    with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, TimeoutError, StoreError):
        async with (
            asyncio.timeout(ASK_TIMEOUT_S),
            connect(http, place, identity, generation=None, min_term=0, context=context) as link,
        ):
            link.post(message)
            return await anext(link.__aiter__(), None)
    return None


async def ask_where(
    places: list[Place], token: Token, *, job: str, agent: str, context: ssl.SSLContext | None
) -> Moved | None:
    """Ask agents where the store is now; ``None`` if none of them knows of another place."""
    identity = Identity(token=token, job=job, node=agent, role="agent", random=secrets.token_bytes)
    async with aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar()) as http:
        asked = (_ask(http, place, identity, {"op": "silence"}, context) for place in places)
        for answer in await asyncio.gather(*asked):
            if answer is not None and "moved" in answer:
                return Moved(Place.parse(str(answer["moved"]["to"])), int(answer["moved"]["term"]))
    return None
