"""An agent whose controller runs on another node."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import signal
import socket
import time
from typing import Any

from launcher.agent import Agent, say
from launcher.entering import controller_value, enter_elsewhere, open_door
from launcher.entry import Entry, Promoted
from launcher.handover import load_state
from launcher.leading import CONTROLLER_KEY
from launcher.notices import Notice
from launcher.orders import (
    DoorsOpen,
    Enter,
    Finish,
    Follow,
    Gone,
    Leaving,
    OpenDoors,
    Order,
    Report,
    TakeOver,
    TookOver,
)
from launcher.rundir import JobError
from launcher.store import StoreError
from launcher.store.client import RemoteStore
from launcher.store.engine import Engine
from launcher.store.link import Identity, Place
from launcher.store.snapshot import Snapshot
from launcher.succession import Chosen, Succession
from launcher.succession import Moved as StoreMoved
from launcher.uplink import GoneError, Uplink

EXIT_UNREACHABLE = 69
LOOK_S = 0.5
GONE_PATIENCE_S = 3.0
"""how long the last word to the controller may take"""


class Member(Agent):
    """Offers its workers and does what it is told. Comes anew when it was given up, or the controller is another."""

    async def run(self) -> int | Entry | Promoted:
        """Be a node of the job until it is over for this one; the exit code, or how to go on."""
        self._set_up()
        self._node.beyond = self._beyond
        entry = self._entry
        assert entry.controller is not None
        await self._begin(f"this node offers {self._options.nproc} workers to the job at {entry.controller}")
        signals = asyncio.create_task(self._on_signals())
        door = open_door(entry.host)
        self._promoted: asyncio.Future[Promoted] = asyncio.get_running_loop().create_future()
        self._succession = await self._open_succession(door)
        try:
            end = await self._serve(self._offer(door))
            if isinstance(end, Finish):
                self._write("stopping")
                if end.outcome in ("stopped", "left"):
                    self._node.stop_standbys(end.reason)
                await self._wind_down(end.outcome)
                await self._last_word(end.reason)
        finally:
            signals.cancel()
            await asyncio.gather(signals, return_exceptions=True)
        if isinstance(end, Promoted):
            if self._succession is not None:
                assert end.entry.listener is not None
                place = Place(*end.entry.listener.getsockname()[:2])
                await self._succession.retire(StoreMoved(place, end.entry.term))
            return end
        if not isinstance(end, Finish):
            return await self._again(end)
        await self._shut(door)
        if entry.store is not None:
            await entry.store.aclose()
        code = await self._close(end, end.status)
        return EXIT_UNREACHABLE if end.outcome == "unreachable" else code

    def _offer(self, door: socket.socket) -> Enter:
        options = self._options
        assert options.meeting is not None
        return Enter(
            host=self._entry.host, nproc=options.nproc, standbys=options.standbys, pin=options.meeting.pin,
            agent=self._agent_name, peers=door.getsockname()[1] if self._succession is not None else 0,
        )  # fmt: skip

    async def _open_succession(self, door: socket.socket) -> Succession | None:
        """Keep a copy of a store that is embedded in another agent."""
        entry, meeting = self._entry, self._options.meeting
        assert meeting is not None
        if not entry.embedded or not isinstance(entry.store, RemoteStore):
            return None
        assert entry.token is not None
        succession = Succession(
            entry.store, entry.token, job=entry.name, agent=self._agent_name, horizon_s=meeting.lost_after_s,
            voters=lambda: (self._node.voters_generation, self._node.voters),
            generation=lambda: self._node.generation, tls=meeting.tls,
        )  # fmt: skip
        await succession.start(entry.host, door)
        return succession

    async def _shut(self, door: socket.socket) -> None:
        if self._succession is not None:
            await self._succession.stop()
        door.close()

    async def _serve(self, offer: Enter) -> Finish | Promoted | Chosen | StoreMoved | None:
        """Take part until told to finish; else what has become of the controller (``None``: come anew, and see)."""
        entry = self._entry
        assert entry.token is not None
        assert entry.controller is not None
        identity = Identity(
            token=entry.token, job=entry.name, node=self._agent_name, role="agent", random=secrets.token_bytes
        )
        tls = self._options.meeting.tls if self._options.meeting is not None else None
        context = tls.client() if tls is not None else None
        lost_after_s = self._options.meeting.lost_after_s if self._options.meeting is not None else 0.0
        uplink = self._uplink = Uplink(entry.controller, identity, term=entry.term, ssl_context=context)
        self._talking = asyncio.create_task(uplink.run(offer, self._entered, self._node.do))
        ended = False
        try:
            while True:
                waiting: set[asyncio.Future[Any]] = {self._talking, self._node.finish, self._promoted}
                await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if self._node.finish.done():
                    ended = True
                    return self._node.finish.result()
                if self._promoted.done():
                    ended = True  # the last report is still on its way
                    asyncio.get_running_loop().call_later(GONE_PATIENCE_S, self._talking.cancel)
                    return self._promoted.result()
                if self._talking.done():
                    return self._parted(self._talking)
                if uplink.silent_s > (uplink.lost_after_s or lost_after_s):
                    found = await self._look()
                    if not isinstance(found, str):
                        return found
                if not self._pool.alive and uplink.silent_s > self._patience_s():
                    reason = f"the controller at {entry.controller} has not been heard of for {uplink.silent_s:.0f} s"
                    return Finish(outcome="unreachable", reason=f"{reason}, and no worker is left here")
        finally:
            if not ended:
                self._talking.cancel()

    def _beyond(self, order: Order) -> None:
        """Carry out what the controller orders this agent itself to do."""
        match order:
            case OpenDoors():
                self._opened = (open_door(self._entry.host), open_door(self._entry.host))
                store, door = (listener.getsockname()[1] for listener in self._opened)
                self._uplink.report(DoorsOpen(host=self._entry.host, store_port=store, port=door))
            case TakeOver():
                self._take_over(order)
            case Follow():
                self._uplink.follow(Place(order.host, order.port), order.term)
            case _:
                raise AssertionError(order)

    def _take_over(self, order: TakeOver) -> None:
        listener, door = self._opened
        path = self._folder.path / "store.db"
        try:
            engine = Engine.restore(path, Snapshot.loads(order.copy.encode()), term=order.term, clock=time.monotonic)
            load_state(order.state, leads=self._uplink.node, now=0.0)
        except (StoreError, OSError, ValueError) as error:
            self._uplink.report(TookOver(failure=str(error)))
            return
        value = controller_value(self._entry.host, door, job=self._entry.job, term=order.term)
        engine.write({}, {CONTROLLER_KEY: value})
        unconfirmed = self._uplink.unconfirmed()
        self._uplink.report(TookOver())
        say(f"the controller and the store are on this node now, at {Place(*listener.getsockname()[:2])}")
        entry = dataclasses.replace(
            self._entry, store=None, restored=engine, listener=listener, door=door, controller=None,
            term=order.term, taken=order,
        )  # fmt: skip
        self._node.belong_to(unconfirmed.append, self._trouble)
        self._promoted.set_result(Promoted(entry=entry, node=self._uplink.node, unconfirmed=unconfirmed))

    async def _look(self) -> Chosen | StoreMoved | str | None:
        """See what has become of a controller that is silent; ``wait`` while that cannot be known."""
        if self._succession is not None:
            found = await self._succession.look()
            if found is not None or self._uplink.node:
                return found or "wait"
        assert self._entry.store is not None
        try:
            known = await self._entry.store.get(CONTROLLER_KEY)
        except StoreError:
            return "wait"
        place = self._entry.controller
        assert place is not None
        same = known is not None and f'"port": {place.port},' in known.value and place.host in known.value
        return "wait" if same else None

    def _patience_s(self) -> float:
        assert self._options.meeting is not None
        meeting = self._options.meeting
        return max(meeting.join_timeout_s, 4 * meeting.lost_after_s)

    def _parted(self, talking: asyncio.Task[None]) -> Finish | None:
        error = talking.exception()
        if isinstance(error, GoneError):
            say(f"{error}: the workers of this node are ended, and it comes anew")
            return None
        reason = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        return Finish(outcome="failed", reason=reason)

    async def _again(self, found: Chosen | StoreMoved | None) -> Entry:
        """End the workers, take this node apart, and find the controller that there is now, or be it."""
        meeting, entry = self._options.meeting, self._entry
        assert meeting is not None
        token = entry.token
        assert token is not None
        await self._take_apart()
        if isinstance(found, Chosen):
            entry = await self._bring_back(found)
        else:
            place = entry.store.places[0] if isinstance(entry.store, RemoteStore) else None
            if isinstance(found, StoreMoved):
                place = found.place
                say(f"the store is at {place} now")
            if place is not None:
                meeting = dataclasses.replace(meeting, host=place.host, port=place.port)
            entry = await enter_elsewhere(self._options, meeting, entry.name, token)
        if self._succession is not None:
            await self._succession.retire(found if isinstance(found, StoreMoved) else None)
        if self._entry.store is not None:
            await self._entry.store.aclose()
        return entry

    async def _bring_back(self, chosen: Chosen) -> Entry:
        """Begin the new term of the store here, from the copy. Raises ``JobError``."""
        assert self._succession is not None
        entry = self._entry
        path = self._folder.path / "store.db"
        try:
            engine = Engine.restore(
                path, self._succession.mirror.snapshot(), term=chosen.term, clock=time.monotonic
            )
        except (StoreError, OSError) as error:
            raise JobError(f"the store cannot be brought back here: {error}", 1) from None
        listener, door = open_door(entry.host), open_door(entry.host)
        place = Place(*listener.getsockname()[:2])
        say(f"the node with the store is lost; the store is brought back here, at {place}, as term {chosen.term}")
        value = controller_value(entry.host, door, job=entry.job, term=chosen.term)
        following = engine.get("generation/next")
        number = max(chosen.generation + 1, int(following.value) if following is not None else 1)
        engine.write({}, {CONTROLLER_KEY: value, "generation/next": str(number)})  # none is given twice
        await self._succession.announce(chosen, place)
        return dataclasses.replace(
            entry, store=None, restored=engine, listener=listener, door=door, controller=None, term=chosen.term,
            voters=chosen.voters,
        )  # fmt: skip

    async def _last_word(self, reason: str) -> None:
        """Tell the controller that nothing is left here."""
        if self._uplink.node and not self._talking.done():
            self._uplink.report(Gone(reason=reason))
            await self._uplink.confirmed(GONE_PATIENCE_S)
        self._talking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._talking, return_exceptions=True)

    def _entered(self) -> None:
        self._pool.prefix = f"{self._uplink.node}."
        say(f"this is node {self._uplink.node}")
        if self._notice is not None:
            self._noticed(self._notice)
        elif self._received:
            self._asked_to_end(self._received[0])

    def _reported(self, report: Report) -> None:
        self._uplink.report(report)

    def _trouble(self, reason: str) -> None:
        if not self._node.finish.done():
            self._node.finish.set_result(Finish(outcome="failed", reason=reason))

    def _asked_to_end(self, number: signal.Signals) -> None:
        self._leave(number.name, self._options.shutdown_timeout_s / 2, save=False)

    def _noticed(self, notice: Notice) -> None:
        self._leave(notice.reason, notice.move_s, save=True)

    def _leave(self, reason: str, timeout_s: float, *, save: bool) -> None:
        """Ask the controller to move this node's work away; end without that if it takes too long."""
        if not self._uplink.node:
            self._node.finish.set_result(Finish(outcome="stopped", reason=reason))
            return
        say(f"{reason}: this node's work moves to the others, within {timeout_s:g} s")
        self._uplink.report(Leaving(reason=reason, timeout_s=timeout_s, save=save))
        asyncio.get_running_loop().call_later(timeout_s + 1.0, self._too_late, reason)

    def _too_late(self, cause: str) -> None:
        if not self._node.finish.done():
            reason = f"{cause}, and its work could not be moved away in time"
            self._node.finish.set_result(Finish(outcome="stopped", reason=reason))
