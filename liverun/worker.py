"""The process as its agent knows it: what it is told, and what it says; changes of world are prepared from here."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from liverun import device as devices
from liverun import fence, first, groups, messages
from liverun.again import TOP
from liverun.changes import Choice
from liverun.gate import Gate
from liverun.layout import Layout
from liverun.limits import Limits
from liverun.link import Link
from liverun.prepare import Build, Next, Preparation, Standing
from liverun.switch import Outcome
from liverun.world import Training, World
from resharding import megatron

if TYPE_CHECKING:
    from liverun.job import Job

UNWIND_TIMEOUT_S = 3.0
"""how long a thread of ours may take to come to its end before the script runs again"""


class Worker:
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
        standing = first.build(
            spec, me, build_training=self._build, device=self._device, timeout=self.timeout, store=store
        )
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
