"""How an agent becomes part of a job: alone, as the one that carries the store and the controller, or as one more.

1. Of several agents, the one that can listen at ``--rdzv-endpoint`` carries the store. It makes the job's token,
   unless it was given one, and writes where its controller is (``controller``) before anyone can ask.
2. Every other one connects to the store with the token and reads that. Where the store is one of its own (``liverun
   store``, etcd), the first agent to write ``controller`` has the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.entry import Entry
from launcher.leading import CONTROLLER_KEY, LEADER_LEASE_S, claim
from launcher.options import Meeting, RunOptions
from launcher.rundir import JobError, fresh_job_id
from launcher.store import StoreError
from launcher.store.auth import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    Token,
    TokenError,
    find_token,
    new_token,
    read_token_file,
)
from launcher.store.client import RemoteStore
from launcher.store.door import bind_one
from launcher.store.errors import ForbiddenError
from launcher.store.etcd import EtcdStore
from launcher.store.etcd_gateway import Login
from launcher.store.link import Place

ASK_EVERY_S = 0.2
ETCD_USER, ETCD_PASSWORD = "LIVERUN_ETCD_USER", "LIVERUN_ETCD_PASSWORD"
EXIT_UNREACHABLE, EXIT_NOT_ALLOWED, EXIT_USAGE = 69, 77, 2


async def enter(options: RunOptions, meeting: Meeting, uid: int) -> Entry:
    """Find the job or begin it. Raises ``JobError``."""
    place = Place(meeting.host, meeting.port)
    try:
        if meeting.tls is not None:
            meeting.tls.server()  # any node may have to be connected to, sooner or later
    except ValueError as error:
        raise JobError(str(error), EXIT_USAGE) from None
    name = options.job or options.rdzv_id or str(place)
    listener = _listen(meeting)
    token = _token(options.environ, name, uid, make=listener is not None or meeting.backend == "etcd")
    if listener is None:
        return await enter_elsewhere(options, meeting, name, token)
    host = meeting.address or meeting.host
    return Entry(
        job=options.job or _as_id(options.rdzv_id) or fresh_job_id(), host=host, token=token, name=name,
        listener=listener, door=open_door(host), term=1,
    )  # fmt: skip


async def enter_elsewhere(options: RunOptions, meeting: Meeting, name: str, token: Token) -> Entry:
    """Find the job at a store that this agent does not carry. Raises ``JobError``."""
    place = Place(meeting.host, meeting.port)
    try:
        host = meeting.address or _own_address(place)
    except OSError as error:
        raise JobError(f"--rdzv-endpoint {place}: {error.strerror or error}", EXIT_UNREACHABLE) from None
    try:
        context = meeting.tls.client() if meeting.tls is not None else None
    except ValueError as error:
        raise JobError(str(error), EXIT_USAGE) from None
    store: RemoteStore | EtcdStore
    if meeting.backend == "etcd":
        store = EtcdStore(
            [place, *(Place(*member) for member in meeting.more)], job=re.sub("[^A-Za-z0-9._-]", "_", name),
            login=_login(options.environ), ssl_context=context,
        )  # fmt: skip
    else:
        store = RemoteStore(
            [place], token, job=name, node=f"{host}:{os.getpid()}", role="agent", random=secrets.token_bytes,
            timeout_s=min(5.0, meeting.join_timeout_s), ssl_context=context,
        )  # fmt: skip
    try:
        return await _elsewhere(
            store, meeting, Entry(job="", host=host, token=token, name=name, store=store),
            own_job=options.job or _as_id(options.rdzv_id) or fresh_job_id(),
        )  # fmt: skip
    except BaseException:
        await store.aclose()
        raise


async def _elsewhere(
    store: RemoteStore | EtcdStore, meeting: Meeting, entry: Entry, *, own_job: str
) -> Entry:
    """Read who has the controller from a store elsewhere; be it where nobody is."""
    deadline = time.monotonic() + meeting.join_timeout_s
    while True:
        try:
            known = await store.get(CONTROLLER_KEY)
            if known is not None:
                found = json.loads(known.value)
                return dataclasses.replace(
                    entry, job=str(found["job"]), controller=Place(str(found["host"]), int(found["port"])),
                    term=int(found["term"]), embedded=bool(found["embedded"]),
                )  # fmt: skip
            known = await store.get("job/id")
            own_job = known.value if known is not None else own_job  # its controller was lost
            door = open_door(entry.host)
            leading = None
            try:
                value = controller_value(entry.host, door, job=own_job, term=1, embedded=False)
                leading = await claim(store, value, min(LEADER_LEASE_S, meeting.lost_after_s))
            finally:
                if leading is None:
                    door.close()
            if leading is not None:
                return dataclasses.replace(entry, job=own_job, door=door, leading=leading, term=1)
        except ForbiddenError as error:
            raise JobError(str(error), EXIT_NOT_ALLOWED) from None
        except StoreError as error:
            if time.monotonic() > deadline:
                sentence = f"{error}; gave up after {meeting.join_timeout_s:g} s (join_timeout)"
                raise JobError(sentence, EXIT_UNREACHABLE) from None
            await asyncio.sleep(ASK_EVERY_S)


def open_door(host: str) -> socket.socket:
    """Listen for other agents, at a free port. Raises ``JobError``."""
    try:
        door = bind_one(host, 0)
    except (OSError, ValueError) as error:
        sentence = f"this node cannot be reached at {host}: {error}; pass --local-addr"
        raise JobError(sentence, EXIT_UNREACHABLE) from None
    door.listen(1024)
    return door


def controller_value(host: str, door: socket.socket, *, job: str, term: int, embedded: bool = True) -> str:
    """Return what ``controller`` says; ``embedded``: the store is carried by an agent of the job."""
    values = {"host": host, "port": door.getsockname()[1], "job": job, "term": term, "embedded": embedded}
    return json.dumps(values)


def _listen(meeting: Meeting) -> socket.socket | None:
    """Take the store's address, if it is ours and free."""
    if meeting.backend != "liverun" or meeting.hosts is False:
        return None
    try:
        listener = bind_one(meeting.host, meeting.port)
        try:
            listener.listen(1024)  # at once: until then another agent of this host could bind it too
        except OSError:
            listener.close()
            raise
    except ValueError as error:
        raise JobError(str(error), EXIT_USAGE) from None
    except OSError as error:
        if meeting.hosts:
            where = Place(meeting.host, meeting.port)
            sentence = f"the store cannot listen at {where}: {error.strerror or error}"
            raise JobError(sentence, EXIT_UNREACHABLE) from None
        if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            return None
        raise JobError(f"{meeting.host}:{meeting.port}: {error.strerror or error}", EXIT_UNREACHABLE) from None
    return listener


