"""``join()``, ``Job`` and ``Step``: what a training script calls.

A worker's life, with a launcher: it connects to its agent and says Hello; it waits for a world; it trains, passing a
boundary before every step; at a boundary it may move into another world, or out of all of them, and then waits
there, as a standby, until it is given a rank again. Without a launcher (under torchrun, or alone) the world is the
one the environment describes and never changes.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

import torch

from liverun import device as devices
from liverun import fence, first, groups, messages, rng
from liverun.checkpoint import Saver, Settings
from liverun.ending import let_gloo_finish
from liverun.gate import Stopped
from liverun.late import LateState, NotWhole
from liverun.layout import Layout
from liverun.limits import Limits
from liverun.prepare import Build, Next, Standing
from liverun.switch import Outcome, Position, switch
from liverun.worker import Worker
from liverun.world import Training, World
from resharding import megatron

ChangeCallback = Callable[[World], None]


class Step:
    """One training step, between two boundaries."""

    def __init__(self, job: Job, index: int) -> None:
        self._job = job
        self.index = index
        """counted from 0 over the whole job"""
        self.world = job.world
        self.consumed_samples = job.consumed_samples
        """samples used by all steps before this one"""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches this rank runs in the step, so that the global batch stays what it is."""
        return self._job.num_microbatches

    def report(self, **values: float) -> None:
        """Say something about the step; ``liverun status`` and the log show it."""
        self._job.last_report = {name: float(value) for name, value in values.items()}


