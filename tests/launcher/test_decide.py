"""Every decision about a job's world, without processes, sockets or clocks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.decide import JOIN_PATIENCE_S, decide, next_deadline
from launcher.failing import LEAVE_TIMEOUT_S, PATIENCE_S
from launcher.generation import ARM_TIMEOUT_S, MAX_ARM_TRIES, RETIRE_TIMEOUT_S, ROOT_CAUSE_PATIENCE_S
from launcher.model import (
    Action,
    Answer,
    Boot,
    CloseStore,
    Commit,
    Committed,
    End,
    Event,
    Exited,
    Fork,
    JobState,
    Kill,
    Node,
    NodeCleared,
    NodeEntered,
    Number,
    Numbered,
    OpenStore,
    Record,
    Restart,
    Said,
    Send,
    Started,
    StopAsked,
    StoreFailed,
    StoreOpened,
    Tick,
    Wish,
    Wished,
)
from liverun.layout import Layout
from liverun.messages import (
    Abort,
    Arm,
    Armed,
    Cancel,
    Check,
    Checked,
    Ended,
    Failed,
    Go,
    Hello,
    Leave,
    Message,
    Prepare,
    Prepared,
    Progress,
    Retired,
    Stop,
    Switched,
    Where,
)

A = TypeVar("A")


class Drive:
    """Feeds events to decide() and plays a shell that always succeeds."""

    def __init__(self, nproc: int = 2, standbys: int = 2, *, enter: bool = True, **more: Any) -> None:
        self.state = JobState(**more)
        self.now = 1000.0
        self.actions: list[Action] = []
        self.next_generation = 1
        self.next_wish = 1
        self.ids = itertools.count()
        if enter:
            self.enter("n0", nproc, standbys, leads=True)

    def enter(self, name: str, nproc: int = 2, standbys: int = 0, **more: Any) -> list[Action]:
        """Let the agent of a node come."""
        node = Node(id=name, host=f"host-{name}", nproc=nproc, standbys=standbys, arrived=int(name[1:]), **more)
        return self.feed(NodeEntered(node=node))

    def feed(self, *events: Event) -> list[Action]:
        """Decide on events; what these brought about."""
        start = len(self.actions)
        for event in events:
            decision = decide(self.now, self.state, event)
            self.state = decision.state
            for action in decision.actions:
                self.actions.append(action)
                self._shell(action)
        return self.actions[start:]

    def _shell(self, action: Action) -> None:
        if isinstance(action, Number):
            self.next_generation += 1
            self.feed(Numbered(generation=self.next_generation - 1))
        elif isinstance(action, OpenStore):
            self.feed(StoreOpened(generation=action.generation, host="h", port=1))
        elif isinstance(action, Commit):
            self.feed(Committed(generation=action.world.generation, won=True))
        elif isinstance(action, Boot):
            rank = 0
            for node in action.nodes:
                for _ in range(node.boot):
                    self._start(node.id, rank)
                    rank += 1
        elif isinstance(action, Fork):
            for _ in range(action.count):
                self._start(action.node, None)
        elif isinstance(action, Restart):
            self.feed(*(NodeCleared(node=node) for node in action.nodes))

    def _start(self, node: str, rank: int | None) -> None:
        number = next(self.ids)
        self.feed(Started(worker=f"w{number}", pid=100 + number, boot_rank=rank, node=node))

    def say(self, worker: str, message: Message) -> list[Action]:
        return self.feed(Said(worker=worker, message=message))

    def fail(self, worker: str, generation: int, reason: str) -> list[Action]:
        """Say Failed, and let the moment pass in which a peer's end would explain it."""
        actions = self.say(worker, Failed(generation=generation, reason=reason))
        self.now += ROOT_CAUSE_PATIENCE_S
        return [*actions, *self.feed(Tick())]

    def hello(self, *workers: str, layout: Layout | None = None) -> list[Action]:
        return self.feed(*(Said(worker=w, message=Hello(worker=w, pid=1, layout=layout)) for w in workers))

    def wish(self, **more: Any) -> list[Action]:
        wish = Wish(id=self.next_wish, **more)
        self.next_wish += 1
        return self.feed(Wished(wish=wish))

    @property
    def generation(self) -> int:
        assert self.state.proposal is not None
        assert self.state.proposal.generation is not None
        return self.state.proposal.generation

    def checked(self, refusal: str | None = None) -> list[Action]:
        asked = self.ranks()[0] if self.state.world is not None else self.members()[0]
        return self.say(asked, Checked(generation=self.generation, refusal=refusal))

    def ranks(self) -> tuple[str, ...]:
        assert self.state.world is not None
        return self.state.world.ranks

    def members(self) -> list[str]:
        assert self.state.proposal is not None
        assert self.state.proposal.target is not None
        return [member.worker for member in self.state.proposal.target.members]

    def prepared(self, *workers: str) -> list[Action]:
        generation = self.generation
        return [
            action
            for worker in workers or self.members()
            for action in self.say(worker, Prepared(generation=generation, prepare_s=1.0))
        ]

    def progress(self, step: int = 10, *workers: str) -> list[Action]:
        assert self.state.world is not None
        generation = self.state.world.generation
        return [
            action
            for worker in workers or self.ranks()
            for action in self.say(worker, Progress(generation=generation, step=step))
        ]

    def armed(self, late: str | None = None) -> list[Action]:
        assert self.state.proposal is not None
        step = self.state.proposal.step
        assert step is not None
        generation = self.generation
        return [
            action
            for w in self.ranks()
            for action in self.say(w, Armed(generation=generation, step=step, late=w == late, at_step=step))
        ]

    def voted(self, *noes: str, only: tuple[str, ...] | None = None) -> list[Action]:
        generation = self.generation
        return [
            action
            for w in (only or tuple(self.members()))
            for action in self.say(
                w, Switched(generation=generation, ok=w not in noes, reason="why", step=12)
            )
        ]

    def retired(self) -> None:
        assert self.state.world is not None
        for worker in list(self.state.workers):
            leaves = worker not in self.ranks()
            self.say(worker, Retired(generation=self.state.world.generation, leaves=leaves))

    def first_world(self) -> Drive:
        self.hello(*(f"w{rank}" for rank in range(self.state.boot_size)))
        self.prepared()
        self.voted()
        self.hello(*(w.id for w in self.state.workers.values() if w.boot_rank is None))
        return self

    def resized(self, **wish: Any) -> Drive:
        self.wish(**wish)
        self.checked()
        self.prepared()
        self.progress()
        self.armed()
        self.voted()
        self.retired()
        return self


