"""Running the script once more in the same process, when a restart of the job keeps the processes that are well.

With ``LIVERUN_RESTART_MODE=keep`` a worker that was forked from the template, has called ``liverun.join()`` and holds
no CUDA device goes through this:

1. The script ends: a collective fails because a peer is gone; or ``Unwinding`` is raised at a boundary or in
   ``join()``; or it fails by itself.
2. If it failed and nobody has said Unwind yet, the process says Ended. It closes the groups of its world, which
   releases the peers that wait for it, and waits for Unwind or Leave. Whoever failed first is told to leave, and is
   replaced; so the exit code, the report and the restart are those of the failure that began it all.
3. Told Unwind, it gives up what is left of the world, runs what the script has registered with ``atexit``, forgets
   the ``__main__`` module and everything that ``clean`` names, and says Unwound.
4. Again brings the next worker's environment, arguments and files. The process closes its link, and begins at the
   top of the script. Modules stay imported, and with them whatever the script keeps in them.

A process in which a thread of the script still runs, or in which the script has replaced functions of a library, is
not clean: it exits, and a new one takes its place. So does one whose script does not come to its end in time.

Nothing here imports torch: the template may have been told to import nothing.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from liverun.main_module import report_uncaught, reset_signals, run_as_main
from liverun.messages import Again
from liverun.patches import patched

MODE_VARIABLE = "LIVERUN_RESTART_MODE"
THREADS_TIMEOUT_S = 3.0
"""how long threads of a script that has ended may take to follow it"""


class Joined(Protocol):
    """A worker that has called ``liverun.join()``, as the top of its process knows it."""

    @property
    def unwinds(self) -> bool:
        """Whether the world was given up, and the script is to run again."""
        ...

    def give_up(self) -> None:
        """Close the groups of the world; may be called again."""
        ...

    def say_ended(self, code: int) -> bool:
        """Say that the script has failed, and wait; whether it is to run again."""
        ...

    def forget(self) -> None:
        """Drop everything of the script and its worlds; only the link to the agent is left."""
        ...

    def say_unwound(self) -> Again | None:
        """Say that nothing of the script is left, and wait; ``None``: exit."""
        ...

    def hang_up(self) -> None:
        """Close the link to the agent."""
        ...


class Top:
    """What the top of a process knows of the script that runs in it."""

    def __init__(self) -> None:
        self.keeps = False
        """this process can run its script again"""
        self.joined: Joined | None = None

    def enter(self, worker: Joined) -> None:
        """Hear that the script has joined."""
        self.joined = worker


TOP = Top()
"""of this process"""


class _Before:
    """What a process was like before it ran the script."""

    def __init__(self) -> None:
        self.path = list(sys.path)
        self.handlers = list(logging.root.handlers)
        self.threads = set(threading.enumerate())
        self.imported = frozenset(sys.modules)


class _Hook:
    """One call of ``atexit.register`` by the script."""

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self._args = args
        self._kwargs = kwargs

    def __call__(self) -> None:
        self.function(*self._args, **self._kwargs)


class _Hooks:
    """Stands before ``atexit``: what a script registers is run at its end, even if the process goes on.

    What a module registers while it is imported stays, as the module does.
    """

    def __init__(self) -> None:
        self._hooks: list[_Hook] = []
        self._register, self._unregister = atexit.register, atexit.unregister
        vars(atexit).update(register=self.register, unregister=self.unregister)

    def register(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if _importing():
            return self._register(function, *args, **kwargs)
        self._hooks.append(_Hook(function, args, kwargs))
        self._register(self._hooks[-1])
        return function

    def unregister(self, function: Callable[..., Any]) -> None:
        self._unregister(function)
        for hook in [hook for hook in self._hooks if hook.function == function]:
            self._unregister(hook)
            self._hooks.remove(hook)

    def run(self) -> None:
        """Run them as the interpreter does: the last one first, and each whatever became of the others."""
        while self._hooks:
            hook = self._hooks.pop()
            self._unregister(hook)
            try:
                hook()
            except Exception:  # noqa: BLE001 - whatever a script's hook raises, the others are run
                traceback.print_exc()


def _importing() -> bool:
    """Whether whoever calls is in the middle of an import."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def run_until_done(mode: str, argv: list[str], take_place: Callable[[Again], None]) -> None:
    """Run the script, and again for as long as the agent wants it. ``take_place`` makes the process another worker.

    Raises ``SystemExit`` with the script's exit code; returns for one that ran to its end.
    """
    if os.environ.get(MODE_VARIABLE) != "keep":
        run_as_main(mode, argv)
        return
    TOP.keeps = True
    before, hooks = _Before(), _Hooks()
    while True:
        code = _run(mode, argv)
        joined = TOP.joined
        if joined is None or not _runs_again(joined, code):
            break
        task = _unwind(joined, hooks, before)
        if task is None:
            break
        TOP.joined = joined = None
        take_place(task)
        argv = list(task.argv)
    if code:
        raise SystemExit(code)


