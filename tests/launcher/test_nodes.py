"""What is decided when nodes come and go, without processes, sockets or clocks."""

from __future__ import annotations

from test_decide import Drive, of, the

from launcher.decide import next_deadline
from launcher.failing import PATIENCE_S
from launcher.handover import dump_state, load_state
from launcher.model import (
    Answer,
    Boot,
    Dismiss,
    End,
    HandOver,
    HandoverFailed,
    NodeAway,
    NodeLeaving,
    NodeLost,
    Phase,
    Restart,
    Send,
    Tick,
)
from launcher.nodes import JOIN_PATIENCE_S
from liverun.layout import Layout
from liverun.messages import Check, Checked, Ended, Leave, Retired, Stop


class Nodes(Drive):
    """Several nodes of two workers each; workers say Hello as soon as they are started."""

    def __init__(self, count: int, **more: object) -> None:
        super().__init__(enter=False, **{"min_nodes": 1, "max_nodes": 4, "last_call_s": 0.0, **more})
        self.enter("n0", leads=True)
        self.greet()
        self.go()
        for number in range(1, count):
            self.join(f"n{number}")

    def greet(self) -> None:
        self.hello(*(worker.id for worker in self.state.workers.values() if not worker.joined))

    def go(self) -> None:
        """Take what is proposed to its end."""
        while self.state.proposal is not None:
            if self.state.proposal.phase is Phase.PROPOSED:
                self.checked()
            self.prepared()
            if self.state.world is not None:
                self.arm()
            self.voted()
            if self.state.retiring is not None:
                generation = self.state.world.generation
                for worker in sorted(self.state.retiring.waiting):
                    leaves = worker not in self.ranks()
                    self.say(worker, Retired(generation=generation, leaves=leaves))

    def arm(self) -> None:
        from liverun.messages import Armed, Progress

        for worker in self.ranks():
            self.say(worker, Progress(generation=self.state.world.generation, step=5))
        step = self.state.proposal.step
        for worker in self.ranks():
            self.say(worker, Armed(generation=self.generation, step=step, late=False, at_step=5))

    def join(self, name: str, **more: object) -> None:
        self.enter(name, **more)
        self.greet()
        self.go()

    def where(self) -> list[str]:
        return [self.state.workers[worker].node for worker in self.ranks()]


def test_a_node_that_arrives_joins_by_a_live_change_and_ranks_stay_node_by_node() -> None:
    drive = Nodes(3)
    assert drive.where() == ["n0", "n0", "n1", "n1", "n2", "n2"]
    assert drive.ranks()[:2] == ("w0", "w1")


def test_a_pinned_node_takes_its_place_before_those_that_came_earlier() -> None:
    drive = Nodes(1)
    drive.join("n1", pin=0)
    assert drive.where() == ["n1", "n1", "n0", "n0"]


def test_who_does_not_fit_waits_as_a_spare_and_is_asked_again_with_the_next_node() -> None:
    """Known complaint 31: newcomers arrive and nobody decides."""
    drive = Nodes(2)
    drive.enter("n2")
    drive.greet()
    drive.checked("global batch size 8 does not divide by 6")
    assert drive.where() == ["n0", "n0", "n1", "n1"]
    assert drive.state.proposal is None
    drive.now += 3600
    drive.feed(Tick())
    assert drive.state.proposal is None
    drive.join("n3")
    assert drive.where() == ["n0", "n0", "n1", "n1", "n2", "n2", "n3", "n3"]


def test_a_node_that_somebody_left_out_stays_out_until_asked_for() -> None:
    drive = Nodes(2)
    drive.wish(nodes=1)
    drive.go()
    assert drive.where() == ["n0", "n0"]
    drive.feed(Tick())
    assert drive.state.proposal is None
    drive.wish(nodes=2)
    drive.go()
    assert drive.where() == ["n0", "n0", "n1", "n1"]


def test_a_drain_takes_fewer_workers_where_the_model_does_not_fit_the_rest() -> None:
    drive = Nodes(3)
    actions = drive.feed(NodeLeaving(node="n2", reason="SIGTERM", timeout_s=30))
    assert not of(Dismiss, actions)
    refused = Checked(generation=drive.generation, refusal="the batch does not divide by 4")
    drive.say(drive.ranks()[0], refused)
    assert len(drive.state.proposal.target.ranks) == 3
    drive.go()
    assert drive.where() == ["n0", "n0", "n1"]
    assert "n2" not in drive.state.nodes
    assert [action.node for action in of(Dismiss, drive.actions)] == ["n2"]


def test_a_drain_outranks_a_resize_that_waits() -> None:
    drive = Nodes(2)
    drive.wish(workers=3)
    drive.wish(workers=1)
    actions = drive.feed(NodeLeaving(node="n1", reason="liverun drain", timeout_s=30, wish=77))
    assert [(a.wish, a.outcome) for a in of(Answer, actions)] == [(2, "refused")]
    assert "superseded by the drain of node n1" in the(Answer, actions).reason
    drive.wish(workers=2)
    assert "drain n1 comes first" in of(Answer, drive.actions)[-1].reason


def test_a_node_that_has_to_go_and_leaves_too_few_stops_the_job_cleanly() -> None:
    drive = Nodes(2, min_nodes=1)
    drive.state = type(drive.state)(**{**vars(drive.state), "min_nodes": 2})
    actions = drive.feed(NodeLeaving(node="n1", reason="SIGTERM", timeout_s=30))
    assert drive.state.stopping is not None
    assert "node n1 leaves (SIGTERM), and the job needs 2 nodes" in drive.state.stopping.reason
    assert not of(Stop, actions)