def of(kind: type[A], actions: list[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def sent(kind: type[A], actions: list[Action]) -> list[tuple[str, A]]:
    return [(a.worker, a.message) for a in of(Send, actions) if isinstance(a.message, kind)]


def kinds(actions: list[Action]) -> list[str]:
    return [record.kind for record in of(Record, actions)]


def the(kind: type[A], actions: list[Action]) -> A:
    found = of(kind, actions)
    assert len(found) == 1, actions
    return found[0]


def leads(drive: Drive, yes: bool) -> list[Action]:
    drive.state = replace(drive.state, leads=yes)
    return drive.feed(Tick())


# --- the first world ---------------------------------------------------------------------------------------------


def test_first_world_waits_for_every_rank_then_goes_without_a_step() -> None:
    drive = Drive()
    first = drive.hello("w0", layout=Layout(tp=2))
    assert the(Fork, first).count == 2
    assert not of(Number, first)
    second = drive.hello("w1")
    assert [worker for worker, _ in sent(Prepare, second)] == ["w0", "w1"]
    prepare = sent(Prepare, second)[0][1]
    assert (prepare.generation, prepare.layout, prepare.world_size) == (1, Layout(tp=2), 2)
    assert [(m.worker, m.old_rank, m.rank, m.local_world_size) for m in prepare.members] == [
        ("w0", None, 0, 2), ("w1", None, 1, 2),
    ]  # fmt: skip
    assert not sent(Go, drive.prepared("w0"))
    assert [(w, go.step) for w, go in sent(Go, drive.prepared("w1"))] == [("w0", None), ("w1", None)]
    done = drive.voted()
    assert the(Commit, done).old is None
    assert kinds(done) == ["world"]
    assert drive.state.phase == "running"


def test_launchers_layout_counts_before_the_scripts() -> None:
    drive = Drive(layout=Layout(pp=2))
    drive.hello("w1", layout=Layout(tp=2))
    assert sent(Prepare, drive.hello("w0", layout=Layout(tp=2)))[0][1].layout == Layout(pp=2)


def test_a_first_layout_that_does_not_divide_fails_the_job() -> None:
    drive = Drive()
    drive.hello("w1")
    end = the(End, drive.hello("w0", layout=Layout(tp=3)))
    assert (end.outcome, "multiple of 3" in end.reason) == ("failed", True)


def test_standbys_are_started_only_when_the_script_has_joined() -> None:
    drive = Drive(nproc=1, standbys=3)
    assert not of(Fork, drive.actions)
    assert the(Fork, drive.hello("w0")).count == 3


def test_a_rank_that_joins_before_the_others_are_started_does_not_make_the_pool_too_large() -> None:
    drive = Drive(enter=False)
    drive._shell = lambda _: None  # type: ignore[method-assign]  (workers take their time)
    drive.enter("n0", 3, 1)
    drive.feed(Started(worker="w0", pid=1, boot_rank=0))
    assert the(Fork, drive.hello("w0")).count == 1


def test_standbys_that_end_together_are_replaced_one_for_one() -> None:
    drive = Drive(nproc=1, standbys=2).first_world()
    drive._shell = lambda _: None  # type: ignore[method-assign]  (the new ones take their time)
    forks = [of(Fork, drive.feed(Exited(worker=worker, code=1))) for worker in ("w1", "w2")]
    assert [fork.count for found in forks for fork in found] == [1, 1]


def test_a_failure_in_the_first_world_fails_the_job_without_a_retry() -> None:
    """Known complaint 12: restarts on a failure at start-up until the budget is gone."""
    drive = Drive(max_restarts=3)
    drive.hello("w0", "w1")
    assert (
        the(End, drive.fail("w1", 1, "typo")).reason
        == "worker w1 (to be rank 1): typo"
    )
    other = Drive(max_restarts=3)
    other.hello("w0", "w1")
    assert the(End, other.feed(Exited(worker="w1", code=1))).code == 1


def test_a_rank_that_ends_well_before_the_first_world_fails_the_others_that_wait() -> None:
    drive = Drive()
    drive.hello("w0")
    assert "ended before the first world" in the(End, drive.feed(Exited(worker="w1", code=0))).reason


# --- a resize, phase by phase ------------------------------------------------------------------------------------


def test_a_resize_goes_through_every_phase_in_order() -> None:
    drive = Drive().first_world()
    asked = drive.wish(workers=4)
    assert kinds(asked) == ["proposed"]
    assert sent(Check, asked) == [("w0", Check(generation=2, layout=Layout(), world_size=4))]
    started = drive.checked()
    assert [worker for worker, _ in sent(Prepare, started)] == ["w0", "w1", "w2", "w3"]
    ready = drive.prepared()
    assert kinds(ready) == ["ready"]
    assert [worker for worker, _ in sent(Where, ready)] == ["w0", "w1"]
    assert not drive.progress(7, "w0")
    arms = sent(Arm, drive.progress(9, "w1"))
    assert arms == [("w0", Arm(generation=2, step=11)), ("w1", Arm(generation=2, step=11))]
    gone = drive.armed()
    assert kinds(gone) == ["armed", "switching"]
    assert [(w, go.step) for w, go in sent(Go, gone)] == [(f"w{n}", 11) for n in range(4)]
    voted = drive.voted()
    commit = the(Commit, voted)
    assert (commit.old, commit.world.generation, commit.world.ranks) == (1, 2, ("w0", "w1", "w2", "w3"))
    assert kinds(voted) == ["active"]
    answer = the(Answer, voted)
    assert (answer.ok, answer.fields["summary"]) == (True, "4 workers, dp=4")
    drive.retired()
    assert kinds(drive.actions)[-1] == "retired"
    assert of(CloseStore, drive.actions) == [CloseStore(generation=1)]


def test_leavers_are_the_highest_ranks_and_become_standbys_once_retired() -> None:
    drive = Drive(nproc=4, standbys=0).first_world()
    drive.wish(workers=2)
    drive.checked()
    members = drive.state.proposal.target.members  # type: ignore[union-attr]
    assert [(m.worker, m.old_rank, m.rank) for m in members] == [
        ("w0", 0, 0), ("w1", 1, 1), ("w2", 2, None), ("w3", 3, None),
    ]  # fmt: skip
    drive.prepared()
    drive.progress()
    drive.armed()
    drive.voted()
    assert [drive.state.workers[w].state for w in ("w1", "w2", "w3")] == ["ranked", "leaving", "leaving"]
    drive.retired()
    assert [drive.state.workers[w].state for w in ("w2", "w3")] == ["standby", "standby"]
    assert drive.resized(workers=4).ranks() == ("w0", "w1", "w2", "w3")


def test_retired_before_the_last_vote_is_remembered() -> None:
    drive = Drive(nproc=2, standbys=0).first_world()
    drive.wish(workers=1)
    drive.checked()
    drive.prepared()
    drive.progress()
    drive.armed()
    drive.voted(only=("w1",))
    drive.say("w1", Retired(generation=2, leaves=True))
    drive.voted(only=("w0",))
    assert drive.state.workers["w1"].state == "standby"
    drive.say("w0", Retired(generation=2))
    assert kinds(drive.actions)[-1] == "retired"


def test_a_world_that_never_retires_is_given_up_after_a_time() -> None:
    drive = Drive().first_world()
    drive.wish(workers=3)
    drive.checked()
    drive.prepared()
    drive.progress()
    drive.armed()
    drive.voted()
    drive.say("w0", Retired(generation=2))
    drive.now += RETIRE_TIMEOUT_S
    assert next_deadline(drive.state) == drive.now
    assert "w1" in the(Record, drive.feed(Tick())).reason


def test_replace_keeps_size_and_layout() -> None:
    drive = Drive().first_world()
    assert drive.resized(replace="1").ranks() == ("w0", "w2")
    assert drive.resized(replace="w0").ranks() == ("w1", "w2")
    assert "no ranked worker 7" in the(Answer, drive.wish(replace="7")).reason


# --- what is refused, and why ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"workers": 9}, "9 workers were asked for, but this job has 4 (2 ranked, 2 standbys)"),
        (
            {"workers": 4, "layout": Layout(tp=3)},
            "layout tp=3 needs a multiple of 3 workers (tp*pp*cp), not 4",
        ),
        ({"workers": 0}, "a world of 0 workers is none; ask for at least 1"),
        ({"replace": "w3"}, "no ranked worker w3; there are ranks 0 to 1: w0, w1"),
    ],
)
def test_an_impossible_wish_is_refused_with_its_reason(wish: dict[str, Any], reason: str) -> None:
    drive = Drive().first_world()
    actions = drive.wish(**wish)
    answer = the(Answer, actions)
    assert (answer.ok, answer.outcome, answer.reason) == (False, "refused", reason)
    assert kinds(actions) == ["refused"]
    assert drive.state.proposal is None
    assert not of(Number, actions)


