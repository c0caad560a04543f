"""``torchrun --rdzv-backend=liverun``: torch's own rendezvous, with its state in a job's store.

Runs in torchrun's agents, where :mod:`liverun.torch_handler` loads it; no part of liverun's own agent. That is why
this one module of the launcher imports torch.

What torch keeps there is bytes of its own making (it pickles them). They are stored and handed back as they are;
nothing here looks into them.

Keys: ``torch/rendezvous/<run id>`` is the state, and the revision at which it was written torch's fencing token;
``torch/store/<run id>/<key>`` are those of the c10d store through which torch's agents agree on ranks. All are under
a lease of the agent that wrote them last, renewed with every write, and so at each of torch's heartbeats: a run that
is over is forgotten, and its id can be used again.
"""

from __future__ import annotations

import asyncio
import atexit
import binascii
import os
from base64 import b64decode, b64encode
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from launcher.store.auth import TokenError, find_token
from launcher.store.blocking import StoreThread
from launcher.store.contract import Entry
from launcher.store.errors import CompactedError, StoreError
from launcher.store.limits import MAX_KEYS_PER_WRITE
from launcher.store.link import Place
from launcher.store.tls import client_tls

NAME = "liverun"
LEASE_S = 60
"""torch's agents write every 5 s; a run of which nothing was heard for this long is over"""
STATE_PREFIX = "torch/rendezvous/"
STORE_PREFIX = "torch/store/"
T = TypeVar("T")


class Backend(RendezvousBackend):  # type: ignore[misc]  # torch has no types here
    """Where torch's rendezvous keeps its state."""

    def __init__(self, thread: StoreThread, run_id: str) -> None:
        if not run_id:
            raise ValueError("the run id is empty; pass one with --rdzv-id")
        self._thread = thread
        self._key = STATE_PREFIX + quote(run_id, safe="")
        self._stale = store_prefix(run_id)

    @property
    def name(self) -> str:
        """Return what ``--rdzv-backend`` calls it."""
        return NAME

    def get_state(self) -> tuple[bytes, int] | None:
        """Return the state and its token. Raises torch's ``RendezvousConnectionError``, ``RendezvousStateError``."""
        return self._decoded(self._call(self._thread.store.get(self._key)))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool] | None:
        """Replace the state that ``token`` is of, or make the first one; what is there then, and whether it is ours.

        Raises torch's ``RendezvousConnectionError`` and ``RendezvousStateError``.
        """
        revision = None
        if token is None or type(token) is int:  # any other was never given by us
            text = b64encode(state).decode()
            revision = self._call(self._thread.write({self._key: token or 0}, {self._key: text}))
        if revision is not None:
            if token is None:  # a new run: an earlier one of this id may have left what its lease still holds
                self._call(self._thread.clear(self._stale))
            return state, revision, True
        found = self.get_state()
        return None if found is None else (*found, False)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._thread.call(coroutine)
        except StoreError as error:
            raise RendezvousConnectionError(f"rendezvous store: {error}") from error

    def _decoded(self, entry: Entry | None) -> tuple[bytes, int] | None:
        if entry is None:
            return None
        try:
            return b64decode(entry.value, validate=True), entry.revision
        except binascii.Error as error:
            raise RendezvousStateError(f"{self._key} does not hold what this backend writes ({error})") from error


