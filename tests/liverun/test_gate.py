"""The gate: where the training thread meets what the agent has said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from liverun.gate import Gate, Stopped, Unwinding
from liverun.layout import Layout
from liverun.messages import Prepare

DEADLINE_S = 20.0


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start ``call`` in a thread; what is returned waits for its result, or raises what it raised."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except (Stopped, Unwinding) as end:
            result.append(end)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "it never returned"
        return result[0]

    wait.is_waiting = thread.is_alive  # type: ignore[attr-defined]
    return wait


def until_blocked(gate: Gate) -> None:
    """Wait until a thread waits inside the gate: only then may its condition be taken with a waiter on it."""
    while True:
        with gate._changed:
            if gate._changed._waiters:  # type: ignore[attr-defined]
                return


def test_a_world_that_is_given_up_ends_every_wait_and_every_boundary_from_then_on() -> None:
    gate = Gate()
    standby = in_thread(gate.wait_for_world)
    until_blocked(gate)
    gate.unwind("rank 1 is gone")
    assert str(standby()) == "rank 1 is gone"
    for _ in range(2):  # a script may catch what it should not
        with pytest.raises(Unwinding, match="rank 1 is gone"):
            gate.pass_boundary(7)
    armed = Gate()
    assert not armed.arm(2, 3).late
    waiting = in_thread(lambda: armed.pass_boundary(3))
    until_blocked(armed)
    armed.unwind("so it is")
    assert isinstance(waiting(), Unwinding)
    assert armed.wait_for_verdict()
    leaving = Gate()
    verdict = in_thread(leaving.wait_for_verdict)
    until_blocked(leaving)
    leaving.leave()
    assert verdict() is False
    assert leaving.wait_for_again() is None


def test_nothing_armed_lets_every_boundary_pass() -> None:
    gate = Gate()
    assert [gate.pass_boundary(step) for step in range(3)] == [None, None, None]
    assert gate.reached == 2


def test_an_arm_for_a_boundary_already_passed_is_late() -> None:
    gate = Gate()
    gate.pass_boundary(5)
    late = gate.arm(2, 5)
    assert (late.late, late.at_step) == (True, 5)
    assert gate.pass_boundary(6) is None
    assert not gate.arm(2, 7).late


def test_an_armed_worker_waits_at_the_boundary_for_go() -> None:
    gate = Gate()
    assert not gate.arm(2, 3).late
    assert [gate.pass_boundary(step) for step in range(3)] == [None, None, None]
    waiting = in_thread(lambda: gate.pass_boundary(3))
    until_blocked(gate)
    assert gate.reached == 2, "an armed worker must not have passed"
    assert gate.go(2)
    assert waiting() == 2


def test_go_may_come_before_the_boundary_is_reached() -> None:
    gate = Gate()
    gate.arm(2, 3)
    gate.go(2)
    assert gate.pass_boundary(2) is None
    assert gate.pass_boundary(3) == 2
    assert gate.pass_boundary(3) is None, "one Go, one change"


@pytest.mark.parametrize("when", ["before", "while waiting"])
def test_cancel_lets_the_worker_pass(when: str) -> None:
    gate = Gate()
    gate.arm(2, 3)
    if when == "before":
        gate.disarm(2)
        assert gate.pass_boundary(3) is None
    else:
        waiting = in_thread(lambda: gate.pass_boundary(3))
        until_blocked(gate)
        gate.disarm(2)
        assert waiting() is None
    assert gate.reached == 3


def test_a_cancel_of_another_generation_changes_nothing() -> None:
    gate = Gate()
    gate.arm(3, 3)
    gate.disarm(2)
    gate.go(3)
    assert gate.pass_boundary(3) == 3


def test_a_worker_that_is_stopped_ends_at_its_boundary() -> None:
    gate = Gate()
    gate.stop("enough")
    with pytest.raises(Stopped, match="enough"):
        gate.pass_boundary(0)
    waiting = Gate()
    wait = in_thread(waiting.wait_for_world)
    until_blocked(waiting)
    waiting.stop("enough")
    assert isinstance(wait(), Stopped)


def test_a_standby_waits_for_its_first_world_or_for_go() -> None:
    spec = Prepare(
        generation=1, layout=Layout(), world_size=1, members=(), store_host="", store_port=0, timeout_s=1.0
    )
    gate = Gate()
    wait = in_thread(gate.wait_for_world)
    until_blocked(gate)
    gate.offer_first(spec)
    assert wait() is spec
    gate.go(1)
    assert gate.wait_for_world() == 1


def test_after_the_loop_every_arm_is_late_and_every_go_refused() -> None:
    gate = Gate()
    gate.arm(2, 10)
    assert gate.finish() is None
    assert gate.arm(3, 11).late
    assert not gate.go(2)


def test_a_go_that_the_loop_does_not_reach_is_told() -> None:
    gate = Gate()
    gate.arm(2, 10)
    gate.go(2)
    assert gate.finish() == 2
