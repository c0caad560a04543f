"""The command line by itself: what it takes, refuses and prints, and how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_bed import Bed
from typer.testing import CliRunner

from launcher import options
from launcher.cli import app
from launcher.logs import Relay
from launcher.options import UsageError, count_cpus, count_gpus, omp_threads, parse_bytes, parse_nproc
from launcher.rundir import JobError, JobFolder, JobRecord, default_root, find_job, list_jobs, resolve_root

UID = os.geteuid()


@pytest.mark.parametrize(
    "words",
    [["--help"], ["run", "--help"], ["resize", "--workers", "2"], ["status"], ["events"], ["jobs"], ["stop"]],
    ids=lambda words: words[0] + words[-1] if len(words) > 1 else words[0],
)
def test_no_command_line_imports_torch_or_what_it_does_not_need(bed: Bed, words: list[str]) -> None:
    code = (
        "import sys\nfrom launcher.cli import main\n"
        f"sys.argv = ['liverun'] + {words!r}\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "for name in ('torch', 'numpy', 'megatron', 'resharding'): assert name not in sys.modules, name\n"
        "if '--help' in sys.argv:\n"
        "  for name in ('rich.console', 'asyncio', 'psutil', 'sqlite3'): assert name not in sys.modules, name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=bed.environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_answers_in_a_moment(bed: Bed) -> None:
    times = []
    for _ in range(5):
        started = os.times()
        assert bed.cli("--help").returncode == 0
        ended = os.times()
        times.append(
            ended.children_user + ended.children_system - started.children_user - started.children_system
        )
    assert min(times) < 0.3  # of a processor: other load on the machine does not count


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nnodes", "2", "x.py"], "--nnodes 2: say where the nodes meet, with --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2:1", "x.py"], "--nnodes 2:1 asks for no possible number of nodes"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:0", "x.py"], "give a port that every node can know"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1,i:2", "x.py"], "'h:1,i:2' is not HOST:PORT"),
        (["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "h:1,", "x.py"], "'' is not HOST:PORT"),
        (["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "h:1,i:0", "x.py"], "give a port that every"),
        (["--nnodes", "2", "--rdzv-endpoint", "h", "--node-rank", "2", "x.py"], "--node-rank 2 is not from 0 to 1"),
        (["--nnodes", "2", "--rdzv-endpoint", "h", "--rdzv-backend", "zk", "x.py"], "'zk' is none of static"),
        (["--nnodes", "2", "--rdzv-endpoint", "h", "--rdzv-conf", "timeout=soon", "x.py"], "timeout=soon is not a"),
        (["--nnodes", "few", "x.py"], "--nnodes 'few' is neither N nor MIN:MAX"),
        (
            ["--nproc-per-node", "0", "x.py"],
            "--nproc-per-node '0' is neither a number of at least 1 nor auto",
        ),
        (["--nproc_per_node", "gpu", "x.py"], "no GPU is visible"),
        (["--nproc-per-node", "4", "--layout", "tp=3", "x.py"], "layout tp=3 needs a multiple of 3 workers"),
        (["--layout", "tp=two", "x.py"], "layout 'tp=two': 'two' is not a whole number"),
        (["--layout", "xp=2", "x.py"], "is not one of tp=N, pp=N"),
        (["--staging", "lots", "x.py"], "'lots' is not a size; write it like 512MiB"),
        (["--verify", "some", "x.py"], "--verify 'some' is none of full, sample, off"),
        (["--keep", "yes", "x.py"], "--keep 'yes' is none of auto, always, never"),
        (["--defer", "all", "x.py"], "--defer 'all' is none of nothing, optimizer"),
        (["--defer", "optimizer", "--keep", "never", "x.py"], "--keep never gives it back before"),
        (["--job", "a/b", "x.py"], "--job 'a/b': use up to 64 letters"),
        (["-m", "--no-python", "x.py"], "--module and --no-python exclude each other"),
        (["--standbys", "-1", "x.py"], "not below 0"),
        (["--no-such-option", "x.py"], "No such option"),
        (["run"], "Missing argument 'script'"),
        (["plan", "--from", "tp=2", "--to", "tp=1", "--rate", "fast"], "'fast' is not a size"),
        (["plan", "--from", "tp=2", "--to", "tp=1", "--rate", "0"], "--rate is above 0"),
        (["resize"], "say what the world is to be"),
        (["resize", "--nodes", "0"], "--nodes 0: ask for at least 1"),
        (["drain", "n1", "--deadline", "soon"], "'soon' is no duration; write it like 30s or 2m"),
        (["resize", "--layout", "tp"], "'tp' is not one of"),
        (["resize", "--replace", "1", "--workers", "2"], "--replace keeps size and layout"),
        (["resize", "--workers", "2", "--timeout", "0"], "no time at all"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(bed: Bed, words: list[str], sentence: str) -> None:
    done = bed.cli(*words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not bed.root.exists()


def test_options_come_from_the_environment_too_in_torchruns_spelling_as_well(bed: Bed) -> None:
    """Known complaint 24: a time-out cannot be set from the environment."""
    script = bed.script(
        "size.py",
        "import os\n"
        "print(*(os.environ[name] for name in ('WORLD_SIZE', 'LIVERUN_STAGING_BYTES', 'LIVERUN_KEEP_MODE', "
        "'LIVERUN_VERIFY_MODE')))\n",
    )
    agent = bed.launch(
        "--keep", "never", script, PET_NPROC_PER_NODE="2", LIVERUN_STAGING="1MiB", PET_NNODES="1",
        LIVERUN_VERIFY="sample",
    )  # fmt: skip
    assert agent.wait() == 0
    assert agent.log("w1") == f"2 {2**20} never sample\n"


def test_a_script_named_like_a_command_runs_by_run_and_ignored_settings_warn(bed: Bed) -> None:
    bed.script("resize", "print('a script')\n")
    agent = bed.launch("run", "--rdzv-conf", "timeout=3", "--standalone", "resize", "status")
    assert agent.wait() == 0
    assert agent.stdout() == "a script\n"
    assert "--rdzv-conf is ignored" in agent.stderr()


def test_a_launcher_inside_a_worker_is_a_job_of_its_own(bed: Bed) -> None:
    inner = bed.script("inner.py", "import os\nprint(os.environ['LIVERUN_JOB'])\n")
    outer = bed.script(
        "outer.py",
        "import os, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-m', 'liverun', '--run-dir', {str(bed.root)!r}, '--preload', 'none', {inner!r}], check=True)\n",
    )
    agent = bed.launch(outer)
    assert agent.wait() == 0, agent.stderr()
    assert agent.stdout().strip() not in ("", agent.folder.name)
    assert len(list(bed.root.glob("*/job.json"))) == 2


def test_help_lists_every_command() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    for word in ("run", "resize", "status", "events", "jobs", "stop", "store"):
        assert f"\n  {word} " in text


def test_no_job_and_an_unknown_job_are_said(bed: Bed) -> None:
    none = bed.cli("status")
    assert (none.returncode, "no job is running here" in none.stderr) == (69, True)
    unknown = bed.cli("status", "nowhere")
    assert (unknown.returncode, "there is no job nowhere" in unknown.stderr) == (2, True)
    listed = bed.cli("jobs", "--json")
    assert (listed.returncode, json.loads(listed.stdout)) == (0, [])


def record(job: str, **more: object) -> JobRecord:
    values = {
        "id": job, "pid": 1, "uid": UID, "state": "running", "started": "t", "command": [], "socket": "s",
    } | more  # fmt: skip
    return JobRecord(**values)  # type: ignore[arg-type]


def test_a_foreign_job_is_not_talked_to(tmp_path: Path) -> None:
    folder = JobFolder.create(tmp_path, "j", UID)
    folder.write_record(record("j"))
    with pytest.raises(JobError, match=f"job j belongs to uid {UID}") as refused:
        find_job(tmp_path, "j", UID + 1, ended_too=False)
    assert refused.value.exit_code == 77
    with pytest.raises(JobError, match="belongs to uid") as foreign:
        JobFolder.create(tmp_path, "k", UID + 1)
    assert foreign.value.exit_code == 77
    folder.close()


def test_a_record_whose_lock_is_free_is_a_lost_job(tmp_path: Path) -> None:
    folder = JobFolder.create(tmp_path, "j", UID)
    folder.write_record(record("j"))
    assert [job.state for job in list_jobs(tmp_path)] == ["running"]
    folder.close()
    assert [job.state for job in list_jobs(tmp_path)] == ["lost"]
    with pytest.raises(JobError, match="gone without a word") as gone:
        find_job(tmp_path, "j", UID, ended_too=False)
    assert gone.value.exit_code == 69
    assert find_job(tmp_path, None, UID, ended_too=True)[1].state == "lost"


def test_the_run_folder_is_found_where_a_user_would_look(tmp_path: Path) -> None:
    runtime, home = tmp_path / "run", tmp_path / "home"
    runtime.mkdir()
    home.mkdir()
    assert default_root({"XDG_RUNTIME_DIR": str(runtime), "HOME": str(home)}, 7) == runtime / "liverun"
    assert (
        default_root({"XDG_RUNTIME_DIR": "/nowhere", "HOME": str(home)}, 7) == home / ".local/state/liverun"
    )
    assert default_root({}, 7).name == "liverun-7"
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "job.json").write_text("{}")
    assert resolve_root(str(tmp_path / "j"), {}, 7) == tmp_path  # what a worker has in its environment
    assert resolve_root(str(tmp_path), {}, 7) == tmp_path


def test_auto_counts_the_cgroup_and_the_visible_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known complaint 26: auto counts the host's CPUs, not the cgroup's."""
    monkeypatch.setattr(options.os, "sched_getaffinity", lambda _: range(64))
    own = tmp_path / "own"
    for text in ("0::/\n", "0::/../of/another\n", ""):
        own.write_text(text)
        (tmp_path / "cpu.max").unlink(missing_ok=True)
        assert count_cpus(tmp_path, own) == 64
        (tmp_path / "cpu.max").write_text("max 100000\n")
        assert count_cpus(tmp_path, own) == 64
        (tmp_path / "cpu.max").write_text("250000 100000\n")
        assert count_cpus(tmp_path, own) == (3 if text else 64)
    assert count_cpus(tmp_path, tmp_path / "nowhere") == 3
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert parse_nproc("auto", num_cpus=3, num_gpus=2) == 2
    assert parse_nproc("auto", num_cpus=3, num_gpus=0) == 3
    assert parse_nproc("CPU", num_cpus=3, num_gpus=2) == 3


