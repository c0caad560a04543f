"""What is shown of workers' output, and where it lies: as torchrun has it, with the run folder's own logs beside."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from launcher_bed import Bed, until

from launcher.logs import Relay, as_lines

SAY = "import os, sys\nr = os.environ['RANK']\nprint('out', r)\nprint('err', r, file=sys.stderr)\n"


def shown(agent: object) -> tuple[list[str], list[str]]:
    lines = [line for line in agent.stderr().splitlines() if not line.startswith(("liverun:", "   "))]  # type: ignore[attr-defined]
    return sorted(agent.stdout().splitlines()), sorted(lines)  # type: ignore[attr-defined]


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_redirected_streams_lie_where_torchrun_puts_them_and_are_not_shown(bed: Bed) -> None:
    """Known complaint 28: interleaved logs. Ranks of the mapping may have more than one digit."""
    logs = bed.folder / "logs"
    agent = bed.launch(
        "--nproc-per-node", "11", "--log-dir", str(logs), "--rdzv-id", "r1", "-r", "0:3,1:1,10:2", bed.script("say.py", SAY),
    )  # fmt: skip
    assert agent.wait() == 0, agent.stderr()
    (run,) = logs.iterdir()
    assert run.name.startswith("r1_")
    assert tree(run) == ["attempt_0/0/stderr.log", "attempt_0/0/stdout.log", "attempt_0/1/stdout.log", "attempt_0/10/stderr.log"]
    assert (run / "attempt_0/10/stderr.log").read_text() == "err 10\n"
    out, err = shown(agent)
    assert out == sorted(f"[default{r}]:out {r}" for r in range(2, 11))
    assert err == sorted(f"[default{r}]:err {r}" for r in range(1, 10))
    for worker in range(11):  # our own run folder has everything all the same
        assert agent.log(f"w{worker}") == f"out {worker}\n"
        assert agent.log(f"w{worker}", "stderr") == f"err {worker}\n"


def test_teed_streams_are_shown_and_kept_with_the_prefix_asked_for(bed: Bed) -> None:
    logs = bed.folder / "logs"
    script = bed.script("say.py", SAY)
    for template, head in ((None, "[trainer{r}]:"), ("<${role_name}/${rank}/${local_rank}> ", "<trainer/{r}/{r}> ")):
        environ = {} if template is None else {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template}
        agent = bed.launch("--nproc-per-node", "2", "--role", "trainer", "--tee", "3", "--log-dir", str(logs), script, **environ)
        assert agent.wait() == 0
        assert shown(agent) == (
            [head.format(r=r) + f"out {r}" for r in range(2)], [head.format(r=r) + f"err {r}" for r in range(2)],
        )  # fmt: skip
    assert len(list(logs.iterdir())) == 2  # a folder of its own for each launch
    assert all(len(tree(run)) == 4 for run in logs.iterdir())


def test_only_filtered_local_ranks_are_shown_but_all_are_kept(bed: Bed) -> None:
    agent = bed.launch("--nproc-per-node", "3", "--local-ranks-filter", "0,2", bed.script("say.py", SAY))
    assert agent.wait() == 0
    assert shown(agent)[0] == ["[default0]:out 0", "[default2]:out 2"]
    assert agent.log("w1") == "out 1\n"


def test_only_filtered_global_ranks_are_shown_but_all_are_kept(bed: Bed) -> None:
    """Known complaint 28: local ranks only."""
    script = bed.script("say.py", SAY)
    agent = bed.launch("--nproc-per-node", "3", "--ranks-filter", "1", "--tee", "2:3", script)
    assert agent.wait() == 0
    assert shown(agent) == (["[default1]:out 1"], ["[default1]:err 1"])
    assert [agent.log(f"w{rank}") for rank in range(3)] == ["out 0\n", "out 1\n", "out 2\n"]
    both = bed.launch("--nproc-per-node", "3", "--ranks-filter", "0,1", "--local-ranks-filter", "1,2", script)
    assert both.wait() == 0
    assert shown(both)[0] == ["[default1]:out 1"]
    wrong = bed.cli("--ranks-filter", "one", script)
    assert (wrong.returncode, "--ranks-filter 'one' is no comma-separated list" in wrong.stderr) == (2, True)


def test_a_filter_by_global_rank_follows_the_rank_to_its_next_worker(bed: Bed) -> None:
    """Known complaint 28: whose lines are shown is a matter of rank, not of the place on a node."""
    agent = bed.fake(2, 1, "--ranks-filter", "1")
    until("the standby", lambda: agent.status()["nodes"][0]["standbys"] == 1)
    assert bed.cli("resize", "--replace", "1").returncode == 0
    assert bed.cli("resize", "--workers", "1").returncode == 0
    assert bed.cli("resize", "--workers", "2").returncode == 0
    assert agent.finish() == 0
    lines = agent.stdout().splitlines()
    assert "[default1]:w1 has rank 1 in generation 1" in lines
    assert "[default1]:w2 has rank 1 in generation 2" in lines
    assert not [line for line in lines if "w0 " in line]
    assert not [line for line in lines if "rank None" in line and "generation 4" in line]


def test_teed_lines_with_a_word_are_copied_to_one_file_of_all_ranks(bed: Bed) -> None:
    script = bed.script("fruit.py", "import sys\nfor w in ('apple pie', 'pear', 'a,b'):\n  print(w)\n  print(w, file=sys.stderr)\n")
    agent = bed.launch(
        "--nproc-per-node", "2", "--tee", "0:3,1:1", "--log-dir", str(bed.folder / "logs"),
        "--duplicate-stdout-filters", "apple,a,,b", "--duplicate_stderr_filters=pear", script,
    )  # fmt: skip
    assert agent.wait() == 0
    (run,) = (bed.folder / "logs").iterdir()
    copied = sorted((run / "attempt_0/filtered_stdout.log").read_text().splitlines())
    assert copied == ["[default0]:a,b", "[default0]:apple pie", "[default1]:a,b", "[default1]:apple pie"]
    assert (run / "attempt_0/filtered_stderr.log").read_text() == "[default0]:pear\n"
    unteed = bed.launch("--duplicate-stdout-filters", "apple", script)
    assert unteed.wait() == 0
    assert "duplicate filters look at what --tee tees, and nothing is" in unteed.stderr()


def test_every_attempt_has_a_folder_and_an_error_file(bed: Bed) -> None:
    script = bed.script(
        "fail.py",
        "import os, socket\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))).close()\n"
        "import time; time.sleep(0.2)\n"
        "raise ValueError('try ' + os.environ['TORCHELASTIC_RESTART_COUNT'])\n",
    )
    agent = bed.launch("--max-restarts", "1", "--log-dir", str(bed.folder / "logs"), "-r", "2", script)
    assert agent.wait() == 1
    (run,) = (bed.folder / "logs").iterdir()
    for attempt in range(2):
        error = json.loads((run / f"attempt_{attempt}/0/error.json").read_text())
        assert error["message"]["message"] == f"ValueError: try {attempt}"
        assert f"try {attempt}" in (run / f"attempt_{attempt}/0/stderr.log").read_text()
    assert "its error: ValueError: try 1" in agent.stderr()
    assert json.loads((agent.folder / "logs/w1/error.json").read_text())["message"]["message"] == "ValueError: try 1"


def test_a_single_worker_writes_to_the_console_byte_for_byte(bed: Bed) -> None:
    script = bed.script("bar.py", "import sys\nfor n in range(3): sys.stdout.write(f'\\r{n} of 3')\n")
    agent = bed.launch(script)
    assert agent.wait() == 0
    assert agent.out.read_bytes() == b"\r0 of 3\r1 of 3\r2 of 3\n"


def test_a_carriage_return_ends_a_prefixed_line() -> None:
    assert as_lines(b"a\rb\r\nc\nd", last=False) == [b"a", b"b", b"c", b"d"]
    assert as_lines(b"a\r", last=False) == [b"a\r"]  # perhaps a newline follows
    assert as_lines(b"a\r", last=True) == [b"a", b""]
    assert as_lines(b"a", last=False) == [b"a"]


def test_a_long_line_is_shown_whole(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").write_bytes(b"x" * 700_000 + b"\ny\n")
    with (tmp_path / "shown").open("wb", buffering=0) as sink:
        relay = Relay(sink, sink)  # type: ignore[arg-type]
        relay.follow("w0", tmp_path, "> ", (0, 0))
        relay.start()
        relay.finish(timeout_s=20)
    assert (tmp_path / "shown").read_bytes() == b"> " + b"x" * 700_000 + b"\n> y\n"


PLUGIN = """
import os
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs

