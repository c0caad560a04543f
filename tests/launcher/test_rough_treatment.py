"""Floods, stopped workers, broken disks, storms of signals: the agent neither hangs nor loses a line."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launcher_bed import FAKE_WORKER, Bed, processes_with, until

from launcher.events import EventLog, read_events


def with_home(bed: Bed, home: str | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a job to its end without a run folder of the test's; with no HOME at all if ``home`` is None."""
    environ = bed.environ(LIVERUN_PRELOAD="none")
    for name in ("HOME", "LIVERUN_RUN_DIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        environ.pop(name, None)
    if home is not None:
        environ["HOME"] = home
    return subprocess.run(
        [sys.executable, "-m", "liverun", *words], env={**environ, "TMPDIR": str(bed.folder)}, cwd=bed.folder,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture
def small_disk(bed: Bed) -> Iterator[Path]:
    """A file system of 64 KiB, as root only."""
    where = bed.folder / "small"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", where], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"not to be had here: a file system of the test's own: {done.stderr.decode().strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True)


def test_fifty_sigterms_in_a_second_equal_one(bed: Bed) -> None:
    """Known complaint 15: workers had their whole grace, whatever a scheduler repeats."""
    script = bed.script(
        "save.py",
        "import os, signal, sys, time\n"
        "def save(*_):\n    signal.signal(15, signal.SIG_IGN); time.sleep(2); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(15, save)\nprint('up', flush=True)\nwhile True: signal.pause()\n",
    )
    agent = bed.launch("--nproc-per-node", "2", "--shutdown-timeout", "20", script)
    until("both workers", lambda: agent.stdout().count("up") == 2)
    for _ in range(50):
        agent.signal(signal.SIGTERM)
        time.sleep(0.02)
    assert agent.wait() == 128 + signal.SIGTERM
    assert agent.stdout().count("saved") == 2
    assert agent.stderr().count("SIGTERM: the workers have 20 s to end") == 1
    assert not processes_with(bed.mark)


@pytest.mark.parametrize("signal_first", [False, True])
def test_a_stopped_worker_holds_nothing_up(bed: Bed, signal_first: bool) -> None:
    """Known complaint 8: one failure holds the others. A stopped worker is woken to hear that it is to end."""
    script = bed.script(
        "stop.py",
        "import os, signal, sys, time\n"
        f"mark = {str(bed.folder / 'up')!r}\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "    open(mark + '.tmp', 'w').write(str(os.getpid())); os.rename(mark + '.tmp', mark)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    signal.pause()\n"
        "while not os.path.exists(mark): time.sleep(0.01)\n"
        f"if {signal_first}: signal.pause()\n"
        "while open(f'/proc/{open(mark).read()}/stat').read().rpartition(')')[2].split()[0] != 'T': time.sleep(0.01)\n"
        "sys.exit(4)\n",
    )
    agent = bed.launch("--nproc-per-node", "2", "--shutdown-timeout", "20", script)
    until("the worker", (bed.folder / "up").exists)
    stopped = psutil.Process(int((bed.folder / "up").read_text()))
    until("it to be stopped", lambda: stopped.status() == psutil.STATUS_STOPPED or not signal_first)
    started = time.monotonic()
    if signal_first:
        agent.signal(signal.SIGTERM)
    assert agent.wait() == (128 + signal.SIGTERM if signal_first else 1)
    assert time.monotonic() - started < 15
    assert agent.log("w0") == "saved\n"


@pytest.mark.parametrize("end", ["signal", "failure"])
def test_workers_that_are_still_being_started_hold_the_end_up_no_longer_than_others(bed: Bed, end: str) -> None:
    """Known complaint 8: one failure holds the others. Whoever is forked after the signal would never hear of it."""
    script = bed.script(
        "first.py",
        "import os, signal, sys\n"
        f"if os.environ['RANK'] == '0' and {end != 'signal'}: sys.exit(4)\n"
        "print('up', flush=True)\n"
        "signal.pause()\n",
    )
    agent = bed.launch("--nproc-per-node", "24", "--shutdown-timeout", "40", script)
    started = time.monotonic()
    if end == "signal":
        until("the first worker", lambda: "up" in agent.stdout())
        agent.signal(signal.SIGTERM)
    assert agent.wait() == (128 + signal.SIGTERM if end == "signal" else 1), agent.stderr()
    assert time.monotonic() - started < 35
    assert not processes_with(bed.mark)


def test_workers_that_ignore_sigterm_have_the_same_grace_when_another_fails(bed: Bed) -> None:
    """Known complaint 15: the time until SIGKILL cannot be changed on every path."""
    script = bed.script(
        "deaf.py",
        "import os, signal, sys, time\n"
        f"mark = {str(bed.folder / 'up')!r}\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(15, lambda *_: print('heard'))\n"
        "    open(mark, 'w').close()\n"
        "    while True: signal.pause()\n"
        "while not os.path.exists(mark): time.sleep(0.01)\n"
        "sys.exit(4)\n",
    )
    agent = bed.launch("--nproc-per-node", "2", "--shutdown-timeout", "0.5", script)
    until("the deaf worker", (bed.folder / "up").exists)
    started = time.monotonic()
    assert agent.wait() == 1
    assert 0.3 < time.monotonic() - started < 15  # and not the 30 s that are usual
    assert agent.log("w0") == "heard\n"
    assert "first failure: worker w1, rank 1, exit code 4" in agent.stderr()


def test_a_grandchild_that_keeps_the_output_open_holds_nothing_up(bed: Bed) -> None:
    """Known complaint 9: data workers live on."""
    script = bed.script("pipe.py", "import subprocess\nsubprocess.Popen(['sleep', '1000'])\nprint('the end')\n")
    reading, writing = os.pipe()
    agent = bed.launch(script, stdout=writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"the end\n"  # and the end of the file: nobody holds it
    assert agent.wait() == 0


def test_200_kb_without_a_newline_and_bytes_that_are_no_text_arrive_whole(bed: Bed) -> None:
    """Known complaint 28: whole lines."""
    script = bed.script(
        "flood.py",
        "import os\nr = os.environ['RANK'].encode()\n"
        "os.write(1, r * 200_000)\n"
        "for _ in range(50): os.write(1, bytes(b for b in range(256) if b not in (10, 13)) * 20)\n"
        "os.write(1, b'\\n' + r + b'last')\n",
    )
    agent = bed.launch("--nproc-per-node", "2", script)
    assert agent.wait() == 0
    body = bytes(b for b in range(256) if b not in (10, 13)) * 1000
    expected = [f"[default{r}]:".encode() + part for r in range(2) for part in (str(r).encode() * 200_000 + body, f"{r}last".encode())]
    assert sorted(agent.out.read_bytes().removesuffix(b"\n").split(b"\n")) == sorted(expected)


def test_a_worker_that_closes_its_output_goes_on(bed: Bed) -> None:
    script = bed.script(
        "close.py", "import os, sys, time\nprint('before', flush=True)\nos.close(1); os.close(2)\ntime.sleep(0.5)\nopen(sys.argv[1], 'w').close()\n"
    )
    agent = bed.launch(script, str(bed.folder / "done"))
    assert agent.wait() == 0
    assert agent.stdout() == "before\n"
    assert (bed.folder / "done").exists()


def test_no_line_is_lost_when_a_worker_is_killed_right_after_it(bed: Bed) -> None:
    script = bed.script("die.py", "import os\nfor n in range(5000): print(n)\nos.kill(os.getpid(), 9)\n")
    agent = bed.launch("--nproc-per-node", "2", "--max-restarts", "0", script)
    assert agent.wait() == 1
    lines = agent.stdout().splitlines()
    first = agent.stderr().partition("rank ")[2][0]
    assert [line for line in lines if line.startswith(f"[default{first}]")] == [f"[default{first}]:{n}" for n in range(5000)]
    assert "killed by SIGKILL (host " in agent.stderr()


def test_home_may_be_unset_or_useless(bed: Bed) -> None:
    for home in (None, "/dev/null/home", "/proc"):
        done = with_home(bed, home, bed.script("ok.py", "print('ran')\n"))
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
        assert (bed.folder / f"liverun-{os.geteuid()}").is_dir()


@pytest.mark.parametrize("where", ["/proc/jobs", "/dev/null/jobs"])
def test_a_run_folder_that_cannot_be_made_is_one_sentence(bed: Bed, where: str) -> None:
    done = bed.cli("--run-dir", where, bed.script("ok.py", "print('ran')\n"))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"liverun: the run folder cannot be used: {where}")
    assert line.endswith("choose another place with --run-dir")


def test_a_read_only_run_folder_is_not_allowed(bed: Bed, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = bed.cli("--run-dir", str(small_disk / "jobs"), bed.script("ok.py", ""))
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr == (
        f"liverun: the run folder cannot be used: {small_disk}/jobs: Read-only file system; choose another place with --run-dir\n"
    )


@pytest.mark.parametrize("free", [0, 4096, 8192, 16384])
def test_a_full_disk_is_said_in_one_sentence(bed: Bed, small_disk: Path, free: int) -> None:
    (small_disk / "jobs").mkdir()
    with (small_disk / "ballast").open("wb", buffering=0) as ballast:
        ballast.write(b"x" * (64 * 1024 - free - 4096))
    done = bed.cli("--run-dir", str(small_disk / "jobs"), "--preload", "none", bed.script("ok.py", "print('ran')\n"))
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    if free == 16384:  # enough to begin with, not for the first entry
        assert "failed: " in done.stderr
        assert "the disk takes no more" in done.stderr
        return
    (line,) = done.stderr.splitlines()
    assert line.startswith("liverun: the run folder cannot be used: ")
    assert "No space left on device" in line


def test_a_disk_that_fills_up_while_a_job_runs_does_not_end_it(bed: Bed, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    script = bed.script(
        "fill.py",
        "import os, sys\n"
        "with open(sys.argv[1], 'wb', buffering=0) as f:\n"
        "    try:\n"
        "        while True: f.write(b'x' * 4096)\n"
        "    except OSError as e: open(sys.argv[2], 'w').write(str(e.errno))\n",
    )
    agent = bed.launch("--run-dir", str(small_disk), "--log-dir", str(bed.folder / "logs"), "-r", "3", script, str(small_disk / "ballast"), str(bed.folder / "full"))
    assert agent.wait() == 0, agent.stderr()
    assert (bed.folder / "full").read_text() == "28"
    assert "Traceback" not in agent.stderr()
    assert "cannot be written" in agent.stderr()


def test_a_full_disk_under_the_store_of_a_live_job_leaves_the_training_alone(bed: Bed, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    agent = bed.launch(
        "--run-dir", str(small_disk), "--log-dir", str(bed.folder / "logs"), "--nproc-per-node", "2", "--standbys", "1",
        str(FAKE_WORKER), FAKE_BEHAVE="{}",
    )  # fmt: skip
    agent.root = small_disk
    agent.event("world")

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return bed.cli(*words, LIVERUN_RUN_DIR=str(small_disk))

    def status() -> dict[str, Any]:
        return json.loads(command("status", "--json").stdout)

    until("the standby", lambda: status()["nodes"][0]["standbys"] == 1)
    before = status()
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)
    done = command("resize", "--workers", "3")
    assert done.returncode == 1, done.stdout
    assert "the disk takes no more" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    for ahead in (100, 200):  # the workers step on, and their words are heard
        until("further steps", lambda ahead=ahead: status()["step"] >= before["step"] + ahead)
    now = status()
    assert (now["generation"], now["world"], now["proposal"]) == (before["generation"], before["world"], None)
    assert now["nodes"][0]["workers"] == before["nodes"][0]["workers"]
    ballast.unlink()
    done = command("resize", "--workers", "3")
    assert done.returncode == 0, done.stderr
    assert agent.event("active")["to"]["size"] == 3
    assert status()["nodes"][0]["workers"][:2] == before["nodes"][0]["workers"][:2]
    assert agent.finish() == 0, agent.stderr()
    assert "Traceback" not in agent.stderr()


def test_an_event_that_was_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    """A disk that is nearly full takes a part of a line."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path, time.time)
    log.write("started", 1, "whole", {})
    whole = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 20, before[1]))
    try:
        log.write("resize", 1, "cut", {})
        log.write("resize", 1, "lost", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == whole + 20
    log.write("active", 2, "after", {})
    log.close()
    events = read_events(path, since=0, follow=False, ended=lambda: True)
    assert [event["reason"] for event in events] == ["whole", "after"]


def test_events_that_cannot_be_written_are_said_once() -> None:
    said: list[str] = []
    log = EventLog(Path("/dev/full"), time.time, trouble=said.append)
    for _ in range(3):
        assert log.write("started", 0, "why", {})["reason"] == "why"
    log.close()
    assert said == ["/dev/full cannot be written (No space left on device); events are lost until it can"]


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        ("/nowhere/python", "cannot start /nowhere/python: No such file or directory"),
        ("/bin/false", "the template process ended before it was ready"),
        ("/dev/null", "cannot start /dev/null: Permission denied"),
    ],
)
def test_a_python_that_does_not_start_is_said(bed: Bed, python: str, sentence: str) -> None:
    agent = bed.launch(bed.script("ok.py", ""), PYTHON_EXEC=python)
    assert agent.wait() == 1
    assert sentence in agent.stderr()
    assert "Traceback" not in agent.stderr()
    assert agent.kinds() == ["started", "worker_failed"]


def test_the_report_names_host_rank_pid_signal_and_the_scripts_own_error(bed: Bed) -> None:
    """Known complaint 11: "error_file N/A", no traceback."""
    script = bed.script("bad.py", "def f(x):\n    return 1 / x\nf(0)\n")
    agent = bed.launch("--nproc-per-node", "1", script)
    assert agent.wait() == 1
    pid = int(agent.stderr().partition(", pid ")[2].partition(")")[0])
    host = os.uname().nodename
    assert f"first failure: worker w0, rank 0, exit code 1 (host {host}, pid {pid}); its stderr is {agent.folder}/logs/w0/stderr.log" in agent.stderr()
    assert "liverun: its error: ZeroDivisionError: division by zero\n" in agent.stderr()
    assert "      File " in agent.stderr()
    record = json.loads((agent.folder / "job.json").read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 1)


def test_an_error_file_of_torchs_own_recorder_is_read_too(bed: Bed) -> None:
    """Known complaint 11: torch writes two shapes of it."""
    script = bed.script(
        "own.py", "import json, os, sys\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(json.dumps({'message': 'my own words\\nmore'}))\nsys.exit(3)\n"
    )
    agent = bed.launch(script)
    assert agent.wait() == 1
    assert "liverun: its error: my own words\n" in agent.stderr()