def _run(mode: str, argv: list[str]) -> int:
    """Run the script to its end; its exit code. No exception of it, and so no frame, is left behind."""
    try:
        run_as_main(mode, argv, report=_report)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
        return 1
    return 0


def _report(error: BaseException) -> None:
    """Report what the script has raised; of one that is to end, only that."""
    joined = TOP.joined
    if joined is not None and joined.unwinds:
        first = (str(error).splitlines() or [""])[0]
        sys.stderr.write(f"liverun: the script was ended to be run again ({type(error).__name__}: {first})\n")
    else:
        report_uncaught(error)


def _runs_again(joined: Joined, code: int) -> bool:
    """Whether the process goes on after this end of its script."""
    if joined.unwinds:
        return True
    return code != 0 and joined.say_ended(code)


def _unwind(joined: Joined, hooks: _Hooks, before: _Before) -> Again | None:
    """Make the process what it was before it ran the script, and wait for the next task; ``None``: exit."""
    joined.give_up()
    hooks.run()
    joined.forget()
    stays = patched(before.imported, sys.modules["__main__"])
    clean(before)
    if stays is None:
        stays = ", ".join(sorted(thread.name for thread in _threads_left(before.threads)))
    if stays:
        sys.stderr.write(f"liverun: the script has left something behind ({stays}), so this process ends\n")
        sys.stdout.flush()
        os._exit(1)  # its hooks have been run; the interpreter would wait for its threads
    task = joined.say_unwound()
    if task is not None:
        joined.hang_up()
    return task


def clean(before: _Before) -> None:
    """Drop what a script leaves in its process, and everything that holds on to its tensors."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    vars(sys.modules["__main__"]).clear()  # a function that somebody still holds would keep all of it
    vars(sys.modules["__main__"]).update(__name__="__main__", __builtins__=builtins)
    sys.path[:] = before.path
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    signal.setitimer(signal.ITIMER_REAL, 0)
    _reset_faulthandler()
    reset_signals()
    for handler in [handler for handler in logging.root.handlers if handler not in before.handlers]:
        logging.root.removeHandler(handler)
    if "liverun.fence" in sys.modules:
        importlib.import_module("liverun.fence").forget()
    # join() has frozen what was alive then: objects of the script among it, that are garbage now
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _reset_faulthandler() -> None:
    """Take faulthandler's handlers back: it would not put up again what ``reset_signals`` has removed."""
    faulthandler.cancel_dump_traceback_later()
    faulthandler.disable()
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            with contextlib.suppress(ValueError, RuntimeError):  # those it has for itself
                faulthandler.unregister(number)


def _threads_left(before: set[threading.Thread]) -> list[threading.Thread]:
    """Wait a little for threads of the script, and return those that go on. Ours are told apart by their names."""
    deadline = time.monotonic() + THREADS_TIMEOUT_S
    ours = "liverun-link"
    started = [thread for thread in threading.enumerate() if thread not in before and thread.name != ours]
    for thread in started:
        if isinstance(thread, threading._DummyThread):
            continue  # one of torch's own, that has only run some of our code
        thread.join(max(0.0, deadline - time.monotonic()))
    return [
        thread for thread in started if thread.is_alive() and not isinstance(thread, threading._DummyThread)
    ]
