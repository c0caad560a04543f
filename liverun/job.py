"""``join()``, ``Job`` and ``Step``: what a training script calls.

A worker's life, with a launcher: it connects to its agent and says Hello; it waits for a world; it trains, passing a
boundary before every step; at a boundary it may move into another world, or out of all of them, and then waits
there, as a standby, until it is given a rank again. Without a launcher (under torchrun, or alone) the world is the
one the environment describes and never changes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch

from liverun import device as devices
from liverun import fence, groups, messages, rng
from liverun.again import TOP
from liverun.changes import Choice
from liverun.checkpoint import Saver, Settings
from liverun.gate import Gate, Stopped
from liverun.late import LateState, NotWhole
from liverun.layout import Layout
from liverun.limits import Limits
from liverun.link import Link
from liverun.prepare import Build, Next, Preparation, Standing, world_of
from liverun.switch import Outcome, Position, switch
from liverun.world import Training, World
from resharding import megatron

UNWIND_TIMEOUT_S = 3.0
"""how long a thread of ours may take to come to its end before the script runs again"""

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
        self._worker: _Worker | None = None
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
        return Position(step=self.next_step, consumed_samples=self.consumed_samples)

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
                    self._saver.save(self._position())
                self._saver.wait()  # here: an interpreter that ends gives its writer no more threads
            print(f"liverun: worker {worker.name} ends: {stopped}", file=sys.stderr)
            raise SystemExit(0) from None

    def _end_without_a_world(self, worker: _Worker) -> NoReturn:
        """Nothing is left to train with: part of the state was given back for a world that did not come."""
        print(f"liverun: worker {worker.name} ends: {self._lost}", file=sys.stderr)
        raise SystemExit(1)

    def _change_world(self, worker: _Worker, generation: int) -> None:
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

    def _lose_optimizer(self, worker: _Worker, failure: NotWhole) -> NoReturn:
        self._lost = (
            f"the optimizer's state did not follow into generation {self.world.generation} ({failure}), and no step "
            f"was made without it; start again from the last checkpoint, and with --defer nothing"
        )
        self._end_without_a_world(worker)

    def _begin(self, worker: _Worker) -> None:
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

    def _wait_for_rank(self, worker: _Worker) -> None:
        """As a standby: wait until a prepared world may be entered, and enter it. Raises ``Stopped``."""
        said = worker.gate.wait_for_world()
        assert isinstance(said, int), "a worker that waits beside a running world is given no first world"
        self._enter_prepared(worker, said)

    def _enter_prepared(self, worker: _Worker, generation: int) -> None:
        prepared = worker.take(generation)
        outcome = switch(prepared, None, None, device=self._device)
        if not outcome.committed:
            worker.refuse(prepared, outcome)
            return
        self._enter(worker, prepared, outcome)
        worker.report_switched(prepared, outcome, arm_s=0.0, pause_s=0.0)

    def _enter(self, worker: _Worker, prepared: Next, outcome: Outcome) -> None:
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
            _set_environment(new.world)
            if self._saver is not None:
                self._saver.enter(new, prepared.spec.store_host, prepared.spec.store_port)
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


class _Worker:
    """The process as its agent knows it: the link, the gate, and what is being prepared."""

    def __init__(self, *, build: Build, limits: Limits, layout: Layout | None, timeout: timedelta) -> None:
        self.name = os.environ["LIVERUN_WORKER"]
        self.gate = Gate()
        self._wish = Choice.of_environment()
        self._build = build
        self._limits = limits
        self.timeout = timeout
        self._job: Job | None = None
        self._device = devices.install()
        self._preparing: Preparation | None = None
        self._background: list[threading.Thread] = []
        self._ending = False
        self._begun = False
        self._answered_step = -1
        self._link = Link(
            Path(os.environ["LIVERUN_SOCKET"]), on_message=self._receive, on_tick=self._tick, on_lost=self._lost
        )
        # NCCL ends a process whose peer is gone, and nothing gets a thread out of a kernel that waits for one
        keeps = TOP.keeps and self._device.type == "cpu"
        self._hello = messages.Hello(worker=self.name, pid=os.getpid(), layout=layout, keeps=keeps)

    def tell(self, message: messages.Message) -> None:
        """Send a message to the agent; from any thread."""
        self._link.send(message)

    def start(self, job: Job) -> None:
        """Say Hello and begin to listen."""
        self._job = job
        self._link.send(self._hello)
        self._link.start()
        atexit.register(self._end)
        if self._hello.keeps:
            TOP.enter(self)

    def begin(self) -> None:
        """Hear that the job is where it goes on from: a step said before would be one that is never reached."""
        self._begun = True
        self._send_progress()

    # --- the link thread's side ---

    def _receive(self, message: messages.Message) -> None:
        match message:
            case messages.Check():
                refusal = self._limits.refusal(message.layout, message.world_size, self._present())
                self._link.send(messages.Checked(generation=message.generation, refusal=refusal))
            case messages.Prepare():
                self._prepare(message)
            case messages.Arm():
                answer = self.gate.arm(message.generation, message.step)
                self._link.send(messages.Armed(
                    generation=message.generation, step=message.step, late=answer.late, at_step=answer.at_step))
            case messages.Go():
                if not self.gate.go(message.generation):
                    self._say_over(message.generation)
            case messages.Cancel():
                self.gate.disarm(message.generation)
            case messages.Abort():
                self.gate.disarm(message.generation)
                if self._preparing is not None and self._preparing.spec.generation == message.generation:
                    self._preparing.drop()
            case messages.Where():
                self._send_progress()
            case messages.Stop():
                self.gate.stop(message.reason, save=message.save)
            case messages.Unwind():
                self.gate.unwind(message.reason)
                self._give_up_saving()
            case messages.Leave():
                self.gate.leave()
            case messages.Again():
                self.gate.run_again(message)
            case _:
                pass

    def _prepare(self, spec: messages.Prepare) -> None:
        if self._preparing is not None:
            self._preparing.drop()
        if self._ending:
            self._say_failed(spec.generation, "the script is at its end")
            return
        if all(member.old_rank is None for member in spec.members):
            self.gate.offer_first(spec)
            return
        self._preparing = Preparation(
            spec, worker=self.name, build=self._build, present=self._present(), device=self._device, wish=self._wish,
            on_ready=self._say_ready, on_failed=self._say_failed,
        )
        self._preparing.start()

    def _say_ready(self, ready: Next) -> None:
        self._link.send(messages.Prepared(
            generation=ready.spec.generation, prepare_s=ready.prepare_s,
            bytes_moved=ready.plan.bytes_moved + ready.late_moved,
            bytes_local=ready.plan.bytes_local + ready.late_local))

    def _say_failed(self, generation: int, reason: str) -> None:
        self._link.send(messages.Failed(generation=generation, reason=reason))

    def _present(self) -> Standing | None:
        return self._job._standing if self._job is not None else None

    def _give_up_saving(self) -> None:
        if self._job is not None and self._job._saver is not None:
            self._job._saver.give_up()

    def _tick(self) -> None:
        if self._job is not None and self._job.next_step != self._answered_step:
            self._send_progress()

    def _send_progress(self) -> None:
        job, present = self._job, self._present()
        if job is None or present is None or not self._begun:
            return
        self._answered_step = job.next_step
        self._link.send(messages.Progress(
            generation=present.world.generation, step=job.next_step, report=job.last_report))

    def _lost(self) -> None:
        self.gate.stop("its agent is gone")

    # --- the top of the process, once the script has ended (liverun.again) ---

    @property
    def unwinds(self) -> bool:
        """Whether the world was given up, and the script is to run again."""
        return self.gate.unwinds

    def give_up(self) -> None:
        """Close the groups of the world, so that nobody waits for this rank; what is being prepared goes too."""
        self._ending = True
        if self._preparing is not None:
            self._preparing.drop()
        if self._job is not None:
            self._job._leave()

    def say_ended(self, code: int) -> bool:
        """Say that the script has failed, and wait; whether it is to run again."""
        self._link.send(messages.Ended(code=code))
        self.give_up()
        return self.gate.wait_for_verdict()

    def forget(self) -> None:
        """Drop everything of the script and its worlds; only the link to the agent is left."""
        self._job = self._preparing = None
        self._background.clear()
        self._build = _no_build

    def say_unwound(self) -> messages.Again | None:
        """Say that nothing of the script is left, and wait; ``None``: exit."""
        self._link.send(messages.Unwound())
        return self.gate.wait_for_again()

    def hang_up(self) -> None:
        """Close the link to the agent."""
        self._link.close()

    # --- the training thread's side ---

    def build_first(self, spec: messages.Prepare) -> Standing:
        """Build the job's first world, and wait until everybody has. Raises ``Stopped``."""
        started = time.perf_counter()
        me = next(member for member in spec.members if member.worker == self.name)
        store = groups.connect_store(spec.store_host, spec.store_port, timeout=timedelta(seconds=spec.timeout_s))
        standing = build_first(spec, me, build=self._build, device=self._device, timeout=self.timeout, store=store)
        self._link.send(messages.Prepared(generation=spec.generation, prepare_s=time.perf_counter() - started))
        while self.gate.wait_for_world() != spec.generation:
            pass
        self._link.send(messages.Switched(generation=spec.generation, ok=True))
        return standing

    def finish(self) -> None:
        """End the loop: a change of world that was to come at a later step does not."""
        generation = self.gate.finish()
        if generation is not None:
            self._say_over(generation)

    def _say_over(self, generation: int) -> None:
        if generation < 0:
            reason = "the script ended before the step of the checkpoint"
            self._link.send(messages.Saved(request=-generation, step=-1, ok=False, reason=reason))
            return
        self._link.send(messages.Switched(
            generation=generation, ok=False, reason="the script ended before the step of the change"))

    def take(self, generation: int) -> Next:
        """Hand over what was prepared for ``generation``."""
        assert self._preparing is not None
        assert self._preparing.spec.generation == generation
        prepared, self._preparing = self._preparing.take(), None
        return prepared

    def refuse(self, prepared: Next, outcome: Outcome) -> None:
        """Say that the vote was no, and give back what was prepared."""
        self._link.send(messages.Switched(
            generation=prepared.spec.generation, ok=False, reason=outcome.reason, lost=outcome.lost,
            kept=prepared.choice.keeps, verify=prepared.choice.verify))
        self._run_in_background(prepared.discard, "liverun-discard")

    def report_switched(self, prepared: Next, outcome: Outcome, *, arm_s: float, pause_s: float) -> None:
        """Tell the agent what the switch took."""
        assert outcome.position is not None
        self._link.send(messages.Switched(
            generation=prepared.spec.generation, ok=True, step=outcome.position.step, arm_s=arm_s,
            transfer_s=outcome.transfer_s, commit_s=outcome.commit_s, pause_s=pause_s,
            bytes_moved=outcome.bytes_moved + prepared.late_moved,
            bytes_local=outcome.bytes_local + prepared.late_local,
            peak_extra_bytes=outcome.peak_extra_bytes, kept=prepared.choice.keeps, verify=prepared.choice.verify,
            stream_s=outcome.stream_s, verify_s=outcome.verify_s,
            bytes_late=prepared.late_moved + prepared.late_local))

    def retire(self, old: Standing | None, prepared: Next) -> None:
        """Destroy the old world and the bridge in the background, then say Retired."""
        before = list(self._background)
        self._run_in_background(lambda: self._retire(old, prepared, before), "liverun-retire")

    def _run_in_background(self, target: Callable[[], None], name: str) -> None:
        self._background = [thread for thread in self._background if thread.is_alive()]
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._background.append(thread)
        thread.start()

    def _end(self) -> None:
        """At the interpreter's end: no thread of ours may still be inside torch, which aborts the process then."""
        self._ending = True
        self.finish()
        # gloo waits until its time-out for a peer that died while they connected; a process that is to run its script
        # again is replaced if that takes long
        patience_s = UNWIND_TIMEOUT_S if self.gate.unwinds else None
        if self._preparing is not None:
            self._preparing.drop()
            self._preparing.join(patience_s)
        for thread in self._background:
            thread.join(patience_s)
        if self._job is not None:
            self._job._leave()

    def _retire(self, old: Standing | None, prepared: Next, before: list[threading.Thread]) -> None:
        for thread in before:
            thread.join()
        if prepared.late is not None:
            prepared.late.end()  # the old state is read until then
        # nobody closes the bridge while somebody still reads its vote; a peer that is gone has nothing left to read
        with contextlib.suppress(RuntimeError):
            prepared.bridge.default_pg.barrier().wait()
        prepared.give_up_bridge()
        if old is not None:
            megatron.let_go(old.training.model)
            fence.destroy(old.globals.groups)
        generation, leaves = prepared.spec.generation, prepared.standing is None
        del old, prepared
        gc.collect()
        self._link.send(messages.Retired(generation=generation, leaves=leaves))