class _StepContext:
    """``with job.step() as step``: a boundary on entry; the step counts once its block ends without an error."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> Step:
        self._job._pass_boundary()
        return Step(self._job, self._job.next_step)

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._job._complete_step()


class Job:
    """A training job as one of its workers sees it. Made by ``join``."""

    def __init__(
        self, *, standing: Standing | None, device: torch.device, global_batch_size: int | None,
        micro_batch_size: int | None,
    ) -> None:
        self._standing = standing
        self._device = device
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._worker: Worker | None = None
        self._saver: Saver | None = None
        self._before_change: list[ChangeCallback] = []
        self._after_change: list[ChangeCallback] = []
        self._lost = ""
        self._late: LateState | None = None
        self._step_ended = time.perf_counter()
        self.training = Training(model=[])
        """the present world's model, optimizer and scheduler; the same object, and the same list, over all changes"""
        if standing is not None:
            self._rebind(standing.training)
        self.next_step = 0
        """the step that comes next, or runs now"""
        self.consumed_samples = 0
        """samples used by all completed steps"""
        self.last_report: dict[str, float] = {}

    @property
    def world(self) -> World:
        """The world this worker is in."""
        assert self._standing is not None, "this worker is in no world"
        return self._standing.world

    @property
    def num_microbatches(self) -> int:
        """Micro-batches a rank runs in a step: ``global_batch_size / (micro_batch_size * dp)``."""
        if self._global_batch_size is None or self._micro_batch_size is None:
            raise ValueError("pass global_batch_size and micro_batch_size to liverun.join() to use num_microbatches")
        return self._global_batch_size // (self._micro_batch_size * self.world.dp)

    def resume(self, *, step: int, consumed_samples: int) -> None:
        """Start from here rather than from 0: for a script that has loaded a checkpoint of its own."""
        self.next_step, self.consumed_samples = step, consumed_samples

    def wait_until_whole(self) -> None:
        """Return once all state of the present world is in place: with ``--defer optimizer``, some comes late.

        An optimizer's own methods wait by themselves. This is for a script that looks into its tensors. If the state
        does not come, the worker ends here with exit code 1.
        """
        if self._late is not None:
            assert self._worker is not None
            try:
                self._late.wait()
            except NotWhole as failure:
                self._lose_optimizer(self._worker, failure)
            self._late = None

    def before_change(self, callback: ChangeCallback) -> None:
        """Call ``callback(world)`` on every rank of a world at the boundary where it is about to be left."""
        self._before_change.append(callback)

    def after_change(self, callback: ChangeCallback) -> None:
        """Call ``callback(world)`` on every rank of a new world before its first step."""
        self._after_change.append(callback)

    def unfinished(self, num_steps: int) -> bool:
        """Whether fewer than ``num_steps`` steps are done."""
        self._check()
        if self.next_step < num_steps:
            return True
        self._save_if_due()
        if self._saver is not None:
            self._saver.wait()  # a script that ends now would give its writer no more threads
        self._check()
        if self._worker is not None:
            self._worker.finish()
        return False

    def step(self) -> _StepContext:
        """Return the context of the next step. Entering it is the only place where the world may change.

        A worker that is no longer needed waits inside, and ends with ``SystemExit(0)`` if the job does.
        """
        return _StepContext(self)

    def _check(self) -> None:
        """Raise ``Unwinding`` if the world was given up."""
        if self._worker is not None:
            self._worker.gate.check()

    def _complete_step(self) -> None:
        self.next_step += 1
        self.consumed_samples += self._global_batch_size or 0
        self._step_ended = time.perf_counter()

    def _position(self) -> Position:
        saved_step = -1 if self._saver is None else self._saver.saved_step
        return Position(step=self.next_step, consumed_samples=self.consumed_samples, saved_step=saved_step)

    def _save_if_due(self) -> None:
        if self._saver is not None and self._saver.is_due(self.next_step):
            self.wait_until_whole()
            self._saver.save(self._position())

    def _resume(self, host: str, port: int) -> None:
        """Load the newest checkpoint into the job's first world, if there is one. Collective over the world."""
        if self._saver is None or self._standing is None:
            return
        self._saver.enter(self._standing, host, port)
        found = self._saver.load(self._device)
        if found is not None:
            self.resume(step=found.step, consumed_samples=found.consumed_samples)

    def _pass_boundary(self) -> None:
        self._check()  # before a save: a script may have caught what a failed step has raised
        self._save_if_due()
        worker = self._worker
        if worker is None:
            return
        if self._lost:
            self._end_without_a_world(worker)
        try:
            generation = worker.gate.pass_boundary(self.next_step)
            while generation is not None and generation < 0:  # asks for a checkpoint here
                if self._saver is not None:
                    self.wait_until_whole()
                    self._saver.save(self._position(), request=-generation)
                generation = worker.gate.pass_boundary(self.next_step)
            if generation is not None:
                self._change_world(worker, generation)
        except Stopped as stopped:
            if self._saver is not None:
                if stopped.save and not self._saver.has(self.next_step):
                    self.wait_until_whole()
                    self._saver.save(self._position(), is_last=True)
                self._saver.wait()  # here: an interpreter that ends gives its writer no more threads
            print(f"liverun: worker {worker.name} ends: {stopped}", file=sys.stderr)
            raise SystemExit(0) from None

    def _end_without_a_world(self, worker: Worker) -> NoReturn:
        """Nothing is left to train with: part of the state was given back for a world that did not come."""
        print(f"liverun: worker {worker.name} ends: {self._lost}", file=sys.stderr)
        raise SystemExit(1)

    def _change_world(self, worker: Worker, generation: int) -> None:
        """Switch at this boundary; on return the worker is in a world, old or new. Raises ``Stopped``."""
        self.wait_until_whole()
        released = time.perf_counter()
        for callback in self._before_change:
            callback(self.world)
        prepared = worker.take(generation)
        outcome = switch(prepared, self._standing, self._position(), device=self._device)
        if not outcome.committed:
            worker.refuse(prepared, outcome)
            if outcome.lost:
                self._lost = (
                    f"the change to generation {generation} failed when this rank had given layers of the old world "
                    f"back ({outcome.reason}); start again from the last checkpoint, and if memory allows with "
                    f"--keep always"
                )
                self._end_without_a_world(worker)
            worker.gate.return_to(self.next_step)
            return
        self._enter(worker, prepared, outcome)
        now = time.perf_counter()
        worker.report_switched(
            prepared, outcome, arm_s=released - self._step_ended, pause_s=now - self._step_ended
        )
        while self._standing is None:
            self._wait_for_rank(worker)
        if self._after_change:
            self.wait_until_whole()  # a callback may look into the optimizer, or save it
        for callback in self._after_change:
            callback(self.world)

    def _lose_optimizer(self, worker: Worker, failure: NotWhole) -> NoReturn:
        self._lost = (
            f"the optimizer's state did not follow into generation {self.world.generation} ({failure}), and no step "
            f"was made without it; start again from the last checkpoint, and with --defer nothing"
        )
        self._end_without_a_world(worker)

    def _begin(self, worker: Worker) -> None:
        """Wait for the first rank of this worker's life. Raises ``Stopped``."""
        said = worker.gate.wait_for_world()
        if isinstance(said, messages.Prepare):
            self._standing = worker.build_first(said)
            self._rebind(self._standing.training)
            self._resume(said.store_host, said.store_port)
        else:
            self._enter_prepared(worker, said)
            while self._standing is None:
                self._wait_for_rank(worker)
        worker.begin()

    def _wait_for_rank(self, worker: Worker) -> None:
        """As a standby: wait until a prepared world may be entered, and enter it. Raises ``Stopped``."""
        said = worker.gate.wait_for_world()
        assert isinstance(said, int), "a worker that waits beside a running world is given no first world"
        self._enter_prepared(worker, said)

    def _enter_prepared(self, worker: Worker, generation: int) -> None:
        prepared = worker.take(generation)
        outcome = switch(prepared, None, None, device=self._device)
        if not outcome.committed:
            worker.refuse(prepared, outcome)
            return
        self._enter(worker, prepared, outcome)
        worker.report_switched(prepared, outcome, arm_s=0.0, pause_s=0.0)

    def _enter(self, worker: Worker, prepared: Next, outcome: Outcome) -> None:
        """Make what was prepared the present. The old world's groups and tensors go in the background."""
        assert outcome.position is not None
        old, new = self._standing, prepared.standing
        self._standing = new
        if new is not None:
            fence.activate(new.globals)
            groups.set_timeout(new.globals, worker.timeout)
            self._rebind(new.training)
            self._set_streams(prepared, new)
            self.next_step = outcome.position.step
            self.consumed_samples = outcome.position.consumed_samples
            worker.gate.return_to(self.next_step)
            first.set_environment(new.world)
            if self._saver is not None:
                self._saver.enter(new, prepared.spec.store_host, prepared.spec.store_port)
                # what the old world has saved here, a worker that joins does not save again, alone
                self._saver.saved_step = outcome.position.saved_step
        else:
            fence.activate(fence.new_globals(prepared.spec.generation))
            self._rebind(Training(model=[]))
            if self._saver is not None:
                self._saver.leave()
        if prepared.late is not None:
            self._late = prepared.late if new is not None else None
            optimizer = new.training.optimizer if new is not None else None
            prepared.late.start(optimizer, lambda failure: self._lose_optimizer(worker, failure))
        worker.retire(old, prepared)

    def _leave(self) -> None:
        """At the interpreter's end: give up the world, and let its groups end their threads.

        A thread of gloo that drops the last reference to a tensor while the interpreter is torn down ends the whole
        process with SIGABRT.
        """
        last, self._standing = self._standing, None
        if last is None:
            return
        self._rebind(Training(model=[]))
        megatron.let_go(last.training.model)
        fence.activate(fence.new_globals(last.world.generation + 1))
        fence.destroy(last.globals.groups)
        del last
        gc.collect()

    def _set_streams(self, prepared: Next, new: Standing) -> None:
        if prepared.incoming:
            rng.restore(prepared.incoming)
        elif new.world.streams.seed is not None:
            rng.seed_everything(new.world.streams.seed)
        elif new.globals.seed is not None:
            from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

            seed, options = new.globals.seed
            model_parallel_cuda_manual_seed(seed, **options)

    def _rebind(self, fresh: Training) -> None:
        """Replace what is in the handles a script may hold, and keep the handles."""
        self.training.model[:] = fresh.model
        self.training.optimizer = fresh.optimizer
        self.training.scheduler = fresh.scheduler
        self.training.extra = fresh.extra


