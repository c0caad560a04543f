"""The gate at a boundary: where the training thread meets what the agent has said.

The agent's words arrive in the link thread, the training thread passes a boundary before every step. All they share
is here, under one lock. While nothing is armed, passing costs one uncontended lock and three comparisons.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from liverun.messages import Again, Prepare


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an Arm is answered with."""

    late: bool
    at_step: int


class Stopped(Exception):  # noqa: N818 - not an error: the agent asked for the end
    """The agent asked this worker to end. Carries its reason."""

    def __init__(self, reason: str, *, save: bool = False) -> None:
        super().__init__(reason)
        self.save = save
        """a checkpoint is to be taken first"""


class Unwinding(BaseException):  # like KeyboardInterrupt: nothing of a script's should catch it
    """The world is given up, and the script is to end; the process will run it again. Carries the reason."""


class Gate:
    """Arm, Go, Cancel, Abort, Stop and Unwind on one side; boundaries on the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reached = -1
        self._finished = False
        self._armed: tuple[int, int] | None = None
        self._go: int | None = None
        self._first: Prepare | None = None
        self._stop: Stopped | None = None
        self._unwind: str | None = None
        self._leave = False
        self._again: Again | None = None

    @property
    def reached(self) -> int:
        """The last boundary that was passed, as the step behind it; -1 before the first."""
        return self._reached

    # --- the link thread's side ---

    def arm(self, generation: int, step: int) -> Answer:
        """Hold the training thread before ``step``, unless it is past it."""
        with self._changed:
            if self._finished or self._reached >= step:
                return Answer(late=True, at_step=self._reached)
            self._armed = (generation, step)
            return Answer(late=False, at_step=self._reached)

    def go(self, generation: int) -> bool:
        """Let the world of ``generation`` be entered at the armed step; false if the loop has ended before it."""
        with self._changed:
            if self._finished:
                return False
            self._go = generation
            self._changed.notify_all()
            return True

    def disarm(self, generation: int) -> None:
        """Cancel or abort: the training thread goes on in the world it is in."""
        with self._changed:
            if self._armed is not None and self._armed[0] == generation:
                self._armed = None
            if self._go == generation:
                self._go = None
            self._changed.notify_all()

    def offer_first(self, spec: Prepare) -> None:
        """Give the waiting script its first world to build."""
        with self._changed:
            self._first = spec
            self._changed.notify_all()

    def stop(self, reason: str, *, save: bool = False) -> None:
        """End the worker at its next boundary, or now if it waits. ``save``: all ranks wait, and save there."""
        with self._changed:
            self._stop = Stopped(reason, save=save)
            self._changed.notify_all()

    def unwind(self, reason: str) -> None:
        """End the script at its next boundary, or now if it waits."""
        with self._changed:
            self._unwind = reason
            self._changed.notify_all()

    def leave(self) -> None:
        """Let a process whose script has ended exit."""
        with self._changed:
            self._leave = True
            self._changed.notify_all()

    def run_again(self, task: Again) -> None:
        """Let a process whose script was unwound run it once more."""
        with self._changed:
            self._again = task
            self._changed.notify_all()

    # --- the training thread's side ---

    @property
    def unwinds(self) -> bool:
        """Whether the world was given up."""
        return self._unwind is not None

    def check(self) -> None:
        """Raise ``Unwinding`` if the world was given up, as often as it is called."""
        if self._unwind is not None:
            raise Unwinding(self._unwind)

    def wait_for_verdict(self) -> bool:
        """After the script has failed: wait to be told what follows. True: unwind; false: exit."""
        with self._changed:
            self._changed.wait_for(lambda: self._unwind is not None or self._leave or self._stop is not None)
            return self._unwind is not None

    def wait_for_again(self) -> Again | None:
        """After the script was unwound: wait for the next task; ``None``: exit."""
        with self._changed:
            self._changed.wait_for(lambda: self._again is not None or self._leave or self._stop is not None)
            return self._again

    def pass_boundary(self, step: int) -> int | None:
        """Pass the boundary before ``step``; return the generation to switch to, or ``None`` to go on.

        Blocks only where armed for exactly this step. Raises ``Stopped`` or ``Unwinding``.
        """
        with self._changed:
            if self._armed is None and self._stop is None and self._unwind is None:
                self._reached = step
                return None
            while True:
                self.check()
                if self._stop is not None:
                    raise self._stop
                if self._armed is None or self._armed[1] != step:
                    self._reached = step
                    return None
                if self._go == self._armed[0]:
                    return self._take_go()
                self._changed.wait()

    def return_to(self, step: int) -> None:
        """After a switch that failed: the boundary before ``step`` is passed in the old world."""
        with self._changed:
            self._reached = step

    def wait_for_world(self) -> Prepare | int:
        """For a worker without a rank: wait for its first world to build, or for Go to enter a prepared one.

        Raises ``Stopped`` or ``Unwinding``.
        """
        with self._changed:
            while True:
                self.check()
                if self._stop is not None:
                    raise self._stop
                if self._first is not None:
                    spec, self._first = self._first, None
                    return spec
                if self._go is not None:
                    return self._take_go()
                self._changed.wait()

    def finish(self) -> int | None:
        """End the loop: every later Arm is late. Return a generation whose Go has come and will not be followed."""
        with self._changed:
            self._finished = True
            unfollowed, self._go, self._armed = self._go, None, None
            return unfollowed

    def _take_go(self) -> int:
        generation, self._go, self._armed = self._go, None, None
        assert generation is not None
        return generation
