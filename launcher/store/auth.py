"""Who may speak to a job's store: whoever holds the job's token, proved by both sides, shown by neither.

1. The server sends a fresh nonce.
2. The client answers with its claim (job, node, role, generation), a nonce of its own, and an HMAC of all of it.
3. The server checks; only then it answers with its term and an HMAC of all that, so a stranger learns nothing.
4. The client checks that. Both derive one key for each direction; every later frame carries a MAC over a counter.

So a proof cannot be replayed (fresh nonces), reflected (labels), used for another job, role or generation (they are
in it), and a frame cannot be altered, repeated, dropped or put in between. What is said can still be read by who
listens, unless TLS is on.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

TOKEN_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 16
PROTOCOL = 1
ROLES = ("agent", "controller", "observer")
"""an observer reads only"""
TOKEN_VARIABLE = "LIVERUN_TOKEN"  # noqa: S105  (a name)
TOKEN_FILE_VARIABLE = "LIVERUN_TOKEN_FILE"  # noqa: S105  (a name)


class TokenError(Exception):
    """There is no usable token; the sentence says where it was looked for and never holds any of it."""


class Token:
    """A job's secret. Shows itself to nobody: not in ``repr``, not in a copy, not in a file but its own."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != TOKEN_BYTES:
            raise TokenError(f"a token has {TOKEN_BYTES} bytes, this one {len(secret)}")
        self._secret = secret

    def __repr__(self) -> str:
        return "Token(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token is not copied")

    def mac(self, label: str, *parts: bytes) -> bytes:
        """HMAC-SHA256 of a label and parts, each with its length before it."""
        text = b"".join(len(part).to_bytes(4, "big") + part for part in (label.encode(), *parts))
        return hmac.digest(self._secret, text, "sha256")

    def write(self, path: Path) -> None:
        """Write it to a new file, mode 0600. Raises ``FileExistsError``."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as stream:
            os.fchmod(stream.fileno(), 0o600)
            stream.write(self._secret.hex().encode() + b"\n")


def new_token(random: Callable[[int], bytes]) -> Token:
    """Return a fresh token; ``random`` is ``secrets.token_bytes`` but in tests."""
    return Token(random(TOKEN_BYTES))


def read_token_file(path: Path, *, uid: int) -> Token:
    """Read a token file that only its owner (``uid`` or root) can touch. Raises ``TokenError``."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TokenError(f"token file {path}: {error.strerror}") from None
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise TokenError(f"token file {path} is no regular file")
    with os.fdopen(file, "rb") as stream:
        if found.st_uid not in (uid, 0):
            raise TokenError(f"token file {path} belongs to uid {found.st_uid}, not to {uid} or root")
        if found.st_mode & 0o077:
            raise TokenError(f"token file {path} has mode {found.st_mode & 0o777:04o}; make it 0600")
        return _from_hex(stream.read(4 * TOKEN_BYTES), f"token file {path}")


def find_token(environ: Mapping[str, str], *, uid: int) -> Token:
    """Read the token from ``LIVERUN_TOKEN`` or the file ``LIVERUN_TOKEN_FILE`` names. Raises ``TokenError``."""
    text, path = environ.get(TOKEN_VARIABLE), environ.get(TOKEN_FILE_VARIABLE)
    if text and path:
        raise TokenError(f"{TOKEN_VARIABLE} and {TOKEN_FILE_VARIABLE} are both set; keep one")
    if text:
        return _from_hex(text.encode(), TOKEN_VARIABLE)
    if path:
        return read_token_file(Path(path), uid=uid)
    raise TokenError(f"no token: set {TOKEN_FILE_VARIABLE} to the job's token file, or {TOKEN_VARIABLE}")


def _from_hex(text: bytes, where: str) -> Token:
    try:
        secret = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        raise TokenError(f"{where} does not hold {2 * TOKEN_BYTES} hexadecimal digits") from None
    if len(secret) != TOKEN_BYTES:
        raise TokenError(f"{where} holds {len(secret)} bytes; a token has {TOKEN_BYTES}")
    return Token(secret)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Everything that one proof is bound to."""

    job: str
    node: str
    role: str
    generation: int | None
    server_nonce: bytes
    client_nonce: bytes

    def parts(self) -> tuple[bytes, ...]:
        """Return the bytes that are signed."""
        generation = "" if self.generation is None else str(self.generation)
        words = (str(PROTOCOL), self.job, self.node, self.role, generation)
        return (*(word.encode() for word in words), self.server_nonce, self.client_nonce)


def client_proof(token: Token, claim: Claim) -> bytes:
    """Return what shows the server that the client holds the token."""
    return token.mac("client", *claim.parts())


def server_proof(token: Token, claim: Claim, answer: bytes) -> bytes:
    """Return what shows the client that the server does, and that ``answer`` is its own."""
    return token.mac("server", *claim.parts(), answer)


def same(left: bytes, right: bytes) -> bool:
    """Compare without telling by the time it takes where they differ."""
    return hmac.compare_digest(left, right)


class Seal:
    """Makes or checks the MAC of every frame of one direction of one connection, in order."""

    def __init__(self, token: Token, claim: Claim, direction: str) -> None:
        self._key = token.mac(f"frames {direction}", *claim.parts())
        self._count = 0

    def next(self, frame: bytes) -> bytes:
        """Return the MAC of the next frame."""
        mac = hmac.digest(self._key, self._count.to_bytes(8, "big") + frame, "sha256")[:MAC_BYTES]
        self._count += 1
        return mac

    def close(self, frame: bytes) -> bytes:
        """Return the frame with its MAC before it."""
        return self.next(frame) + frame

    def open(self, sealed: bytes) -> bytes:
        """Return what :meth:`close` was given. Raises ``ValueError`` for anything else."""
        frame = sealed[MAC_BYTES:]
        if not same(self.next(frame), sealed[:MAC_BYTES]):
            raise ValueError("a frame was altered, repeated or left out")
        return frame