def join(
    build: Build,
    *,
    layout: Layout | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    timeout_s: float = 600.0,
) -> Job:
    """Enter the job: wait for a rank, build the world, return the ``Job`` to train with.

    ``build(world)`` is called once for every world this worker is in; for all but the first it runs in a thread,
    beside the training, and must not run a collective over anything but the new world's groups.
    ``layout`` is the first world's, unless ``liverun --layout`` says otherwise. With both batch sizes given, the
    global batch stays constant over every change of world, and a world that cannot keep it is refused.
    ``timeout_s`` is the time-out of the world's collectives.

    With ``liverun --checkpoint-dir`` (or ``LIVERUN_CHECKPOINT_DIR``) the newest checkpoint of that folder is loaded,
    whatever layout it was saved under; ``Job.next_step`` then is not 0.

    Raises ``ValueError`` for sizes that do not fit, ``ConnectionError`` if the launcher is gone, and
    ``SystemExit(0)`` if the job ended before this worker was needed.
    """
    fence.install()
    device = devices.install()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # what is alive now is alive for good; a collection after each change need not walk all of torch and Megatron
    gc.freeze()
    timeout = timedelta(seconds=timeout_s)
    limits = Limits(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    settings = Settings.of(os.environ)
    if "LIVERUN_SOCKET" not in os.environ:
        standing = first.of_environment(build, layout or Layout(), limits, device, timeout)
        job = Job(
            standing=standing, device=device, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size
        )
        atexit.register(let_gloo_finish)
        atexit.register(job._leave)
        if settings is not None:
            job._saver = Saver(settings)
            atexit.register(job._saver.end)
            job._resume(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return job
    worker = Worker(build=build, limits=limits, layout=layout, timeout=timeout)
    job = Job(standing=None, device=device, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    job._worker = worker
    worker.start(job)
    if settings is not None:
        job._saver = Saver(settings, tell=worker.tell)
        atexit.register(job._saver.end)
    try:
        job._begin(worker)
    except Stopped as stopped:
        print(f"liverun: worker {worker.name} ends: {stopped}", file=sys.stderr)
        raise SystemExit(0) from None
    return job