class AgentStore(dist.Store):  # type: ignore[misc]  # torch has no types here
    """The c10d store of torch's agents, in the job's store. Raises ``DistStoreError`` if that cannot be reached."""

    def __init__(self, thread: StoreThread, run_id: str) -> None:
        super().__init__()
        self._thread = thread
        self._prefix = store_prefix(run_id)

    def set(self, key: str, value: str | bytes) -> None:
        """Write one key."""
        self._call(self._thread.write({}, {self._key(key): _text(value)}))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several keys, up to 64 at one moment."""
        pairs = [(self._key(key), _text(value)) for key, value in zip(keys, values, strict=True)]
        for first in range(0, len(pairs), MAX_KEYS_PER_WRITE):
            self._call(self._thread.write({}, dict(pairs[first : first + MAX_KEYS_PER_WRITE])))

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all of them, and return their values."""
        found = self._call(self._there([self._key(key) for key in keys], self.timeout.total_seconds()))
        return [b64decode(found[self._key(key)]) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if it is not there; the sum."""
        _, new = self._call(
            self._thread.change(self._key(key), lambda old: _text(str(int(b64decode(old or "") or b"0") + amount)))
        )
        return int(b64decode(new or ""))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, an empty one if it is not there."""
        more = b64decode(_text(value))
        self._call(self._thread.change(self._key(key), lambda old: _text(b64decode(old or "") + more)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write ``desired`` where ``expected`` is, or nothing is and nothing is expected; what is there then."""
        want = _text(expected)
        take = {want, None} if not want else {want}
        _, new = self._call(self._thread.change(self._key(key), lambda old: _text(desired) if old in take else old))
        return b64decode(want if new is None else new)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return all(self._call(self._thread.store.get(self._key(key))) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of them are there."""
        limit = self.timeout if timeout is None else timeout
        self._call(self._there([self._key(key) for key in keys], limit.total_seconds()))

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        old, _ = self._call(self._thread.change(self._key(key), lambda _: None))
        return old is not None

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return len(self._call(self._thread.store.list(self._prefix)))

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  (as a PrefixStore, in C++, looks for them)

    def has_extended_api(self) -> bool:
        """Tell torch that several keys can be read and written at once."""
        return True

    def _key(self, key: str) -> str:
        return self._prefix + quote(key, safe="/")

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._thread.call(coroutine)
        except StoreError as error:
            raise dist.DistStoreError(f"rendezvous store: {error}") from error

    async def _there(self, keys: Sequence[str], limit_s: float) -> dict[str, str]:
        """Return the values of keys, once all are there."""
        found: dict[str, str] = {}
        try:
            async with asyncio.timeout(limit_s):
                while not await self._gather(keys, found):
                    pass
        except TimeoutError:
            missing = ", ".join(sorted(set(keys) - set(found)))
            raise dist.DistStoreError(f"nobody wrote {missing} in {limit_s:g} s") from None
        return found

    async def _gather(self, keys: Sequence[str], found: dict[str, str]) -> bool:
        """Fill ``found``; false when what is to be watched was compacted, and everything is to be read again."""
        store = self._thread.store
        listing = await store.scan(self._prefix)
        found.update((entry.key, entry.value) for entry in listing.entries if entry.key in keys)
        if set(found) >= set(keys):
            return True
        try:
            async with aclosing(store.watch(self._prefix, listing.revision)) as changes:  # type: ignore[type-var]
                async for change in changes:
                    if change.key in keys and change.value is not None:
                        found[change.key] = change.value
                        if set(found) >= set(keys):
                            return True
        except CompactedError:
            return False
        return False


def store_prefix(run_id: str) -> str:
    """Under which the keys of one run lie."""
    return f"{STORE_PREFIX}{quote(run_id, safe='')}/"


def _text(value: str | bytes) -> str:
    return b64encode(value.encode() if isinstance(value, str) else value).decode()


def open_store(params: RendezvousParameters, environ: Mapping[str, str]) -> StoreThread:
    """Return the store at ``--rdzv-endpoint``. Raises ``ValueError`` with what to pass.

    ``--rdzv-conf`` has ``job`` (the store's job, if it is not the run id), ``tls_ca``, ``tls_cert``, ``tls_key``,
    ``read_timeout`` and ``lease`` (seconds). The token comes from the environment.
    """
    if not params.endpoint:
        raise ValueError("--rdzv-backend=liverun: pass --rdzv-endpoint HOST:PORT, where 'liverun store' listens")
    given = [params.config.get(name) for name in ("tls_ca", "tls_cert", "tls_key")]
    files = [Path(text) if text else None for text in given]
    try:
        token = find_token(environ, uid=os.geteuid())
        context = client_tls(*files)
    except (TokenError, OSError) as error:
        raise ValueError(f"--rdzv-backend=liverun: {error}") from None
    return StoreThread(
        Place.parse(params.endpoint), token, job=params.get("job", params.run_id), context=context,
        lease_s=params.get_as_int("lease", LEASE_S), timeout_s=params.get_as_int("read_timeout", 30),
    )  # fmt: skip


def make_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return torch's own dynamic rendezvous on a job's store. Raises ``ValueError`` with what to pass."""
    thread = open_store(params, os.environ)
    atexit.register(thread.close)
    return create_handler(AgentStore(thread, params.run_id), Backend(thread, params.run_id), params)
