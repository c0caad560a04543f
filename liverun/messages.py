"""Messages between an agent and its workers: one JSON object a line over the node's unix socket.

The worker connects to ``LIVERUN_SOCKET`` when the script calls ``liverun.join()`` and sends ``Hello``.
From then on, for each generation ``g`` (every message but Hello, Where, Progress and Stop carries it; a message
of an older generation is ignored by both sides):

1. agent ``Check(g)``      -> one worker of the present world answers ``Checked(g)``: a refusal, or none.
2. agent ``Prepare(g)``    -> every member (stays, joins, leaves) builds beside the training and answers
                              ``Prepared(g)``, or ``Failed(g)`` with the reason.
3. agent ``Arm(g, s)``     -> every member of the present world answers ``Armed(g, s)``: late or not.
4. agent ``Go(g, s)``      -> every member moves its state at the boundary before step ``s``, votes, and answers
                              ``Switched(g)``. ``Cancel(g, s)`` undoes an Arm; another Arm may follow.
5. each member says ``Retired(g)`` once nothing of the world before ``g`` is left in its process.

``Arm``, ``Go`` and ``Cancel`` with the negative generation ``-r`` ask for a checkpoint at a boundary, for request
``r``; then ``Saved`` follows in place of ``Switched``, once it is written.

``Abort(g)`` drops what was prepared, at any time before Go. The first world has no world before it: it is
prepared as any other, has no Check and no Arm, and its Go carries ``step=None``. (After a restart with another number
of workers than before, its rank 0 is asked Check too.)

A restart that keeps processes (see :mod:`liverun.again`):

1. worker ``Ended``  -> its script has failed; the process waits for ``Unwind``, or for ``Leave``: then it exits.
2. agent ``Unwind``  -> the worker gives its world up, lets its script come to an end, and answers ``Unwound``.
3. agent ``Again``   -> the process closes this connection and runs the script once more, as another worker.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from liverun.layout import Layout

PROTOCOL_VERSION = 1
MAX_LINE_BYTES = 4 * 1024 * 1024
"""A longer line is refused by both sides."""
Kind = typing.TypeVar("Kind")


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of every message; ``type`` on the wire is the class name."""

    types: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        Message.types[cls.__name__] = cls

    def encode(self) -> bytes:
        """One line of JSON, newline included."""
        return json.dumps({"type": type(self).__name__, **dataclasses.asdict(self)}).encode() + b"\n"

    @staticmethod
    def decode(line: bytes) -> Message:
        """Read one line. Raises ``ValueError`` for anything that is not a message of this protocol."""
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"message of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}")
        try:
            values = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"message is not JSON: {error}") from None
        kind = Message.types.get(str(values.pop("type", None))) if isinstance(values, dict) else None
        if kind is None:
            raise ValueError("message has no known type")
        try:
            if values.get("layout") is not None:
                values["layout"] = Layout(**values["layout"])
            if isinstance(values.get("members"), list):
                values["members"] = tuple(_checked(Member, member) for member in values["members"])
            return _checked(kind, values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{kind.__name__} message is malformed: {error}") from None


@functools.cache
def field_types(kind: type) -> Mapping[str, Any]:
    """Return the type of each field of a dataclass."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def check_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Accept values for fields of ``kind``. Raises ``ValueError`` for one of another type than its field's."""
    hints = field_types(kind)
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            raise ValueError(f"{name} is {type(value).__name__}, or holds what it should not")


def fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value can stand for a field: plain types, unions of them, containers and what is in them."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if hint is Any:
        return True
    if hint is float:
        return type(value) in (int, float)
    if hint in (int, str, bool):
        return type(value) is hint
    if hint is type(None):
        return value is None
    if dataclasses.is_dataclass(hint):
        return type(value) is hint
    if issubclass(origin or hint, Mapping):
        return isinstance(value, dict) and (
            not parts or all(fits(key, parts[0]) and fits(part, parts[1]) for key, part in value.items())
        )
    return isinstance(value, list | tuple) and (not parts or all(fits(part, parts[0]) for part in value))


def _checked(kind: type[Kind], values: Any) -> Kind:
    if not isinstance(values, dict):
        raise TypeError(f"{type(values).__name__} in the place of a {kind.__name__}")
    check_fields(kind, values)
    return kind(**values)


# --- worker to agent ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """The script has reached ``join()``: this worker is initialised and waits for a rank."""

    worker: str
    """``LIVERUN_WORKER``, the id the agent gave this process"""
    pid: int
    layout: Layout | None
    """what the script passed to join(); counts for the first world unless the launcher was told one"""
    protocol: int = PROTOCOL_VERSION
    keeps: bool = False
    """the process can run the script again: it will follow Unwind"""


@dataclass(frozen=True, kw_only=True)
class Progress(Message):
    """Where the loop is: sent about once a second while steps pass, and in answer to Where."""

    generation: int
    step: int
    """the step the worker is in, or will run next"""
    report: dict[str, float] = field(default_factory=dict)
    """what the script last gave to step.report()"""


@dataclass(frozen=True, kw_only=True)
class Checked(Message):
    """Whether the model can be laid out as asked."""

    generation: int
    refusal: str | None
    """one sentence, or none"""


@dataclass(frozen=True, kw_only=True)
class Prepared(Message):
    """Groups are built, the new model stands hollow, the plan is made."""

    generation: int
    prepare_s: float
    bytes_moved: int = 0
    """bytes this rank will receive over the wire"""
    bytes_local: int = 0
    """bytes this rank will copy from what it already holds"""


@dataclass(frozen=True, kw_only=True)
class Failed(Message):
    """Preparation of a generation failed in this worker; the present world is untouched."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Armed(Message):
    """Answer to Arm: unless late, the worker will not pass the boundary before ``step`` without a word."""

    generation: int
    step: int
    late: bool
    at_step: int
    """the step the worker is in, or will run next"""


@dataclass(frozen=True, kw_only=True)
class Switched(Message):
    """The vote has been taken. ``ok`` false: the worker is back in the old world, same step, unless ``lost``."""

    generation: int
    ok: bool
    reason: str = ""
    step: int = 0
    """first step of the new world"""
    arm_s: float = 0.0
    """time waited at the boundary for GO"""
    transfer_s: float = 0.0
    commit_s: float = 0.0
    pause_s: float = 0.0
    """end of the last step in the old world to the first step of the new one"""
    bytes_moved: int = 0
    bytes_local: int = 0
    peak_extra_bytes: int = 0
    """growth of the process's resident high-water mark during the switch, and what preparing for it had taken"""
    kept: bool = True
    """the old world's state was kept until the commit"""
    lost: bool = False
    """part of the old world's state is gone: the worker cannot go back, and ends"""
    bytes_late: int = 0
    """of both, what moves after the commit"""
    verify: str = ""
    """how much was compared: full, sample or off"""
    stream_s: float = 0.0
    """the part of ``transfer_s`` in which boxes moved"""
    verify_s: float = 0.0
    """the part of ``stream_s`` that went into comparing"""


@dataclass(frozen=True, kw_only=True)
class Retired(Message):
    """Nothing of the world before ``generation`` is left in this process."""

    generation: int
    leaves: bool = False
    """the worker has no rank in ``generation`` and is a standby again"""


@dataclass(frozen=True, kw_only=True)
class Saved(Message):
    """A checkpoint has been written, or could not be: from rank 0, and from any rank that failed."""

    step: int
    ok: bool
    request: int = 0
    """which request asked for it; 0 for one that was due"""
    reason: str = ""
    path: str = ""
    pause_s: float = 0.0
    """how long training stood still on this rank"""
    write_s: float = 0.0
    """how long writing took, beside the training"""


@dataclass(frozen=True, kw_only=True)
class Ended(Message):
    """The script has failed. The process waits for Unwind or Leave; its world's groups are closed."""

    code: int
    """what it will exit with"""


@dataclass(frozen=True, kw_only=True)
class Unwound(Message):
    """Nothing of the script runs any more, and nothing of its world is left; the process waits for Again."""


# --- agent to worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Member:
    """One worker that takes part in a change of world."""

    worker: str
    host: str
    """address of its node, for placing bytes: same node before other nodes"""
    old_rank: int | None
    rank: int | None
    """rank in the new world; none for a worker that leaves"""
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Check(Message):
    """Asks whether the model can be laid out like this over so many workers."""

    generation: int
    layout: Layout
    world_size: int


@dataclass(frozen=True, kw_only=True)
class Prepare(Message):
    """Build the world of a generation beside the present one."""

    generation: int
    layout: Layout
    world_size: int
    members: tuple[Member, ...]
    """everyone who takes part, workers that leave included; the order is the same for all"""
    store_host: str
    store_port: int
    """the c10d store of this generation"""
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Arm(Message):
    """Do not pass the boundary before ``step`` until told Go or Cancel."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Go(Message):
    """Switch at the boundary before ``step``; ``None`` for the first world."""

    generation: int
    step: int | None


@dataclass(frozen=True, kw_only=True)
class Cancel(Message):
    """Forget the Arm for ``step``; what was prepared stays."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Abort(Message):
    """Drop everything prepared for ``generation``."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Where(Message):
    """Asks for a Progress at once."""


@dataclass(frozen=True, kw_only=True)
class Stop(Message):
    """End: a standby exits 0 at once, a ranked worker at its next boundary."""

    reason: str
    save: bool = False
    """take a checkpoint there first: every rank waits at the same boundary"""


@dataclass(frozen=True, kw_only=True)
class Unwind(Message):
    """The world is given up: end the script, and wait."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Leave(Message):
    """Exit, with the exit code of the script that has ended."""


@dataclass(frozen=True, kw_only=True)
class Again(Message):
    """Run the script once more in this process, as another worker."""

    worker: str
    argv: list[str]
    env: dict[str, str]
    """the whole environment"""
    cwd: str
    stdout: str
    """path of the file that standard output is appended to"""
    stderr: str
