"""Checkpoints of a live job: copied at a boundary, written beside the training, loaded by ``join``.

On every rank alike:

1. Entering a world, a thread learns what all ranks hold, over the world's c10d store: no collective, nothing of the
   training's. From it follows what each rank writes.
2. At a boundary that is due, the training thread copies this rank's share out of the state, and goes on. This is the
   pause. If the checkpoint before is still being written, it waits for that first: there is one copy at a time.
3. A thread writes the copy (see ``resharding.checkpoint.writer``); rank 0's makes the checkpoint exist. Where
   training ends with this save it is waited for, and there is no copy: the state itself is written.

A thread ends with its process, so nothing writes on behalf of a trainer that is gone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from liverun import fence, groups, messages, rng, small_state
from liverun.prepare import Standing, stream_pieces
from liverun.reasons import in_short
from liverun.resume import Ground, load_newest
from liverun.switch import Position
from liverun.world import World
from resharding import boxes, listing, megatron
from resharding.checkpoint import folder as folders
from resharding.checkpoint import writer
from resharding.checkpoint.format import Meta
from resharding.checkpoint.fused import Fused, read_fused
from resharding.checkpoint.model import described, fused_in
from resharding.checkpoint.parts import Part

_TIMEOUT_S = 600.0
"""how long a rank may take to write its share, and to say what it holds"""

_GIVEN_UP = "its world was given up"

_LEAVE_S = 5.0
"""how long a process that ends waits for what its peers hold; they may be gone"""

Gather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the launcher was told of checkpoints, through the environment."""

    folder: Path
    every: int | None = None
    """steps between two"""
    keep_last: int | None = None
    """older ones are removed"""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Settings | None:
        """Read ``LIVERUN_CHECKPOINT_DIR``, ``…_EVERY`` and ``LIVERUN_KEEP_LAST``; none without a folder.

        Raises ``ValueError`` for what is no number above 0.
        """
        if not environ.get("LIVERUN_CHECKPOINT_DIR"):
            return None
        return cls(
            folder=Path(environ["LIVERUN_CHECKPOINT_DIR"]).absolute(),
            every=_count(environ, "LIVERUN_CHECKPOINT_EVERY"), keep_last=_count(environ, "LIVERUN_KEEP_LAST"),
        )


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text} is not a whole number of at least 1")
    return int(text)


def _learn(standing: Standing, gather: Gather, disk: str) -> Ground:
    """Exchange what all ranks of a world hold, and write to. Every rank calls this; it gathers three times."""
    rank = standing.world.rank
    streams = {name: torch.empty_like(state) for name, state in rng.capture().items()}
    (listings,) = listing.exchange(gather, rank, listing.listing_of(standing.holding))
    with fence.seen_by_this_thread(standing.globals):
        fused = {name: spec.as_json() for name, spec in fused_in(standing.training.model).items()}
    mine = {
        "nonce": folders.fresh_nonce(), "host": socket.gethostname(), "fused": fused, "disk": disk,
        "streams": {name: len(state) for name, state in streams.items()},
    }  # fmt: skip
    said = [json.loads(data) for data in gather(json.dumps(mine).encode())]
    everything = [
        listing.Listing((*listings[i].entries, (listing.Block.explicit(_stream_boxes(each["streams"], i)), 0)))
        for i, each in enumerate(said)
    ]
    hosts = tuple(each["host"] for each in said)
    whole = writer.tensors_in(everything, vocab_size=standing.training.vocab_size)
    table: dict[str, Fused] = {}
    for each in said:
        table.update({name: read_fused(spec) for name, spec in each["fused"].items()})
    return Ground(
        standing=standing, nonce=said[0]["nonce"], hosts=hosts, one_disk=len({each["disk"] for each in said}) == 1,
        listings=tuple(listings), streams=streams,
        holding=boxes.Holding.of([*standing.holding.pieces, *stream_pieces(dict(streams), rank)]),
        design=writer.design(whole, table), share=writer.share_of(rank, everything, hosts, whole),
    )  # fmt: skip


def _stream_boxes(sizes: Mapping[str, int], rank: int) -> list[boxes.Box]:
    return [boxes.Box(f"rng/{rank}/{name}", "uint8", (n,), (0,), (n,)) for name, n in sizes.items()]