def test_a_workers_refusal_is_passed_on_word_for_word() -> None:
    drive = Drive().first_world()
    drive.wish(layout=Layout(tp=2))
    assert the(Answer, drive.checked("7 heads")).reason == "7 heads"
    assert drive.state.proposal is None


def test_without_a_layout_the_present_one_stays_if_it_fits_else_shrinks_and_says_so() -> None:
    drive = Drive(nproc=4, standbys=0, layout=Layout(tp=2)).first_world()
    drive.resized(workers=2)
    assert drive.state.world is not None
    assert drive.state.world.layout == Layout(tp=2)
    said = drive.wish(workers=1)
    assert "so it becomes tp=1" in of(Record, said)[0].reason
    assert sent(Check, said)[0][1].layout == Layout()


def test_what_already_is_needs_nothing() -> None:
    drive = Drive().first_world()
    answer = the(Answer, drive.wish(workers=2))
    assert (answer.ok, answer.outcome) == (True, "unchanged")
    assert drive.next_generation == 2


def test_a_script_that_never_joins_cannot_be_resized() -> None:
    drive = Drive()
    assert kinds(drive.wish(workers=1)) == ["queued"]
    drive.now += JOIN_PATIENCE_S
    assert next_deadline(drive.state) == drive.now
    assert "does not call liverun.join()" in the(Answer, drive.feed(Tick())).reason
    assert "does not call liverun.join()" in the(Answer, drive.wish(workers=1)).reason