def test_auto_counts_the_quotas_of_every_cgroup_above_in_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known complaint 26: a quota binds whatever level of the hierarchy sets it."""
    monkeypatch.setattr(options.os, "sched_getaffinity", lambda _: range(64))
    own, leaf = tmp_path / "own", tmp_path / "v2" / "slurm" / "job" / "step"
    leaf.mkdir(parents=True)
    own.write_text("0::/slurm/job/step\n")
    (leaf / "cpu.max").write_text("max 100000\n")
    (leaf.parent / "cpu.max").write_text("800000 100000\n")
    assert count_cpus(tmp_path / "v2", own) == 8
    (leaf.parent.parent / "cpu.max").write_text("50000 100000\n")
    assert count_cpus(tmp_path / "v2", own) == 1
    old = tmp_path / "v1" / "cpu,cpuacct" / "docker" / "abc"
    old.mkdir(parents=True)
    own.write_text("5:memory:/other\n4:cpu,cpuacct:/docker/abc\n")
    assert count_cpus(tmp_path / "v1", own) == 64
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert count_cpus(tmp_path / "v1", own) == 64
    (old / "cpu.cfs_quota_us").write_text("150000\n")
    assert count_cpus(tmp_path / "v1", own) == 2


def test_cores_are_shared_out_among_workers_unless_the_user_said() -> None:
    """Known complaint 27: OMP_NUM_THREADS is 1 on a 64-core node."""
    assert omp_threads({}, 8, 64) == 8
    assert omp_threads({}, 80, 64) == 1
    assert omp_threads({"OMP_NUM_THREADS": "5"}, 8, 64) is None


@pytest.mark.parametrize(
    ("text", "count"), [("512MiB", 2**29), ("1.5 GB", 1_500_000_000), ("7", 7), ("2KiB", 2048)]
)
def test_sizes_are_read_with_their_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_sizes_without_sense_are_refused() -> None:
    for text in ("", "MiB", "-1", "1 parsec"):
        with pytest.raises(UsageError):
            parse_bytes(text)


def test_a_full_terminal_does_not_hold_up_the_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    (tmp_path / "stdout.log").write_bytes(b"x\n" * 200_000)
    with os.fdopen(writing, "wb", buffering=0) as full:
        relay = Relay(full, full)  # type: ignore[arg-type]
        relay.follow("w0", tmp_path, "", (0, 0))
        relay.start()
        started = time.monotonic()
        relay.finish(timeout_s=0.2)
        assert time.monotonic() - started < 5
        os.close(reading)  # lets the thread go
        relay.finish(timeout_s=20)