def _store_gather(standing: Standing, host: str, port: int) -> Gather:
    """Return an all-gather of bytes over a world's c10d store: for a thread beside the training."""
    world = standing.world
    if world.world_size == 1:
        return lambda data: [data]
    limit = timedelta(seconds=_TIMEOUT_S)
    store = torch.distributed.PrefixStore(
        f"checkpoint/{world.generation}", groups.connect_store(host, port, timeout=limit)
    )
    turn = iter(range(2**31))

    def gather(data: bytes) -> list[bytes]:
        number = next(turn)
        store.set(f"{number}/{world.rank}", data)
        return [bytes(store.get(f"{number}/{peer}")) for peer in range(world.world_size)]

    return gather


class _Learning:
    """Finding out, in a thread, what the ranks of one world hold."""

    def __init__(self, standing: Standing, host: str, port: int, disk: str) -> None:
        self._ground: Ground | None = None
        self._trouble = "the world was left"
        self._thread = threading.Thread(
            target=self._learn, args=(standing, host, port, disk), name="liverun-checkpoint-learn", daemon=True
        )
        self._thread.start()

    def _learn(self, standing: Standing, host: str, port: int, disk: str) -> None:
        try:
            self._ground = _learn(standing, _store_gather(standing, host, port), disk)
        except (RuntimeError, ValueError, AttributeError, OSError) as error:
            # torch's store raises RuntimeErrors; a world that is left meanwhile has been emptied
            self._trouble = in_short(error)

    def known(self) -> Ground:
        """Wait for it. Raises ``RuntimeError`` if it could not be found out."""
        self._thread.join()
        if self._ground is None:
            raise RuntimeError(f"the ranks could not tell each other what they hold: {self._trouble}")
        return self._ground

    def end(self) -> None:
        """Wait a little: peers may be gone, and whoever waits for them only has to be out of torch."""
        self._thread.join(timeout=_LEAVE_S)


