"""What runs as ``__main__`` in a worker: a script, a module, or a function, as ``python`` itself would run it.

Nothing here imports torch or the launcher.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

from liverun.calls import run_call
from liverun.ending import let_gloo_finish


def run_as_main(
    mode: str, argv: list[str], report: Callable[[BaseException], None] | None = None
) -> None:
    """Run what a worker is there for; report what it raises as ``python`` would, or by ``report``, then exit.

    ``script`` runs a file, ``module`` what ``python -m`` runs, ``path`` a file with ``runpy.run_path`` and
    nothing added to ``sys.path``, ``function`` what :func:`liverun.calls.run_call` says.

    Raises ``SystemExit`` with the script's exit code; returns for one that ran to its end.
    """
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    vars(main)["__builtins__"] = builtins
    atexit.register(let_gloo_finish)  # first, so that it is the last to run
    try:
        if mode == "function":
            run_call(*argv)
            return
        if mode == "path":
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
            return
        if mode == "module":
            sys.argv = ["-m", *argv[1:]]
            sys.path.insert(0, os.getcwd())  # noqa: PTH109  (what python -m does)
            runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]
            return
        script = argv[0]
        sys.argv = argv
        if Path(script).is_dir() or script.endswith((".zip", ".pyz")):
            runpy.run_path(script, run_name="__main__")
            return
        sys.path.insert(0, str(Path(script).resolve().parent))
        try:
            with io.open_code(str(Path(script).absolute())) as file:
                source = file.read()
        except OSError as error:
            sys.stderr.write(
                f"{sys.executable}: can't open file {script!r}: [Errno {error.errno}] {error.strerror}\n"
            )
            sys.exit(2)
        vars(main).update(__file__=script, __spec__=None, __cached__=None, __package__=None)
        exec(compile(source, script, "exec"), vars(main))  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  (what the interpreter itself does at the top)
        (report or report_uncaught)(error)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def reset_signals() -> None:
    """Give every signal the handler that a fresh python has."""
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def report_uncaught(error: BaseException) -> None:
    """Print a traceback without our own frames, and leave the error file that torch's launcher would read."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    error = error.with_traceback(frames)
    sys.excepthook(type(error), error, frames)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        text = "".join(traceback.format_exception(error))
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))
