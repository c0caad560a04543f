"""Dataclasses as lines of JSON, each field checked against its type when it comes in."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any, ClassVar, Self

from liverun.messages import check_fields


class Coded:
    """Base of a family of messages; ``type`` on the wire is the class name.

    A direct subclass begins a family; :meth:`decode` of it reads every dataclass derived from it.
    """

    family: ClassVar[dict[str, type[Coded]]]

    def __init_subclass__(cls) -> None:
        if Coded in cls.__bases__:
            cls.family = {}
        else:
            cls.family[cls.__name__] = cls

    def values(self) -> dict[str, Any]:
        """Return what goes over the wire."""
        return {"type": type(self).__name__, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    def encode(self) -> bytes:
        """One line of JSON, newline included."""
        return json.dumps(self.values()).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """Read one line. Raises ``ValueError`` for anything else."""
        try:
            values = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"request is not JSON: {error}") from None
        return cls.read(values)

    @classmethod
    def read(cls, values: Any) -> Self:
        """Read what :meth:`values` wrote. Raises ``ValueError`` for anything else."""
        kind = cls.family.get(str(values.get("type"))) if isinstance(values, dict) else None
        if kind is None:
            raise ValueError("request has no known type")
        fields = {name: value for name, value in values.items() if name != "type"}
        try:
            check_fields(kind, fields)
            return typing.cast("Self", kind(**fields))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{kind.__name__} is malformed: {error}") from None