def test_a_wish_waits_for_standbys_that_are_still_starting() -> None:
    drive = Drive(nproc=1, standbys=1)
    drive.hello("w0")
    drive.prepared()
    drive.voted()
    waiting = drive.wish(workers=2, timeout_s=5)
    assert not of(Number, waiting)
    assert the(Record, waiting).kind == "queued"
    (standby,) = (w.id for w in drive.state.workers.values() if w.boot_rank is None)
    assert the(Number, drive.hello(standby))
    late = Drive(nproc=1, standbys=1)
    late.hello("w0")
    late.prepared()
    late.voted()
    late.wish(workers=2, timeout_s=5)
    late.now += 5
    assert "waits for 1 more standby to join" in the(Answer, late.feed(Tick())).reason


# --- what goes wrong before the point of no return ---------------------------------------------------------------


def preparing(**more: Any) -> Drive:
    drive = Drive(**more).first_world()
    drive.wish(workers=3, timeout_s=60)
    drive.checked()
    return drive


def old_world_goes_on(drive: Drive, actions: list[Action]) -> str:
    """Nothing but the proposal is gone; the reason."""
    answer = the(Answer, actions)
    assert (answer.ok, answer.outcome) == (False, "aborted")
    assert drive.state.proposal is None
    assert drive.state.world is not None
    assert drive.state.world.generation == 1
    assert not of(End, actions)
    assert CloseStore(generation=2) in actions
    assert drive.state.last_resize is not None
    assert drive.state.last_resize["outcome"] == "aborted"
    return answer.reason


def test_old_world_goes_on_when_a_joiner_dies() -> None:
    drive = preparing()
    actions = drive.feed(Exited(worker="w2", code=-9))
    assert (
        old_world_goes_on(drive, actions)
        == "worker w2 (to be rank 2) ended while preparing: killed by SIGKILL"
    )
    assert [worker for worker, _ in sent(Abort, actions)] == ["w0", "w1"]
    assert the(Fork, actions).count == 1


def test_old_world_goes_on_when_a_member_fails() -> None:
    for worker in ("w1", "w2"):
        drive = preparing()
        actions = drive.fail(worker, 2, "no room")
        assert old_world_goes_on(drive, actions).endswith("no room")
        assert [name for name, _ in sent(Abort, actions)] == ["w0", "w1"]
        assert the(Kill, actions).worker == "w2", "whoever waits for the joiner would wait on"