def _token(environ: Mapping[str, str], name: str, uid: int, *, make: bool) -> Token:
    """Read the job's token; the agent that carries the store makes one if none was given. Raises ``JobError``."""
    try:
        if environ.get(TOKEN_VARIABLE) or environ.get(TOKEN_FILE_VARIABLE):
            return find_token(environ, uid=uid)
        path = token_path(environ, name)
        if make:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                new_token(secrets.token_bytes).write(path)
        elif not path.exists():
            sentence = (
                f"no token of job {name}: copy {path} from the node that carries the store to this one (mode 0600),"
                f" or set {TOKEN_FILE_VARIABLE} on every node"
            )
            raise JobError(sentence, EXIT_NOT_ALLOWED)
        return read_token_file(path, uid=uid)
    except TokenError as error:
        raise JobError(str(error), EXIT_NOT_ALLOWED) from None
    except OSError as error:
        raise JobError(f"the token of job {name}: {error}", EXIT_NOT_ALLOWED) from None


def _login(environ: Mapping[str, str]) -> Login | None:
    """Read etcd's user and password from the environment, where no argument shows them. Raises ``JobError``."""
    user, password = environ.get(ETCD_USER), environ.get(ETCD_PASSWORD)
    if (user is None) != (password is None):
        raise JobError(f"{ETCD_USER} and {ETCD_PASSWORD} go together; set both or none", EXIT_USAGE)
    return None if user is None or password is None else Login(user=user, password=password)


def token_path(environ: Mapping[str, str], name: str) -> Path:
    """Where a job's token lies if nothing else is said: in the home folder, which nodes often share."""
    home = environ.get("HOME")
    if not home:
        raise TokenError(f"no token and no HOME to look for one; set {TOKEN_FILE_VARIABLE} to the job's token file")
    return Path(home) / ".liverun" / "tokens" / re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _as_id(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:64].lstrip("._-")


def _own_address(place: Place) -> str:
    """Return the address by which this host reaches another; no packet is sent."""
    family, kind, number, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, number) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
