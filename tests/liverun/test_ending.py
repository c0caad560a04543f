"""An interpreter ends only when gloo's threads have let go of what they worked on."""

from __future__ import annotations

import ctypes
import queue
import threading
import time

import pytest

from liverun import ending
from liverun.ending import GLOO_THREAD, let_gloo_finish

_SET_NAME = 15
"""``PR_SET_NAME`` of prctl"""


class Thread:
    """Is called as torch calls gloo's; busy with short waits until it is told to rest, then waits for one thing."""

    def __init__(self) -> None:
        self.may_rest, self.rests, self._may_end = threading.Event(), threading.Event(), threading.Event()
        self._named = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._named.wait(30)

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, GLOO_THREAD.encode())
        self._named.set()
        while not self.may_rest.is_set():
            time.sleep(0.0005)
        self.rests.set()
        self._may_end.wait()

    def end(self) -> None:
        self.may_rest.set()
        self._may_end.set()
        self._thread.join(30)


def test_it_waits_while_a_thread_of_gloo_works_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    let_gloo_finish(limit_s=3600)  # there is none
    thread = Thread()
    seen: list[bool] = []
    looks: queue.SimpleQueue[None] = queue.SimpleQueue()
    look = ending._gloo_threads
    monkeypatch.setattr(ending, "_gloo_threads", lambda: (looks.put(None), look())[1])

    def end() -> None:
        let_gloo_finish(limit_s=3600)
        seen.append(thread.rests.is_set())

    waits = threading.Thread(target=end)
    try:
        waits.start()
        for _ in range(20):
            looks.get(timeout=30)
        assert seen == []
        thread.may_rest.set()
        waits.join(30)
        assert seen == [True]
    finally:
        thread.end()


def test_it_does_not_wait_for_ever() -> None:
    thread = Thread()
    try:
        let_gloo_finish(limit_s=0.05)
        assert not thread.rests.is_set()
    finally:
        thread.end()