def test_the_end_of_a_joiner_explains_what_its_peers_saw_of_it() -> None:
    drive = preparing()
    assert not drive.say("w0", Failed(generation=2, reason="connection closed by peer"))
    actions = drive.feed(Exited(worker="w2", code=-9))
    assert old_world_goes_on(drive, actions).endswith("ended while preparing: killed by SIGKILL")


def test_a_hung_joiner_is_named_and_killed_but_a_hung_rank_is_not() -> None:
    drive = preparing()
    drive.prepared("w0")
    drive.now += 60
    actions = drive.feed(Tick())
    reason = old_world_goes_on(drive, actions)
    assert reason == "worker w1 (rank 1), worker w2 (to be rank 2) did not get ready in 60 s"
    assert the(Kill, actions).worker == "w2"
    again = drive.wish(workers=4)
    assert not of(Number, again)  # w2 is as good as gone


def test_old_world_goes_on_when_its_store_cannot_be_opened() -> None:
    drive = Drive().first_world()
    drive.wish(workers=3)
    actions = drive.feed(StoreFailed(generation=2, reason="no port"))
    assert old_world_goes_on(drive, actions) == "no port"


def test_a_store_that_is_lost_aborts_only_what_is_still_being_prepared_on_it() -> None:
    lost = StoreFailed(generation=2, reason="the c10d store ended")
    drive = preparing()
    drive.prepared("w0")
    assert old_world_goes_on(drive, drive.feed(lost)) == "the c10d store ended"
    drive = preparing()
    drive.prepared()
    assert drive.feed(lost, StoreFailed(generation=1, reason="that of the old world")) == []
    drive.progress()
    assert sent(Go, drive.armed())
    assert drive.feed(lost) == []
    drive.voted()
    assert drive.state.world is not None
    assert drive.state.world.generation == 2


def test_late_cancels_and_doubles_the_margin() -> None:
    drive = preparing()
    drive.prepared()
    drive.progress(10)
    actions = drive.armed(late="w1")
    assert [worker for worker, _ in sent(Cancel, actions)] == ["w0", "w1"]
    assert [worker for worker, _ in sent(Where, actions)] == ["w0", "w1"]
    assert sent(Arm, drive.progress(20))[0][1].step == 24


def test_an_answer_to_an_arm_that_was_cancelled_does_not_count() -> None:
    drive = preparing()
    drive.prepared()
    drive.progress(10)
    drive.armed(late="w0")
    drive.progress(20)
    drive.say("w0", Armed(generation=2, step=12, late=False, at_step=11))
    assert not sent(Go, drive.say("w1", Armed(generation=2, step=24, late=False, at_step=21)))
    assert sent(Go, drive.say("w0", Armed(generation=2, step=24, late=False, at_step=21)))


def test_without_the_leaders_lease_nothing_is_armed_or_gone_for_until_it_is_back() -> None:
    first = Drive()
    first.hello("w0", "w1")
    leads(first, False)
    assert not sent(Go, first.prepared())
    assert len(sent(Go, leads(first, True))) == 2
    drive = preparing()
    leads(drive, False)
    assert not sent(Where, drive.prepared())
    assert sent(Where, leads(drive, True))
    drive.progress(10)
    leads(drive, False)
    actions = drive.armed()  # it was out already
    assert sent(Cancel, actions)
    assert not sent(Go, actions) + sent(Where, actions)
    assert sent(Where, leads(drive, True))
    drive.progress(20)
    assert sent(Go, drive.armed())
    long = preparing()
    leads(long, False)
    long.prepared()
    assert long.state.proposal is not None
    long.now = long.state.proposal.deadline
    assert "the leader's lease is over, and was not renewed" in old_world_goes_on(long, long.feed(Tick()))


def test_arming_gives_up_after_some_tries_or_some_time() -> None:
    drive = preparing()
    drive.prepared()
    actions: list[Action] = []
    for _ in range(MAX_ARM_TRIES):
        assert drive.state.proposal is not None
        drive.progress(10)
        actions = drive.armed(late="w0")
    assert "no step could be agreed on" in old_world_goes_on(drive, actions)
    silent = preparing()
    silent.prepared()
    silent.progress(10)
    silent.now += ARM_TIMEOUT_S
    actions = silent.feed(Tick())
    assert "w0 (rank 0), worker w1 (rank 1) did not say" in old_world_goes_on(silent, actions)
    assert len(sent(Cancel, actions)) == 2


def test_messages_of_another_generation_change_nothing() -> None:
    drive = preparing()
    before = drive.state
    for message in (
        Prepared(generation=1, prepare_s=1.0), Failed(generation=1, reason="x"), Switched(generation=1, ok=False),
        Armed(generation=3, step=1, late=False, at_step=1), Checked(generation=1, refusal="x"),
        Retired(generation=2), Progress(generation=2, step=5),
    ):  # fmt: skip
        assert not drive.say("w0", message)
    assert drive.state == before