def _no_build(_world: World) -> Training:
    raise AssertionError("the script has ended")


def build_first(
    spec: messages.Prepare, me: messages.Member, *, build: Build, device: torch.device, timeout: timedelta,
    store: object,
) -> Standing:
    """Build a job's first world in the calling thread. ``store`` none: torch's ``env://``."""
    assert me.rank is not None
    there = fence.new_globals(spec.generation)
    groups.open_world(
        there, layout=spec.layout, device=device, timeout=timeout, store=store, rank=me.rank, size=spec.world_size
    )
    fence.activate(there)
    world = world_of(spec, me, device, rng.Seeding(at_once=True))
    _set_environment(world)
    known = fence.registered_groups()
    training = build(world)
    there.groups.extend(group for group in fence.registered_groups() if group not in known)
    holding = megatron.holding_of(training.model, training.optimizer)
    return Standing(world=world, globals=there, training=training, holding=holding)


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
        standing = _standing_of_environment(build, layout or Layout(), limits, device, timeout)
        job = Job(
            standing=standing, device=device, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size
        )
        atexit.register(job._leave)
        if settings is not None:
            job._saver = Saver(settings)
            atexit.register(job._saver.end)
            job._resume(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return job
    worker = _Worker(build=build, limits=limits, layout=layout, timeout=timeout)
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


def _standing_of_environment(
    build: Build, layout: Layout, limits: Limits, device: torch.device, timeout: timedelta
) -> Standing:
    """Build the one world of a script that runs under torchrun, or by itself."""
    for name, alone in {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(name, alone)
    size = int(os.environ["WORLD_SIZE"])
    refusal = limits.refusal(layout, size, None)
    if refusal is not None:
        raise ValueError(refusal)
    me = messages.Member(
        worker="0", host="", old_rank=None, rank=int(os.environ["RANK"]), local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]), node_rank=int(os.environ.get("GROUP_RANK", "0")),
    )
    spec = messages.Prepare(
        generation=1, layout=layout, world_size=size, members=(me,), store_host="", store_port=0,
        timeout_s=timeout.total_seconds(),
    )
    return build_first(spec, me, build=build, device=device, timeout=timeout, store=None)


def _set_environment(world: World) -> None:
    """Keep the variables that libraries read in step with the world."""
    os.environ.update(
        RANK=str(world.rank), WORLD_SIZE=str(world.world_size), LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.local_world_size), GROUP_RANK=str(world.node_rank),
    )
