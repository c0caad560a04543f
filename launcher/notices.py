"""Notices: the word of a cloud, a scheduler or a person that this node will go, and by when.

Each source is asked again and again by a task of its own until it has given its notice; the clouds' are in
:mod:`launcher.metadata`. A source that does not answer is said once and asked again later; it never harms the job.
A notice comes at least once: whoever gets it acts on the first only.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CLOUDS = ("aws", "aws-rebalance", "gcp", "azure")
URL_VARIABLES = {
    "aws": "LIVERUN_AWS_METADATA_URL", "gcp": "LIVERUN_GCP_METADATA_URL", "azure": "LIVERUN_AZURE_METADATA_URL",
}  # fmt: skip
"""where a metadata service is, if not where the cloud has it"""
EXIT_PREEMPTED = 75
"""of an agent that ended after a notice: the job may be queued again"""
LEAST_S, MOST_S = 2.0, 3600.0
"""a deadline is taken to be within these"""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 10.0
"""between two questions to a source that does not answer; the shortest notice is 30 s"""
FILE_POLL_S = 0.5
MAX_FILE_BYTES = 4096
MAX_RESERVE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Notice:
    """That this node will go."""

    source: str
    reason: str
    deadline_s: float
    """from when it was heard until the node is gone"""

    @property
    def move_s(self) -> float:
        """How long moving the work away may take, such that the processes can still end in time."""
        return self.deadline_s - min(self.deadline_s / 4, MAX_RESERVE_S)


class UnheardError(Exception):
    """A source does not answer, or not as it should; one sentence."""


class Source(Protocol):
    """Something that gives notice."""

    name: str
    poll_s: float
    """between two questions"""

    async def ask(self) -> Notice | None:
        """Ask once; none if the node may stay. Raises ``UnheardError``."""

    async def aclose(self) -> None:
        """Give up what it holds open."""


def bounded_s(seconds: float) -> float:
    """Return a deadline that can be acted on, whatever was given."""
    return min(max(seconds, LEAST_S), MOST_S) if math.isfinite(seconds) else LEAST_S


def parse_notices(text: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Read ``--notices``: names of clouds, or ``none``. Raises ``ValueError``."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    strange = [word for word in words if word not in (*CLOUDS, "none")]
    if strange:
        raise ValueError(f"--notices {strange[0]!r} is none of none, {', '.join(CLOUDS)}")
    if "none" in words and len(words) > 1:
        raise ValueError(f"--notices {text}: none goes with no other")
    for variable in URL_VARIABLES.values():
        url = environ.get(variable, "http://")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{variable}={url!r} is no address of a metadata service; write it like http://HOST:PORT")
    return tuple(dict.fromkeys(word for word in words if word != "none"))


class NoticeFile:
    """A file: once it is there the node will go. Its first line may be the seconds until then."""

    name = "file"
    poll_s = FILE_POLL_S

    def __init__(self, path: Path, *, usual_s: float) -> None:
        """``usual_s``: the deadline where the file names none."""
        self._path = path
        self._usual_s = usual_s

    async def ask(self) -> Notice | None:
        """Look whether the file is there. Raises ``UnheardError`` if that cannot be seen."""
        try:
            # a pipe by that name must not hold the agent up
            number = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                head = os.read(number, MAX_FILE_BYTES)
            finally:
                os.close(number)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UnheardError(f"--notice-file {self._path} cannot be read ({error.strerror})") from None
        line = head.decode(errors="replace").partition("\n")[0].strip()
        try:
            deadline_s = bounded_s(float(line))
        except ValueError:
            deadline_s = self._usual_s
        return Notice(source=self.name, reason=f"the notice file {self._path} is there", deadline_s=deadline_s)

    async def aclose(self) -> None:
        """Nothing is held open."""


class Notices:
    """Asks the sources, each in its own task, and hands on what they give."""

    def __init__(
        self, sources: Sequence[Source], *, heard: Callable[[Notice], None], say: Callable[[str], None]
    ) -> None:
        self._sources = sources
        self._heard = heard
        self._say = say
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to ask."""
        self._tasks = [asyncio.create_task(self._listen(source)) for source in self._sources]

    async def stop(self) -> None:
        """Ask no more; no connection stays."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for source in self._sources:
            await source.aclose()

    async def _listen(self, source: Source) -> None:
        """Ask one source until it gives notice."""
        said = False
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                notice = await source.ask()
            except UnheardError as error:
                if not said:
                    self._say(f"no notices of {source.name} for now: {error}; it is asked again")
                said = True
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            backoff_s = FIRST_BACKOFF_S
            if notice is not None:
                self._heard(notice)
                return
            await asyncio.sleep(source.poll_s)