# --- the vote ----------------------------------------------------------------------------------------------------


def switching(**more: Any) -> Drive:
    drive = preparing(**more)
    drive.prepared()
    drive.progress()
    drive.armed()
    return drive


def test_all_no_gives_the_old_world_back() -> None:
    drive = switching()
    actions = drive.voted("w0", "w1", "w2")
    assert "not committed, worker w0 (rank 0): why" in old_world_goes_on(drive, actions)
    assert not of(Commit, actions)


def test_a_split_vote_fails_the_job() -> None:
    drive = switching()
    end = the(End, drive.voted("w1"))
    assert end.outcome == "failed"
    assert "w0, w2 said yes, w1 said no" in end.reason


def test_a_no_from_a_rank_without_its_old_state_ends_the_job_and_says_all_reasons() -> None:
    """The old world is not gone back to, whatever the others say; the worker's own end is that of the job."""
    for restarts in (0, 1):
        drive = switching(max_restarts=restarts)
        for worker, lost in (("w1", False), ("w0", True), ("w2", False)):
            vote = Switched(generation=2, ok=False, reason=f"why {worker}", lost=lost, kept=False)
            actions = drive.say(worker, vote)
            assert not of(End, actions)
            assert "aborted" not in kinds(actions)
        actions = drive.feed(Exited(worker="w0", code=1))
        done = the(Restart, actions) if restarts else the(End, actions)
        assert "layers of the old world had been given back: w0: why w0; w1: why w1; w2: why w2" in done.reason
        if isinstance(done, End):
            assert (done.outcome, done.code) == ("failed", 1)


def test_a_joiner_that_dies_switching_is_a_no_of_its_own() -> None:
    drive = switching()
    drive.voted("w0", "w1", only=("w0", "w1"))
    assert "w2 (to be rank 2) ended while switching" in old_world_goes_on(
        drive, drive.feed(Exited(worker="w2", code=1))
    )
    yes = switching()
    yes.voted(only=("w0", "w1"))
    assert the(End, yes.feed(Exited(worker="w2", code=1))).outcome == "failed"


def test_a_rank_that_ends_instead_of_voting_has_said_no() -> None:
    drive = switching()
    drive.voted("w0", "w2", only=("w0", "w2"))
    actions = drive.feed(Exited(worker="w1", code=0))
    assert "aborted" in kinds(actions)
    assert not of(End, actions), "the other rank is about to end well too"
    assert the(End, drive.feed(Exited(worker="w0", code=0))).outcome == "finished"


def test_a_commit_that_is_fenced_off_fails_the_job() -> None:
    drive = switching()
    drive._shell = lambda _: None  # type: ignore[method-assign]
    drive.voted()
    assert (
        "another generation has become active"
        in the(End, drive.feed(Committed(generation=2, won=False))).reason
    )


# --- queue, ends, restarts ---------------------------------------------------------------------------------------


def test_requests_are_queued_and_the_last_wish_wins() -> None:
    drive = preparing()
    assert kinds(drive.wish(workers=4)) == ["queued"]
    superseded = the(Answer, drive.wish(workers=2, cause="resize --workers 2"))
    assert (superseded.wish, superseded.outcome) == (2, "refused")
    actions = drive.fail("w2", 2, "x")
    assert [(a.wish, a.outcome) for a in of(Answer, actions)] == [(1, "aborted"), (3, "unchanged")]


def test_a_queued_wish_starts_once_the_old_world_is_retired() -> None:
    drive = switching()
    drive.wish(workers=4)
    assert not of(Number, drive.voted())
    for worker in ("w0", "w1"):
        assert not of(Number, drive.say(worker, Retired(generation=2)))
    assert the(Number, drive.say("w2", Retired(generation=2)))


def test_ranks_that_end_abort_what_is_prepared_and_then_finish_the_job() -> None:
    drive = preparing()
    assert old_world_goes_on(drive, drive.feed(Exited(worker="w0", code=0))) == "the job is ending"
    assert "the job is ending" in the(Answer, drive.wish(workers=3)).reason
    actions = drive.feed(Exited(worker="w1", code=0))
    assert the(End, actions).outcome == "finished"
    assert [worker for worker, _ in sent(Stop, actions)] == ["w2", "w3"]


def test_a_plain_job_finishes_only_when_every_rank_has_ended() -> None:
    drive = Drive(enter=False)
    drive._shell = lambda _: None  # type: ignore[method-assign]  (workers take their time)
    drive.enter("n0", 2)
    drive.feed(Started(worker="w0", pid=1, boot_rank=0), Exited(worker="w0", code=0))
    assert not of(End, drive.actions)  # w1 has not even been started
    drive.feed(Started(worker="w1", pid=2, boot_rank=1), Exited(worker="w1", code=0))
    assert the(End, drive.actions).outcome == "finished"