class Mine(LogsSpecs):
    @property
    def root_log_dir(self):
        return self._root_log_dir

    def reify(self, envs):
        where = os.path.join(self._root_log_dir, "mine" + envs[0]["TORCHELASTIC_RESTART_COUNT"])
        os.makedirs(where)
        path = lambda name: {r: f"{where}/{name}{r}" for r in envs}
        return LogsDest(path("out"), {r: "" for r in envs}, {1: f"{where}/out1"}, {}, path("error"), f"{where}/fo", f"{where}/fe")
"""


@pytest.mark.e2e
def test_a_logs_specs_plug_in_says_where_everything_goes(bed: Bed) -> None:
    pytest.importorskip("torch")
    site = bed.folder / "site"
    info = site / "mine-1.dist-info"
    info.mkdir(parents=True)
    (site / "mylogs.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = mylogs:Mine\n")
    environ = {"PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    logs = bed.folder / "logs"
    agent = bed.launch("--nproc-per-node", "2", "--logs-specs", "mine", "--log-dir", str(logs), bed.script("say.py", SAY), **environ)
    assert agent.wait() == 0, agent.stderr()
    assert tree(logs) == ["mine0/out0", "mine0/out1"]
    assert shown(agent) == (["[default1]:out 1"], ["[default0]:err 0", "[default1]:err 1"])
    assert agent.log("w0") == "out 0\n"
    missing = bed.launch("--logs-specs", "nobody", bed.script("say.py", SAY), **environ)
    assert missing.wait() == 2
    assert "--logs-specs nobody: no package here registers it" in missing.stderr()


@pytest.mark.e2e
def test_torchrun_and_liverun_leave_the_same_files_and_give_the_same_variables(bed: Bed) -> None:
    """Compared with what torchrun itself does here."""
    pytest.importorskip("torch")
    import subprocess

    show = "import json\nopen(f'{sys.argv[1]}.{r}', 'w').write(json.dumps(dict(os.environ)))\n"
    script = bed.script("say.py", SAY + show)
    words = ["--nproc-per-node=2", "--redirects=0:3", "--tee=1:1", "--rdzv-id=x", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    theirs, ours = bed.folder / "theirs", bed.folder / "ours"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "--log-dir", str(theirs), script, "theirs.env"],
        env=bed.environ(), cwd=bed.folder, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    agent = bed.launch(*words, "--log-dir", str(ours), script, "ours.env")
    assert agent.wait() == 0
    differ = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"}  # there in both, of each launcher's own making
    for rank in range(2):
        torch_says, we_say = (json.loads((bed.folder / f"{who}.env.{rank}").read_text()) for who in ("theirs", "ours"))
        assert torch_says.keys() <= we_say.keys()
        given = torch_says.keys() - bed.environ().keys() - differ
        assert {name: we_say[name] for name in given} == {name: torch_says[name] for name in given}
    assert tree(next(theirs.iterdir())) == tree(next(ours.iterdir()))
    assert [run.name.partition("_")[0] for run in (*theirs.iterdir(), *ours.iterdir())] == ["x", "x"]
    assert done.stdout.splitlines() == agent.stdout().splitlines() == ["[default1]:out 1"]
