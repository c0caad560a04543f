"""What the command line and an agent say to each other, on the socket of the workers: JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.codec import Coded


class Control(Coded):
    """Base of these messages."""


@dataclass(frozen=True, kw_only=True)
class StatusRequest(Control):
    """Asks for the status object."""


@dataclass(frozen=True, kw_only=True)
class StatusReply(Control):
    """The status object."""

    status: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ResizeRequest(Control):
    """Asks for another world; answered by Notes, then one Outcome."""

    workers: int | None
    nodes: int | None
    layout: str | None
    replace: str | None
    timeout_s: float
    cause: str


@dataclass(frozen=True, kw_only=True)
class DrainRequest(Control):
    """Asks to free a node and let it go; answered by Notes, then one Outcome."""

    node: str
    """its id, or its address"""
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class SaveRequest(Control):
    """Asks for a checkpoint; answered by one Outcome once it exists."""

    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class StopRequest(Control):
    """Asks for a clean end; answered by an Outcome when it has begun.

    The connection closes when all is over.
    """


@dataclass(frozen=True, kw_only=True)
class Note(Control):
    """An event on the way to the Outcome, as it is in ``events.jsonl``."""

    event: dict[str, Any]
    elapsed_s: float
    """since the request"""


@dataclass(frozen=True, kw_only=True)
class Outcome(Control):
    """The final word."""

    ok: bool
    outcome: str
    reason: str
    fields: Mapping[str, Any] = field(default_factory=dict)