def test_a_failed_rank_fails_the_job_and_every_wish() -> None:
    drive = preparing()
    drive.wish(workers=4)
    actions = drive.feed(Exited(worker="w1", code=-11))
    end = the(End, actions)
    assert (end.worker, end.rank, end.code) == ("w1", 1, -11)
    assert end.reason == "worker w1 (rank 1) failed: killed by SIGSEGV"
    assert [(a.wish, a.outcome) for a in of(Answer, actions)] == [(1, "failed"), (2, "failed")]


def test_every_restart_counts_and_the_budget_is_the_jobs() -> None:
    """Known complaint 13: the restart budget is per agent."""
    drive = Drive(max_restarts=1).first_world()
    assert the(Restart, drive.feed(Exited(worker="w1", code=1)))
    drive.feed(Exited(worker="w0", code=-9))  # killed by the restart: no failure of its own
    assert drive.state.restarts == 1
    again = [worker.id for worker in drive.state.workers.values() if worker.boot_rank is not None]
    drive.hello(*again)
    drive.prepared()
    drive.voted()
    assert drive.state.world is not None
    assert drive.state.world.generation == 2
    assert the(End, drive.feed(Exited(worker=again[1], code=1))).outcome == "failed"


def training(**more: Any) -> Drive:
    """Two ranks that have made steps, in a job that keeps processes over a restart."""
    drive = Drive(keeps=True, max_restarts=2, **more).first_world()
    drive.progress(0)
    drive.progress(5)
    return drive


def test_a_failure_waits_a_moment_for_the_end_of_a_peer_that_explains_it() -> None:
    drive = training()
    assert not sent(Leave, drive.say("w0", Ended(code=1)))
    assert next_deadline(drive.state) == drive.now + PATIENCE_S
    restart = the(Restart, drive.feed(Exited(worker="w1", code=-9)))
    assert restart.keep
    assert "worker w1 (rank 1) failed: killed by SIGKILL" in restart.reason
    assert not drive.state.failing


def test_the_first_to_fail_is_told_to_leave_and_killed_if_it_does_not() -> None:
    drive = training()
    drive.say("w1", Ended(code=1))
    drive.say("w0", Ended(code=1))
    drive.now += PATIENCE_S
    assert sent(Leave, drive.feed(Tick())) == [("w1", Leave())]
    assert not sent(Leave, drive.feed(Tick()))
    drive.now += LEAVE_TIMEOUT_S
    assert the(Kill, drive.feed(Tick())).worker == "w1"
    restart = the(Restart, drive.feed(Exited(worker="w1", code=1)))
    assert restart.keep
    assert "worker w1 (rank 1) failed" in restart.reason


def test_where_nothing_follows_whose_script_has_failed_is_told_to_leave_at_once() -> None:
    drive = training()
    drive.feed(StopAsked(reason="liverun stop"))
    assert sent(Leave, drive.say("w0", Ended(code=1))) == [("w0", Leave())]
    drive = training()
    assert sent(Leave, drive.say("w2", Ended(code=1))) == [("w2", Leave())]  # a standby: nobody misses it
    drive = Drive(keeps=True).first_world()  # no restart is left
    drive.say("w0", Ended(code=1))
    assert sent(Leave, drive.feed(Exited(worker="w1", code=-9))) == [("w0", Leave())]


def test_an_attempt_without_a_step_keeps_no_process() -> None:
    drive = Drive(keeps=True, max_restarts=2).first_world()
    drive.progress(5)  # where it began, from a checkpoint
    assert not the(Restart, drive.feed(Exited(worker="w1", code=1))).keep


def test_the_world_that_was_lost_comes_back() -> None:
    drive = training()
    drive.resized(workers=4, layout=Layout(tp=2))
    drive.feed(Exited(worker="w1", code=-9))
    boot = of(Boot, drive.actions)[-1]
    assert [node.boot for node in boot.nodes] == [4]
    drive.hello(*(worker.id for worker in drive.state.workers.values() if worker.boot_rank is not None))
    drive.prepared()
    drive.voted()
    assert drive.state.world is not None
    assert (drive.state.world.layout, len(drive.ranks())) == (Layout(tp=2), 4)


def test_a_dead_standby_is_replaced_but_not_for_ever() -> None:
    drive = Drive(nproc=1, standbys=1)
    drive.hello("w0")
    drive.prepared()
    drive.voted()
    forks = []
    for _ in range(5):
        standby = [w.id for w in drive.state.workers.values() if w.boot_rank is None]
        if standby:
            forks += of(Fork, drive.feed(Exited(worker=standby[0], code=3)))
    assert len(forks) == 2
    assert "no more are started" in drive.state.reason
    assert "this job has 1" in the(Answer, drive.wish(workers=2)).reason


