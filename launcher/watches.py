"""What torchrun's environment asks an agent to watch over besides the ends of its workers.

``TORCHELASTIC_ENABLE_FILE_TIMER=1``
    torch's file timers, see :mod:`launcher.timers`; their pipe is ``TORCHELASTIC_TIMER_FILE``, or in the run folder
``TORCHELASTIC_HEALTH_CHECK_PORT``
    answers ``GET /`` with 200 as long as the agent's loop turns; 0 takes a free port
``TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT``
    seconds after which a worker in state D fails the job

And the notices that options ask for (:mod:`launcher.notices`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.notices import Notice, NoticeFile, Notices, Source
from launcher.options import RunOptions
from launcher.pool import Pool
from launcher.process import describe_os_error
from launcher.timers import FileTimers
from launcher.wedged import Wedged

if TYPE_CHECKING:
    from aiohttp import web

ENABLE_TIMERS = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
HEALTH_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
WEDGED_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


def with_timer_file(options: RunOptions, folder: Path) -> RunOptions:
    """Name the timers' pipe in the environment that workers get, if there are to be timers."""
    if options.environ.get(ENABLE_TIMERS) != "1" or options.environ.get(TIMER_FILE):
        return options
    return dataclasses.replace(options, environ={**options.environ, TIMER_FILE: str(folder / "timers")})


class Watches:
    """Runs what is asked for. What cannot be run is said, and the job goes on without it, as torchrun does."""

    def __init__(
        self, options: RunOptions, *, pool: Pool, say: Callable[[str], None], fail: Callable[[str], None],
        noticed: Callable[[Notice], None],
    ) -> None:  # fmt: skip
        self._options = options
        self._noticed = noticed
        self._notices: Notices | None = None
        self._pool = pool
        self._say = say
        self.fail = fail
        self._timers: FileTimers | None = None
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start what the environment and the options ask for."""
        self._listen()
        environ = self._options.environ
        if environ.get(ENABLE_TIMERS) == "1":
            timers = FileTimers(Path(environ[TIMER_FILE]), worker_of=self._worker_of, say=self._say)
            try:
                timers.start()
                self._timers = timers
            except OSError as error:
                self._say(f"{TIMER_FILE}: no timers are served ({describe_os_error(error)})")
        if environ.get(HEALTH_PORT):
            await self._serve_health(environ[HEALTH_PORT])
        limit_s = self._wedged_limit_s(environ)
        if limit_s > 0:
            self._task = asyncio.create_task(self._look(Wedged(limit_s, clock=time.monotonic), limit_s))

    async def stop(self) -> None:
        """End all of it: no pipe and no port stays."""
        if self._notices is not None:
            await self._notices.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._timers is not None:
            await self._timers.stop()
        if self._runner is not None:
            await self._runner.cleanup()

    def _listen(self) -> None:
        """Listen for notices, where any are asked for."""
        options = self._options
        sources: list[Source] = []
        if options.notices:
            from launcher.metadata import cloud_sources

            sources += cloud_sources(options.notices, options.environ, self._say)
        if options.notice_file is not None:
            sources.append(NoticeFile(options.notice_file, usual_s=options.shutdown_timeout_s))
        if sources:
            self._notices = Notices(sources, heard=self._noticed, say=self._say)
            self._notices.start()

    def _worker_of(self, pid: int) -> str | None:
        """Return the worker that a process is, or that has started it."""
        try:
            session = os.getsid(pid)
        except ProcessLookupError:
            return None
        return next((name for name, process in self._pool.alive.items() if process.pid in (pid, session)), None)

    # --- health -------------------------------------------------------------------------------------------

    async def _serve_health(self, text: str) -> None:
        if not text.isdecimal() or int(text) > 65535:
            self._say(f"{HEALTH_PORT}={text!r} is no port; no health check is served")
            return
        from aiohttp import web

        async def answer(_: web.Request) -> web.Response:
            return web.json_response({"alive": True, "workers": len(self._pool.alive)})

        app = web.Application()
        app.add_routes([web.get("/", answer), web.get("/healthz", answer)])
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._options.host, int(text)).start()
        except OSError as error:
            await runner.cleanup()
            where = f"{self._options.host}:{text}"
            self._say(f"{HEALTH_PORT}: no health check at {where} ({os.strerror(error.errno or 0)})")
            return
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self._say(f"health check at http://{f'[{host}]' if ':' in host else host}:{port}/")

    # --- uninterruptible sleep ----------------------------------------------------------------------------

    def _wedged_limit_s(self, environ: Mapping[str, str]) -> float:
        text = environ.get(WEDGED_TIMEOUT, "")
        try:
            limit_s = float(text or 0)
        except ValueError:
            limit_s = math.nan
        if not math.isfinite(limit_s):
            self._say(f"{WEDGED_TIMEOUT}={text!r} is not a number of seconds, and is ignored")
            return 0.0
        return limit_s

    async def _look(self, wedged: Wedged, limit_s: float) -> None:
        while True:
            found = wedged.look({name: process.pid for name, process in self._pool.alive.items()})
            if found is not None:
                worker, stuck_s = found
                pid = self._pool.alive[worker].pid
                # no restart: what holds it, a device say, would hold its successor too
                self.fail(
                    f"worker {worker} (pid {pid}) has been in uninterruptible sleep for {stuck_s:.1f} s"
                    f" ({WEDGED_TIMEOUT} is {limit_s:g}); not restarted, since what it waits for may still be held"
                )
                return
            await asyncio.sleep(self._options.monitor_interval_s)

