"""Notices: what each source says, and what an agent does about it. Metadata services are fakes on loopback."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from launcher_bed import FAKE_WORKER, Bed, until
from test_decide import Drive
from test_many_nodes import Nodes, ranks

from launcher.metadata import Aws, Azure, Gcp, Service
from launcher.model import End, NodeLeaving, Send, Tick
from launcher.notices import Notice, NoticeFile, Notices, Source, UnheardError, parse_notices
from liverun.messages import Armed, Progress, Saved

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
"""by the clock of the fakes, which is not this host's"""
SPOT, ADVICE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
GCP, AZURE = "/computeMetadata/v1/instance/preempted", "/metadata/scheduledevents"
MACHINE = "/metadata/instance/compute"


class Cloud:
    """A metadata service: pages that a test sets, the rules of each cloud, and what was asked."""

    def __init__(self) -> None:
        self.pages: dict[str, str] = {MACHINE: '{"name": "spot_1"}'}
        self.asked: list[str] = []
        self.token = 0
        """number of the token in force"""
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.url = self._do(self._open())

    def _do(self, doing: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(10.0)

    async def _open(self) -> str:
        app = web.Application()
        app.add_routes([web.put("/latest/api/token", self._put), web.get("/{path:.*}", self._get)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _put(self, request: web.Request) -> web.Response:
        self.asked.append("token")
        assert request.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        self.token += 1
        return web.Response(text=f"token-{self.token}")

    async def _get(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path.startswith("/latest/"):
            if request.headers.get("X-aws-ec2-metadata-token") != f"token-{self.token}":
                return web.Response(status=401)
        elif request.path.startswith("/computeMetadata/"):
            assert request.headers["Metadata-Flavor"] == "Google"
            assert request.query["wait_for_change"] == "true"
            while request.query.get("last_etag") == self._tag(request.path):
                await self._changed.wait()
        else:
            assert request.headers["Metadata"] == "true"
            assert request.query["api-version"]
        page = self.pages.get(request.path)
        headers = {"Date": format_datetime(NOW, usegmt=True), "ETag": self._tag(request.path)}
        return web.Response(status=404 if page is None else 200, text=page, headers=headers)

    def _tag(self, path: str) -> str:
        return f"{zlib.crc32(self.pages.get(path, '').encode()):x}"

    def show(self, path: str, page: str) -> None:
        """Set a page; who waits for its change hears of it."""

        async def change() -> None:
            self.pages[path] = page
            self._changed.set()
            self._changed = asyncio.Event()

        self._do(change())

    def close(self) -> None:
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    service = Cloud()
    yield service
    service.close()


def ask(source: Source, times: int = 1) -> list[Notice | None]:
    """Ask a source on a loop of its own."""

    async def all_times() -> list[Notice | None]:
        try:
            return [await source.ask() for _ in range(times)]
        finally:
            await source.aclose()

    return asyncio.run(all_times())


def aws(cloud: Cloud, said: list[str], *, on_advice: bool = False) -> Aws:
    return Aws(Service(cloud.url), say=said.append, on_advice=on_advice)


def test_aws_a_spot_action_is_a_notice_with_its_time_by_the_services_clock(cloud: Cloud) -> None:
    assert ask(aws(cloud, [])) == [None]
    cloud.pages[SPOT] = '{"action": "terminate", "time": "2026-03-01T12:01:50Z"}'
    (notice,) = ask(aws(cloud, []))
    assert notice is not None
    assert (notice.source, notice.deadline_s, notice.move_s) == ("aws", 110.0, 95.0)
    assert "terminate this spot instance at 2026-03-01T12:01:50Z" in notice.reason


def test_aws_a_token_that_is_refused_is_renewed_once(cloud: Cloud) -> None:
    source = aws(cloud, [])

    async def twice() -> None:
        assert await source.ask() is None
        cloud.token += 1  # what the service gave out counts no more
        assert await source.ask() is None
        await source.aclose()

    asyncio.run(twice())
    assert cloud.asked == ["token", SPOT, ADVICE, SPOT, "token", SPOT, ADVICE]


def test_aws_advice_to_leave_is_said_once_and_acted_on_only_when_asked(cloud: Cloud) -> None:
    cloud.pages[ADVICE] = '{"noticeTime": "2026-03-01T11:59:00Z"}'
    said: list[str] = []
    assert ask(aws(cloud, said), 3) == [None] * 3
    assert len(said) == 1
    assert "--notices aws-rebalance" in said[0]
    (notice,) = ask(aws(cloud, said, on_advice=True))
    assert notice is not None
    assert notice.deadline_s == 120.0


def test_gcp_is_heard_through_a_long_poll(cloud: Cloud) -> None:
    cloud.pages[GCP] = "FALSE"
    source = Gcp(Service(cloud.url))

    async def listen() -> tuple[Notice | None, Notice | None]:
        first = await source.ask()
        waiting = asyncio.create_task(source.ask())
        while len(cloud.asked) < 2:  # noqa: ASYNC110  (the service runs in another thread)
            await asyncio.sleep(0.005)
        assert not waiting.done()
        await asyncio.to_thread(cloud.show, GCP, "TRUE")
        second = await asyncio.wait_for(waiting, 10.0)
        await source.aclose()
        return first, second

    first, second = asyncio.run(listen())
    assert first is None
    assert second is not None
    assert second.deadline_s == 30.0


@pytest.mark.parametrize(
    ("event", "deadline_s"),
    [
        ({"EventType": "Preempt", "Resources": ["spot_0"]}, None),  # another machine of the scale set
        ({"EventType": "Freeze", "Resources": ["spot_1"]}, None),
        ({"EventType": "Preempt", "Resources": ["spot_1"], "NotBefore": "Sun, 01 Mar 2026 12:00:40 GMT"}, 40.0),
        ({"EventType": "Preempt", "Resources": ["spot_1"], "NotBefore": "at noon"}, 30.0),
        ({"EventType": "Terminate", "Resources": ["spot_1"], "EventStatus": "Started", "NotBefore": ""}, 5.0),
    ],
)
def test_azure_an_event_that_ends_this_machine_is_a_notice(
    cloud: Cloud, event: dict[str, Any], deadline_s: float | None
) -> None:
    cloud.pages[AZURE] = json.dumps({"DocumentIncarnation": 1, "Events": ["odd", event]})
    (notice,) = ask(Azure(Service(cloud.url)))
    assert (None if notice is None else notice.deadline_s) == deadline_s
    assert cloud.asked == [MACHINE, AZURE]  # and nothing is acknowledged


@pytest.mark.parametrize(
    ("page", "named"),
    [
        ("[]", "no JSON object"), ("{", "no JSON object"), ("[" * 60000, "no JSON object"),
        ('{"action": 5}', "action is no text"), ('{"time": "2026-03-01T12:01:50Z"}', "action is no text"),
        ('{"action": "stop"}' + " " * 70000, "more than 65536 bytes"),
    ],
)  # fmt: skip
def test_an_answer_that_is_malformed_or_too_long_is_no_notice_and_is_named(
    cloud: Cloud, page: str, named: str
) -> None:
    cloud.pages[SPOT] = page
    with pytest.raises(UnheardError, match=named):
        ask(aws(cloud, []))


def test_a_time_that_cannot_be_read_leaves_the_usual_lead(cloud: Cloud) -> None:
    cloud.pages[SPOT] = '{"action": "stop", "time": [1]}'
    (notice,) = ask(aws(cloud, []))
    assert notice is not None
    assert notice.deadline_s == 120.0
    past = NOW - timedelta(minutes=5)
    cloud.pages[SPOT] = json.dumps({"action": "stop", "time": past.isoformat()})
    (notice,) = ask(aws(cloud, []))
    assert notice is not None
    assert notice.deadline_s == 2.0


def test_no_proxy_of_the_environment_is_used(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert ask(aws(cloud, [])) == [None]


def test_a_source_that_does_not_answer_is_said_once_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.notices.FIRST_BACKOFF_S", 0.001)

    class Late:
        name, poll_s, asked = "late", 0.001, 0

        async def ask(self) -> Notice | None:
            self.asked += 1
            if self.asked < 5:
                raise UnheardError("nobody is there")
            return None if self.asked < 8 else Notice(source="late", reason="go", deadline_s=9.0)

        async def aclose(self) -> None:
            pass

    async def listen() -> tuple[list[str], Notice]:
        said: list[str] = []
        heard: asyncio.Queue[Notice] = asyncio.Queue()
        notices = Notices([Late()], heard=heard.put_nowait, say=said.append)
        notices.start()
        try:
            return said, await asyncio.wait_for(heard.get(), 10.0)
        finally:
            await notices.stop()

    said, notice = asyncio.run(listen())
    assert said == ["no notices of late for now: nobody is there; it is asked again"]
    assert notice.reason == "go"


@pytest.mark.parametrize(
    ("text", "deadline_s"), [("", 30.0), ("45\n", 45.0), ("soon\n9", 30.0), ("nan", 2.0), ("-1", 2.0), ("\0" * 9000, 30.0)]
)
def test_the_first_line_of_a_notice_file_may_be_the_seconds(tmp_path: Path, text: str, deadline_s: float) -> None:
    path = tmp_path / "notice"
    assert ask(NoticeFile(path, usual_s=30.0)) == [None]
    path.write_text(text)
    (notice,) = ask(NoticeFile(path, usual_s=30.0))
    assert notice is not None
    assert notice.deadline_s == deadline_s
    with pytest.raises(UnheardError, match="cannot be read"):
        ask(NoticeFile(tmp_path, usual_s=30.0))


def test_what_cannot_give_notice_is_refused(bed: Bed) -> None:
    assert parse_notices("", {}) == parse_notices("none", {}) == ()
    assert parse_notices("AWS, gcp,aws", {}) == ("aws", "gcp")
    done = bed.cli("--notice-signal", "SIGKILL", str(FAKE_WORKER))
    sentence = "--notice-signal 'SIGKILL' is not one signal that can be handled; write it like SIGUSR1"
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    with pytest.raises(ValueError, match="--notices 'ibm' is none of none, aws, aws-rebalance, gcp, azure"):
        parse_notices("aws,ibm", {})
    with pytest.raises(ValueError, match="LIVERUN_GCP_METADATA_URL='metadata' is no address"):
        parse_notices("gcp", {"LIVERUN_GCP_METADATA_URL": "metadata"})


@pytest.mark.parametrize("meet", [True, False])
def test_a_checkpoint_is_taken_at_the_end_only_where_all_ranks_met(*, meet: bool) -> None:
    """Ranks that did not come to a common step would save two different ones."""
    drive = Drive(nproc=2, standbys=1, saves=True, stop_patience_s=15.0)
    drive.first_world()
    drive.feed(NodeLeaving(node="n0", reason="notice", timeout_s=50.0, save=True))
    generation = drive.state.world.generation
    for worker in ("w0", "w1"):
        drive.say(worker, Progress(generation=generation, step=4))
    for worker in ("w0", "w1"):
        drive.say(worker, Armed(generation=generation, step=6, late=False, at_step=4))
    drive.now += 49.0  # the patience is that of the notice
    actions = drive.feed(Tick())
    assert not any(isinstance(action, End) for action in actions)
    if meet:
        for worker in ("w0", "w1"):
            actions = drive.say(worker, Progress(generation=generation, step=6))
    else:
        drive.now += 1.0
        actions = drive.feed(Tick())
    stops = {action.worker: action.message.save for action in actions if isinstance(action, Send)}
    assert stops == {"w0": meet, "w1": meet, "w2": False}
    drive.say("w0", Saved(request=0, step=6, ok=True, path="/c/step-6"))
    assert drive.state.last_checkpoint["step"] == 6


# --- agents -------------------------------------------------------------------------------------------------------


def test_a_notice_moves_the_work_away_though_the_step_is_long(bed: Bed) -> None:
    """Known complaint 18: what waits for the training loop is not done while it compiles, warms up or evaluates."""
    file, step_end = bed.folder / "notice", bed.folder / "step_end"
    behave = {f"n{node}.w{slot}": {"long_step": str(step_end)} for node in (0, 1) for slot in (0, 1)}
    behave |= {f"w{slot}": {"long_step": str(step_end)} for slot in (0, 1)}
    nodes = Nodes(bed, "1:2", FAKE_BEHAVE=json.dumps(behave))
    first, second = nodes.start(), nodes.start(2, "--notice-file", str(file))
    first.event("active")
    until("a long step on each node", lambda: "long step" in first.stdout() and "long step" in second.stdout())
    file.write_text("50\n")
    said = second.event("notice")
    assert (said["source"], said["deadline_s"]) == ("file", 50.0)
    assert f"the notice file {file} is there" in first.event("node_leaving")["reason"]
    first.event("ready", 2)  # the world without the node is prepared beside the step
    assert second.process.poll() is None
    step_end.touch()
    assert second.wait() == 75, second.stderr()
    assert first.event("active", 2)["to"]["size"] == 2
    assert nodes.status()["restarts"]["used"] == 0
    assert first.finish() == 0


def test_a_cloud_preempts_the_node_with_the_store_and_no_work_is_lost(bed: Bed, cloud: Cloud) -> None:
    """Known complaint 19: an advance warning is ignored, and a whole interval of work is lost."""
    cloud.pages[GCP] = "FALSE"
    nodes = Nodes(bed, "1:2")
    first = nodes.start(2, "--notices", "gcp", LIVERUN_GCP_METADATA_URL=cloud.url)
    second = nodes.start()
    first.event("active")
    cloud.show(GCP, "TRUE")
    assert first.wait() == 75, first.stderr()
    assert first.event("notice")["reason"] == "GCP is preempting this instance"
    assert "restart" not in first.stderr() + second.stderr()
    status = until("the world of the other", lambda: (s := nodes.status())["world"]["size"] == 2 and s)
    assert (ranks(status), status["restarts"]["used"]) == ({0: "n1", 1: "n1"}, 0)
    assert second.finish() == 0, second.stderr()


@pytest.mark.parametrize("saves", [True, False])
def test_a_job_of_one_node_stops_at_one_step_and_may_be_queued_again(bed: Bed, *, saves: bool) -> None:
    words = ("--checkpoint-dir", str(bed.folder / "ckpt")) if saves else ()
    file = bed.folder / "notice"
    agent = bed.fake(2, 0, "--notice-signal", "SIGUSR1", "--notice-file", str(file), *words)
    agent.signal(signal.SIGUSR1)
    agent.event("notice")
    file.touch()  # again, from elsewhere
    agent.signal(signal.SIGUSR1)
    agent.signal(signal.SIGTERM)  # as a cluster sends it after its notice
    assert agent.wait() == 75, agent.stderr()
    assert "SIGTERM" not in agent.stderr()
    kinds = agent.kinds()
    assert [kinds.count(kind) for kind in ("notice", "stopped")] == [1, 1]
    stops = {line.partition("before ")[2] for line in agent.stdout().splitlines() if "stops before" in line}
    assert len(stops) == 1, agent.stdout()
    step = int(stops.pop().removeprefix("step "))
    if saves:
        assert agent.event("checkpoint")["step"] == step
    else:
        assert "checkpoint" not in kinds
    record = json.loads((agent.folder / "job.json").read_text())
    assert (record["state"], record["exit_code"]) == ("stopped", 75)


def test_a_plain_script_ends_by_the_deadline_of_the_notice(bed: Bed) -> None:
    """What ignores SIGTERM would have 30 s; the notice gives it two, and the agent says what cannot be asked."""
    file = bed.folder / "notice"
    script = bed.script(
        "deaf.py",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
        "while True: time.sleep(0.05)\n",
    )
    words = ("--notices", "aws", "--notice-file", str(file), script)
    agent = bed.launch(*words, LIVERUN_AWS_METADATA_URL="http://127.0.0.1:9")
    until("the script", lambda: "deaf" in agent.stdout())
    file.write_text("2\n")
    agent.event("notice")
    assert agent.process.wait(10.0) == 75, agent.stderr()
    assert agent.stderr().count("no notices of aws for now: http://127.0.0.1:9/latest/api/token cannot be asked") == 1