def test_the_loss_of_a_node_costs_one_restart_and_that_of_a_spare_none() -> None:
    drive = Nodes(2, max_nodes=2, max_restarts=1)
    drive.enter("n2")
    drive.greet()
    assert not of(Restart, drive.feed(NodeLost(node="n2", reason="silence")))
    restart = the(Restart, drive.feed(NodeLost(node="n1", reason="silence")))
    assert restart.nodes == ("n0",)
    assert drive.state.restarts == 1
    assert [node.id for node in of(Boot, drive.actions)[-1].nodes] == ["n0"]
    drive.greet()
    drive.go()
    assert drive.where() == ["n0", "n0"]
    assert the(End, drive.feed(NodeLost(node="n0", reason="silence"))).outcome == "failed"


def test_a_failure_is_not_told_from_the_loss_of_a_node_while_its_connection_is_broken() -> None:
    drive = Nodes(2, max_restarts=1, keeps=True)
    drive.progress(7)
    drive.progress(9)
    drive.feed(NodeAway(node="n1", away=True))
    drive.say("w0", Ended(code=1))
    drive.now += PATIENCE_S
    assert not of(Send, drive.feed(Tick()))
    assert next_deadline(drive.state) is None
    restart = the(Restart, drive.feed(NodeLost(node="n1", reason="silence")))
    assert (restart.keep, restart.nodes) == (True, ("n0",))
    drive = Nodes(2, max_restarts=1, keeps=True)
    drive.feed(NodeAway(node="n1", away=True))
    drive.say("w0", Ended(code=1))
    drive.now += PATIENCE_S
    assert of(Send, drive.feed(NodeAway(node="n1", away=False))) == [Send(worker="w0", message=Leave())]


def test_whoever_drains_a_node_that_is_lost_meanwhile_is_told() -> None:
    drive = Nodes(2, max_restarts=1)
    drive.feed(NodeLeaving(node="n1", reason="liverun drain", timeout_s=30, wish=7))
    answers = of(Answer, drive.feed(NodeLost(node="n1", reason="silence")))
    assert {(answer.wish, answer.ok) for answer in answers} == {(7, False)}
    assert "node n1 (host-n1) is lost" in answers[0].reason


def test_a_restart_with_fewer_nodes_takes_a_layout_that_fits() -> None:
    drive = Nodes(2, max_restarts=1, layout=None)
    drive.wish(layout=Layout(tp=4))
    drive.go()
    drive.state = type(drive.state)(**{**vars(drive.state), "layout": Layout(tp=4)})
    drive.feed(NodeLost(node="n1", reason="silence"))
    drive.greet()
    drive.go()
    assert drive.state.world.layout == Layout(tp=2)


def test_a_world_that_the_batch_does_not_allow_after_a_loss_is_made_smaller() -> None:
    drive = Nodes(3, max_restarts=1)
    drive.feed(NodeLost(node="n2", reason="silence"))
    drive.greet()
    assert drive.state.proposal is not None
    number, first = drive.generation, drive.members()[0]
    asked = [action for action in of(Send, drive.actions) if isinstance(action.message, Check)][-1]
    assert asked == Send(worker=first, message=Check(generation=number, layout=Layout(), world_size=4))
    drive.say(first, Checked(generation=number, refusal="the batch is not a multiple of 4"))
    spare = next(worker for worker in drive.state.workers.values() if worker.state == "standby")
    drive.say(first, Checked(generation=number + 1, refusal=None))
    drive.prepared()
    drive.voted()
    assert len(drive.ranks()) == 3
    assert spare.id not in drive.ranks()
    assert spare.boot_rank is None


def test_a_plain_script_starts_again_once_for_all_who_came() -> None:
    drive = Drive(enter=False, min_nodes=1, max_nodes=3, last_call_s=0.0)
    drive.enter("n0", leads=True)
    drive.enter("n1")
    drive.enter("n2")
    assert len(of(Restart, drive.actions)) == 0
    drive.now += JOIN_PATIENCE_S
    drive.feed(Tick())
    assert len(of(Restart, drive.actions)) == 1
    assert [node.id for node in of(Boot, drive.actions)[-1].nodes] == ["n0", "n1", "n2"]
    drive.now += JOIN_PATIENCE_S
    drive.feed(Tick())
    assert len(of(Restart, drive.actions)) == 1
    assert (drive.state.restarts, drive.state.membership_restarts) == (0, 1)


def test_the_controllers_node_hands_over_to_the_next_and_tries_another_if_that_fails() -> None:
    drive = Nodes(3, movable=True)
    drive.feed(NodeLeaving(node="n0", reason="SIGTERM", timeout_s=30))
    drive.go()
    assert drive.where() == ["n1", "n1", "n2", "n2"]
    assert the(HandOver, drive.actions).node == "n1"
    drive.feed(Tick())
    assert len(of(HandOver, drive.actions)) == 1
    drive.feed(HandoverFailed(node="n1", reason="no answer"))
    assert [action.node for action in of(HandOver, drive.actions)] == ["n1", "n2"]
    drive.feed(HandoverFailed(node="n2", reason="no answer"))
    assert drive.state.stopping is not None  # nobody can take it: the job ends together


def test_a_state_that_was_handed_over_decides_as_before() -> None:
    drive = Nodes(3, movable=True)
    drive.feed(NodeLeaving(node="n0", reason="SIGTERM", timeout_s=30))
    drive.go()
    values = dump_state(drive.state, without="n0")
    again = load_state(values, leads="n1", now=drive.now)
    assert set(again.nodes) == {"n1", "n2"}
    assert again.world == drive.state.world
    drive.state = again
    drive.wish(nodes=1)
    drive.go()
    assert drive.where() == ["n1", "n1"]
