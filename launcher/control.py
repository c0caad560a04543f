"""What the command line and an agent say to each other, on the socket of the workers: JSON lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Control:
    """Base of these messages; ``type`` on the wire is the class name."""

    types: ClassVar[dict[str, type[Control]]] = {}

    def __init_subclass__(cls) -> None:
        Control.types[cls.__name__] = cls

    def encode(self) -> bytes:
        """One line of JSON, newline included."""
        return json.dumps({"type": type(self).__name__, **dataclasses.asdict(self)}).encode() + b"\n"

    @staticmethod
    def decode(line: bytes) -> Control:
        """Read one line. Raises ``ValueError`` for anything else."""
        try:
            values = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"request is not JSON: {error}") from None
        kind = Control.types.get(str(values.pop("type", None))) if isinstance(values, dict) else None
        if kind is None:
            raise ValueError("request has no known type")
        try:
            return kind(**values)
        except TypeError as error:
            raise ValueError(f"{kind.__name__} is malformed: {error}") from None


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
    layout: str | None
    replace: str | None
    timeout_s: float
    cause: str


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