def test_stop_brings_every_rank_to_the_same_boundary_before_it_stops_them() -> None:
    drive = preparing()
    actions = drive.feed(StopAsked(reason="SIGTERM"))
    assert old_world_goes_on(drive, actions) == "the job is ending"
    assert [worker for worker, _ in sent(Where, actions)] == ["w0", "w1"]
    assert "the job is ending" in the(Answer, drive.wish(workers=3)).reason
    drive.progress(7, "w0")
    arms = drive.progress(8, "w1")
    assert [arm.step for _, arm in sent(Arm, arms)] == [10, 10]
    late = drive.say("w1", Armed(generation=1, step=10, late=True, at_step=11))
    assert len(sent(Cancel, late)) == 2
    drive.progress(12, "w0")
    assert [arm.step for _, arm in sent(Arm, drive.progress(11, "w1"))] == [16, 16]
    drive.say("w0", Armed(generation=1, step=16, late=False, at_step=12))
    drive.say("w1", Armed(generation=1, step=16, late=False, at_step=12))
    drive.now += 0.1
    assert len(sent(Where, drive.feed(Tick()))) == 2
    assert not of(End, drive.progress(16, "w0"))
    done = drive.progress(16, "w1")
    assert [worker for worker, _ in sent(Stop, done)] == ["w0", "w1", "w2", "w3"]
    assert the(End, done).outcome == "stopped"
    assert next_deadline(drive.state) is None
    assert not drive.feed(StopAsked(reason="SIGTERM"), Tick())


def test_stop_does_not_wait_for_a_rank_that_hangs_or_has_ended() -> None:
    drive = Drive().first_world()
    drive.feed(StopAsked(reason="SIGTERM"))
    drive.progress(7, "w0")
    drive.now += drive.state.stop_patience_s
    assert the(End, drive.feed(Tick())).outcome == "stopped"
    for code in (0, -9):
        other = Drive().first_world()
        other.feed(StopAsked(reason="SIGTERM"))
        assert the(End, other.feed(Exited(worker="w1", code=code))).outcome == "stopped"


def test_stop_before_the_first_world_is_at_once() -> None:
    drive = Drive()
    drive.hello("w0")
    assert the(End, drive.feed(StopAsked(reason="SIGTERM"))).outcome == "stopped"


EVENTS = st.sampled_from(
    [
        "wish",
        "checked",
        "refused",
        "prepared",
        "failed",
        "progress",
        "armed",
        "late",
        "yes",
        "no",
        "retired",
        "exit",
        "tick",
        "hello",
        "done",
        "stop",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 5), st.integers(1, 4)), max_size=60))
def test_whatever_happens_generations_grow_and_there_is_one_world(steps: list[tuple[str, int, int]]) -> None:
    drive = Drive().first_world()
    commits: list[int] = []
    for what, index, size in steps:
        worker = f"w{index}"
        proposal = drive.state.proposal
        generation = proposal.generation if proposal is not None and proposal.generation else 1
        step = proposal.step if proposal is not None and proposal.step else 1
        active = drive.state.world.generation if drive.state.world else 0
        event: Event = {
            "wish": Wished(wish=Wish(id=1000 + len(drive.actions), workers=size)),
            "checked": Said(worker=worker, message=Checked(generation=generation, refusal=None)),
            "refused": Said(worker=worker, message=Checked(generation=generation, refusal="no")),
            "prepared": Said(worker=worker, message=Prepared(generation=generation, prepare_s=0.1)),
            "failed": Said(worker=worker, message=Failed(generation=generation, reason="x")),
            "progress": Said(worker=worker, message=Progress(generation=active, step=size)),
            "armed": Said(
                worker=worker, message=Armed(generation=generation, step=step, late=False, at_step=1)
            ),
            "late": Said(
                worker=worker, message=Armed(generation=generation, step=step, late=True, at_step=1)
            ),
            "yes": Said(worker=worker, message=Switched(generation=generation, ok=True)),
            "no": Said(worker=worker, message=Switched(generation=generation, ok=False, reason="x")),
            "retired": Said(worker=worker, message=Retired(generation=active, leaves=True)),
            "exit": Exited(worker=f"w{2 + index}", code=1),
            "done": Exited(worker=worker, code=0),
            "hello": Said(worker=worker, message=Hello(worker=worker, pid=1, layout=None)),
            "stop": StopAsked(reason="x") if index == 0 else Tick(),
            "tick": Tick(),
        }[what]
        drive.now += size
        before = drive.state.world
        commits += [c.world.generation for c in of(Commit, drive.feed(event))]
        after = drive.state.world
        assert commits == sorted(set(commits))
        if after is not None:
            assert len(set(after.ranks)) == len(after.ranks)
            assert after.layout.misfit(len(after.ranks)) is None
            assert before is None or after.generation >= before.generation
        if drive.state.phase == "ending":
            assert drive.state.proposal is None
    answered = [answer.wish for answer in of(Answer, drive.actions)]
    assert len(answered) == len(set(answered))  # nobody is answered twice
