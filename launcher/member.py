"""An agent whose controller runs on another node."""

from __future__ import annotations

import asyncio
import secrets
import signal
from typing import Any

from launcher.agent import Agent, say
from launcher.orders import Enter, Finish, Gone, Leaving, Report
from launcher.store import StoreError
from launcher.store.link import Identity
from launcher.uplink import GoneError, Uplink

EXIT_UNREACHABLE = 69
LOOK_S = 0.5
GONE_PATIENCE_S = 3.0
"""how long the last word to the controller may take"""


class Member(Agent):
    """Offers its workers, does what it is told, and comes anew when it was given up."""

    async def run(self) -> int:
        """Be a node of the job until it is over for this one; the exit code."""
        self._set_up()
        options, entry = self._options, self._entry
        assert entry.token is not None
        assert entry.controller is not None
        assert options.meeting is not None
        await self._begin(f"this node offers {options.nproc} workers to the job at {entry.controller}")
        signals = asyncio.create_task(self._on_signals())
        identity = Identity(
            token=entry.token, job=entry.name, node=f"{entry.host}:{self._record.pid}", role="agent",
            random=secrets.token_bytes,
        )  # fmt: skip
        offer = Enter(host=entry.host, nproc=options.nproc, standbys=options.standbys, pin=options.meeting.pin)
        self._deadline: asyncio.TimerHandle | None = None
        while True:
            self._uplink = Uplink(entry.controller, identity, term=entry.term)
            end = await self._serve(offer)
            if end is not None:
                break
        self._write("stopping")
        if end.outcome in ("stopped", "left"):
            self._node.stop_standbys(end.reason)
        await self._wind_down(end.outcome)
        await self._last_word(end.reason)
        signals.cancel()
        await asyncio.gather(signals, return_exceptions=True)
        if entry.store is not None:
            await entry.store.aclose()
        code = await self._close(end, end.status)
        return EXIT_UNREACHABLE if end.outcome == "unreachable" else code

    async def _serve(self, offer: Enter) -> Finish | None:
        """Take part until told to finish; ``None`` after this node was given up and has to come anew."""
        uplink = self._uplink
        self._talking = asyncio.create_task(uplink.run(offer, self._entered, self._node.do))
        try:
            while True:
                waiting: set[asyncio.Future[Any]] = {self._talking, self._node.finish}
                await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if self._node.finish.done():
                    return self._node.finish.result()
                if self._talking.done():
                    return await self._parted(self._talking)
                if not self._pool.alive and uplink.silent_s > self._patience_s():
                    place = self._entry.controller
                    reason = f"the controller at {place} has not been heard of for {uplink.silent_s:.0f} s"
                    return Finish(outcome="unreachable", reason=f"{reason}, and no worker is left here")
        finally:
            if not self._node.finish.done():
                self._talking.cancel()

    def _patience_s(self) -> float:
        assert self._options.meeting is not None
        return self._uplink.lost_after_s * 2 if self._uplink.node else self._options.meeting.join_timeout_s

    async def _parted(self, talking: asyncio.Task[None]) -> Finish | None:
        error = talking.exception()
        if isinstance(error, GoneError):
            say(f"{error}: the workers of this node are ended, and it comes anew")
            for worker in list(self._pool.alive):
                self._pool.kill(worker)
            await self._pool.empty(10.0)
            return None
        reason = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        return Finish(outcome="failed", reason=reason)

    async def _last_word(self, reason: str) -> None:
        """Tell the controller that nothing is left here."""
        if self._uplink.node and not self._talking.done():
            self._uplink.report(Gone(reason=reason))
            await self._uplink.confirmed(GONE_PATIENCE_S)
        self._talking.cancel()
        await asyncio.gather(self._talking, return_exceptions=True)

    def _entered(self) -> None:
        self._pool.prefix = f"{self._uplink.node}."
        say(f"this is node {self._uplink.node}")
        if self._received:
            self._asked_to_end(self._received[0])

    def _reported(self, report: Report) -> None:
        self._uplink.report(report)

    def _trouble(self, reason: str) -> None:
        if not self._node.finish.done():
            self._node.finish.set_result(Finish(outcome="failed", reason=reason))

    def _asked_to_end(self, number: signal.Signals) -> None:
        grace_s = self._options.shutdown_timeout_s
        if not self._uplink.node:
            self._node.finish.set_result(Finish(outcome="stopped", reason=number.name))
            return
        say(f"{number.name}: this node's work moves to the others, within {grace_s / 2:g} s")
        self._uplink.report(Leaving(reason=number.name, timeout_s=grace_s / 2))
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(grace_s / 2 + 1.0, self._too_late, number)

    def _too_late(self, number: signal.Signals) -> None:
        if not self._node.finish.done():
            reason = f"{number.name}, and its work could not be moved away in time"
            self._node.finish.set_result(Finish(outcome="stopped", reason=reason))