class Saver:
    """Saves and loads for one worker, over all the worlds it is in."""

    def __init__(self, settings: Settings, *, tell: Callable[[messages.Message], None] | None = None) -> None:
        self.settings = settings
        self._tell = tell
        self._learning: _Learning | None = None
        self._writing: threading.Thread | None = None
        self._temporary: tuple[Path, int] | None = None
        """where a checkpoint is being written, and as which rank"""
        self._is_given_up = False
        self.saved_step = -1
        """the steps done when a checkpoint was last taken or loaded, the same on all ranks of a world"""

    # --- entering a world ---

    def enter(self, standing: Standing, host: str, port: int) -> None:
        """Begin to learn what the ranks of a world hold; its c10d store listens at ``host:port``."""
        disk = folders.own_disk(self.settings.folder) or folders.fresh_nonce()
        self._learning = _Learning(standing, host, port, disk)

    def leave(self) -> None:
        """Forget the world that was left, which nothing here may keep alive."""
        self._learning = None

    def known(self) -> None:
        """Wait until a checkpoint could be taken at once."""
        self._known()

    def _known(self) -> Ground:
        assert self._learning is not None, "no world has been entered"
        return self._learning.known()

    # --- loading ---

    def load(self, device: torch.device) -> Position | None:
        """Load the newest checkpoint that is whole into the world just entered; ``None`` where there is none at all.

        Collective over the world. One that cannot be loaded is named on stderr, and the one before is taken. Raises
        ``SystemExit`` where none can be loaded, or where the folder is something else than one of checkpoints.
        """
        meta = load_newest(self._known(), self.settings.folder, device)
        if meta is None:
            return None
        self.saved_step = meta.step
        return Position(step=meta.step, consumed_samples=meta.consumed_samples)

    # --- saving ---

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be taken once ``step`` steps are done."""
        every = self.settings.every
        return every is not None and step % every == 0 and step > max(self.saved_step, 0)

    def has(self, step: int) -> bool:
        """Whether the state after ``step`` steps was the last to be taken or loaded."""
        return step == self.saved_step

    def save(self, position: Position, request: int = 0, *, is_last: bool = False) -> None:
        """Copy this rank's share out of the state, and have it written. Every rank of the world calls this.

        ``is_last``: no training follows, so nothing is copied, and it returns when the share is written; less memory,
        and sooner on disk. What goes wrong is said on stderr and to the agent; training goes on.
        """
        started = time.perf_counter()
        self.saved_step = position.step
        try:
            ground = self._known()
            self.wait()
            training = ground.standing.training
            megatron.settle(training.model)
            megatron.materialize_optimizer_state(training.optimizer)
            for name, state in rng.capture().items():
                ground.streams[name].copy_(state)
            small = {
                "step": position.step, "consumed_samples": position.consumed_samples,
                **small_state.taken(training),
                "settings": megatron.group_settings(training.optimizer), "model": described(training.model),
            }  # fmt: skip
            take = writer.live_parts if is_last else writer.snapshot
            parts = list(take(ground.share, ground.holding))
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            self._say(position.step, request, in_short(error), 0.0)
            return
        pause_s = time.perf_counter() - started
        self._writing = threading.Thread(
            target=self._write, args=(ground, position.step, parts, small),
            kwargs={"request": request, "pause_s": pause_s}, name="liverun-checkpoint-write", daemon=True,
        )  # fmt: skip
        self._writing.start()
        if is_last:
            self.wait()

    def give_up(self) -> None:
        """Hear that the world is given up: a checkpoint that waits for a share nobody will write fails now.

        Does not block; from any thread.
        """
        self._is_given_up = True  # for one whose folder is not there yet
        if self._temporary is not None:
            writer.say_failed(self._temporary[0], self._temporary[1], _GIVEN_UP)

    def end(self) -> None:
        """At the interpreter's end: nothing of ours runs any more, and what was to be written is."""
        if self._learning is not None:
            self._learning.end()
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            self._writing.join()

    def _write(
        self, ground: Ground, step: int, parts: list[Part], small: dict[str, Any], *, request: int,
        pause_s: float,
    ) -> None:
        root, rank = self.settings.folder, ground.standing.world.rank
        temporary = root / folders.temporary_name(step, ground.nonce)
        self._temporary = (temporary, rank)
        started = time.perf_counter()
        path = ""
        try:
            there = {step for step, _ in folders.complete_in(root)} if rank == 0 else set()
            writer.write_share(temporary, ground.design, rank, parts, small, one_disk=ground.one_disk)
            parts.clear()
            self._check()
            if rank == 0:
                path = str(self._commit(ground, temporary, step, there))
        except (OSError, TimeoutError, ValueError, RuntimeError) as error:
            writer.say_failed(temporary, rank, str(error))
            is_given_up = rank != 0 and not temporary.exists()  # then the error is only of a folder that is gone
            self._say(step, request, "rank 0 gave it up" if is_given_up else str(error), pause_s)
            if rank == 0:
                folders.clear_own(root, ground.nonce, step)
            return
        if rank == 0:
            self._say(step, request, "", pause_s, path=path, write_s=time.perf_counter() - started)

    def _check(self) -> None:
        if self._is_given_up:
            raise RuntimeError(_GIVEN_UP)

    def _commit(self, ground: Ground, temporary: Path, step: int, there: set[int]) -> Path:
        root, world = self.settings.folder, ground.standing.world
        path = writer.commit(
            root, temporary, ground.design, num_ranks=world.world_size, timeout_s=_TIMEOUT_S,
            meta_of=lambda said: _meta(said, world), keep_last=self.settings.keep_last, there=there,
        )  # fmt: skip
        folders.clear_own(root, ground.nonce, step)
        return path

    def _say(
        self, step: int, request: int, reason: str, pause_s: float, *, path: str = "", write_s: float = 0.0
    ) -> None:
        if reason:
            sentence = f"checkpoint of step {step} failed: {reason}; training goes on"
            print(f"liverun: {sentence}", file=sys.stderr, flush=True)
        if self._tell is not None:
            self._tell(messages.Saved(
                request=request, step=step, ok=not reason, reason=reason, path=path, pause_s=pause_s,
                write_s=write_s))


def _meta(said: Sequence[Mapping[str, Any]], world: World) -> Meta:
    """Put together what ranks said. Raises ``ValueError`` where two disagree."""
    first = said[0]
    for part in ("step", "consumed_samples", "scheduler", "extra"):
        if any(each[part] != first[part] for each in said):
            raise ValueError(f"{part} differs between ranks, so it cannot be saved: {[e[part] for e in said]!s:.500}")
    return Meta(
        step=first["step"], consumed_samples=first["consumed_samples"], scheduler=first["scheduler"],
        extra=first["extra"],
        optimizer={
            **megatron.merge_common_state([each["optimizer"] for each in said]),
            "settings": {name: fields for each in said for name, fields in each["settings"].items()},
        },
        origin={
            "layout": world.layout.as_dict(), "world_size": world.world_size, "generation": world.generation,
            "saved": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__,
            "megatron_core": _version("megatron-core"), "liverun": _version("liverun-elastic"),
            "job": os.environ.get("LIVERUN_JOB", ""), "model": first["model"],
        },
    )  # fmt: skip


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
