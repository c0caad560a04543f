"""Asking a job for a checkpoint: all ranks at one boundary, never together with a change of world."""

from __future__ import annotations

from typing import Any

from test_decide import Drive, the

from launcher.decide import next_deadline
from launcher.model import Answer, Exited, Record, SaveAsked, Send, StopAsked, Tick
from liverun.layout import Layout
from liverun.messages import Arm, Armed, Cancel, Go, Progress, Saved, Where

REQUEST = 7


def running() -> Drive:
    drive = Drive(nproc=2, standbys=2, saves=True)
    drive.first_world()
    return drive


def ask(drive: Drive, request: int = REQUEST, timeout_s: float = 30.0) -> list[Any]:
    return drive.feed(SaveAsked(request=request, timeout_s=timeout_s))


def sent(actions: list[Any], kind: type) -> list[tuple[str, Any]]:
    return [(a.worker, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def at(drive: Drive, **steps: int) -> list[Any]:
    generation = drive.state.world.generation
    return [x for w, s in steps.items() for x in drive.say(w, Progress(generation=generation, step=s))]


def arm(drive: Drive, *, late: str | None = None) -> list[Any]:
    step = drive.state.saving.step
    return [
        action for worker in drive.ranks() for action in drive.say(
            worker, Armed(generation=-REQUEST, step=step, late=worker == late, at_step=step)
        )
    ]  # fmt: skip


def test_every_rank_goes_at_one_step_and_the_asker_hears_when_it_exists() -> None:
    drive = running()
    assert [worker for worker, _ in sent(ask(drive), Where)] == ["w0", "w1"]
    arms = sent(at(drive, w0=4, w1=5), Arm)
    assert {(worker, message.generation, message.step) for worker, message in arms} == {
        ("w0", -REQUEST, 7), ("w1", -REQUEST, 7),
    }  # fmt: skip
    assert {worker for worker, message in sent(arm(drive), Go) if message.generation == -REQUEST} == {"w0", "w1"}
    actions = drive.say("w0", Saved(request=REQUEST, step=7, ok=True, path="/c/step-7", pause_s=0.5))
    answer = the(Answer, actions)
    assert (answer.wish, answer.ok, answer.fields["path"]) == (REQUEST, True, "/c/step-7")
    assert the(Record, actions).kind == "checkpoint"
    assert drive.state.saving is None
    assert drive.state.last_checkpoint["step"] == 7


def test_a_rank_that_is_past_the_step_makes_it_a_later_one() -> None:
    drive = running()
    ask(drive)
    at(drive, w0=4, w1=4)
    actions = arm(drive, late="w1")
    assert {worker for worker, _ in sent(actions, Cancel)} == {"w0", "w1"}
    assert not sent(actions, Go)
    assert sent(actions, Where) or sent(drive.feed(Tick()), Where)
    arms = sent(at(drive, w0=6, w1=9), Arm)
    assert {message.step for _, message in arms} == {13}  # the margin has doubled


def test_a_change_of_world_and_a_checkpoint_wait_for_each_other() -> None:
    drive = running()
    drive.hello("w2", "w3")
    ask(drive)
    assert not sent(drive.wish(layout=Layout(tp=2)), Arm)
    assert drive.state.proposal is None
    at(drive, w0=1, w1=1)
    arm(drive)
    assert drive.state.proposal is None
    drive.say("w0", Saved(request=REQUEST, step=3, ok=True))
    assert drive.state.proposal is not None  # now it begins
    assert not sent(ask(drive, 8), Where)
    assert not drive.state.saving.begun


def test_a_rank_that_cannot_write_is_the_answer() -> None:
    drive = running()
    ask(drive)
    at(drive, w0=1, w1=1)
    arm(drive)
    actions = drive.say("w1", Saved(request=REQUEST, step=3, ok=False, reason="No space left on device"))
    answer = the(Answer, actions)
    assert not answer.ok
    assert answer.reason == "no checkpoint of step 3: No space left on device"
    assert the(Record, actions).kind == "checkpoint_failed"


def test_whoever_waits_is_answered_whatever_happens() -> None:
    """Known complaint 44: a stale "saving" event kills the job later."""
    for happens in (
        lambda drive: drive.feed(StopAsked(reason="liverun stop")),
        lambda drive: drive.feed(Exited(worker="w1", code=-9)),
        lambda drive: drive.feed(Exited(worker="w1", code=0)),
    ):
        drive = running()
        ask(drive)
        at(drive, w0=1, w1=1)
        answer = the(Answer, happens(drive))
        assert (answer.wish, answer.ok) == (REQUEST, False)
    drive = running()
    ask(drive, timeout_s=5.0)
    assert next_deadline(drive.state) <= drive.now + 5.0
    assert the(Answer, ask(drive, 8)).reason == "another checkpoint is being taken"
    drive.now += 5.0
    assert "did not come to a common step" in the(Answer, drive.feed(Tick())).reason
    drive.feed(StopAsked(reason="liverun stop"))
    assert the(Answer, ask(drive)).reason == "the job is ending"
