"""Plain scripts under a real agent: what torchrun does, and what it should have done."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_bed import Bed, processes_with, until


def test_a_plain_script_sees_torchruns_environment_and_its_own_arguments(bed: Bed) -> None:
    script = bed.script(
        "show.py",
        "import json, os, sys\n"
        "print(json.dumps({'argv': sys.argv, 'path0': sys.path[0], 'name': __name__, 'file': __file__, 'env': dict(os.environ)}))\n",
    )
    agent = bed.launch(
        "--nproc_per_node=2", "--rdzv-id", "r1", script, "--", "--nproc-per-node", "9", "-m", ""
    )
    assert agent.wait() == 0
    for rank in range(2):
        seen = json.loads(agent.log(f"w{rank}"))
        assert seen["argv"] == [script, "--", "--nproc-per-node", "9", "-m", ""]
        assert (seen["path0"], seen["name"], seen["file"]) == (str(bed.folder), "__main__", script)
        expected = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank),
            "ROLE_NAME": "default", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "r1", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "LIVERUN_WORKER": f"w{rank}",
            "LIVERUN_STAGING_BYTES": str(64 * 1024 * 1024),
        }  # fmt: skip
        assert {name: seen["env"].get(name) for name in expected} == expected
        assert int(seen["env"]["MASTER_PORT"]) > 0
        assert "LIVERUN_LAYOUT" not in seen["env"]


def test_a_plain_script_is_never_run_as_an_extra_copy(bed: Bed) -> None:
    script = bed.script("count.py", "print('ran')\n")
    agent = bed.launch("--nproc-per-node", "1", "--standbys", "3", script)
    assert agent.wait() == 0
    assert agent.stdout() == "ran\n"
    assert sorted(path.name for path in (agent.folder / "logs").iterdir()) == ["template.log", "w0"]


@pytest.mark.e2e
@pytest.mark.parametrize("preload", ["", "none"])
def test_torch_process_groups_start_without_a_free_port_and_again(bed: Bed, preload: str) -> None:
    """Known complaints 20: address already in use, and 34: a second init on the same store hangs.

    Whoever is late must not be found where it was before.
    """
    script = bed.script(
        "reduce.py",
        "import time, torch, torch.distributed as dist\n"
        "for factor in (1, 2, 3):\n"
        "    dist.init_process_group('gloo')\n"
        "    is_late = dist.get_rank() == factor % 2\n"
        "    t = torch.ones(1) * (dist.get_rank() + 1)\n"
        "    dist.all_reduce(t)\n"
        "    print(dist.get_rank(), t.item() * factor)\n"
        "    dist.destroy_process_group()\n"
        "    time.sleep(is_late)\n",
    )
    agent = bed.launch("--nproc-per-node", "2", script, LIVERUN_PRELOAD=preload)
    assert agent.wait() == 0, agent.stderr()
    assert sorted(agent.stdout().splitlines()) == [
        "[default0]:0 3.0", "[default0]:0 6.0", "[default0]:0 9.0",
        "[default1]:1 3.0", "[default1]:1 6.0", "[default1]:1 9.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "tail", "how"),
    [
        ("import sys\nsys.exit(7)\n", "", "exit code 7"),
        ("raise ValueError('bad')\n", "ValueError: bad", "exit code 1"),
        ("import os\nos.kill(os.getpid(), 11)\n", "", "killed by SIGSEGV"),
        ("import sys\nsys.exit('sentence')\n", "sentence", "exit code 1"),
        ("def broken(:\n", "SyntaxError", "exit code 1"),
    ],
)
def test_a_failing_script_fails_the_job_with_its_own_words(bed: Bed, text: str, tail: str, how: str) -> None:
    """Known complaint 10: launcher exits 0 though a child failed. Known complaint 11: no traceback."""
    agent = bed.launch(bed.script("fail.py", text))
    assert agent.wait() == 1
    assert f"first failure: worker w0, rank 0, {how}" in agent.stderr()
    assert tail in agent.stderr()
    assert "template" not in agent.log("w0", "stderr")


def test_a_traceback_is_the_one_python_prints_and_the_error_file_has_it(bed: Bed) -> None:
    script = bed.script("fail.py", "def f():\n    raise ValueError('bad')\nf()\n")
    agent = bed.launch(script)
    assert agent.wait() == 1
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert agent.log("w0", "stderr") == plain.stderr
    error = json.loads((agent.folder / "logs" / "w0" / "error.json").read_text())
    assert error["message"]["message"] == "ValueError: bad"
    assert "line 2, in f" in error["message"]["extraInfo"]["py_callstack"]


def test_a_missing_script_is_said_as_python_says_it(bed: Bed) -> None:
    agent = bed.launch("nowhere.py")
    assert agent.wait() == 1
    assert "can't open file 'nowhere.py': [Errno 2] No such file or directory" in agent.stderr()


def test_one_failure_ends_all_workers_at_once_and_is_the_one_reported(bed: Bed) -> None:
    """Known complaint 8: one segfault holds the others 5 min."""
    script = bed.script(
        "one.py",
        "import os, signal\nif os.environ['RANK'] == '1': raise SystemExit(9)\nsignal.pause()\n",
    )
    agent = bed.launch("--nproc-per-node", "3", script)
    assert agent.wait() == 1
    assert "first failure: worker w1, rank 1, exit code 9" in agent.stderr()


def test_modules_programs_and_a_users_own_launcher_module_run(bed: Bed) -> None:
    (bed.folder / "launcher.py").write_text("WHO = 'mine'\n")
    (bed.folder / "pack.py").write_text("import sys, launcher\nprint(launcher.WHO, sys.argv[1:], __name__)\n")
    script = bed.script("use.py", "import launcher, liverun\nprint(launcher.WHO)\n")
    for words, expected in (
        ((script,), "mine\n"),
        (("-m", "pack", "-x", "1"), "mine ['-x', '1'] __main__\n"),
        (("--no-python", "/bin/sh", "-c", "echo rank $RANK"), "rank 0\n"),
    ):
        agent = bed.launch(*words)
        assert agent.wait() == 0, agent.stderr()
        assert agent.stdout() == expected
    missing = bed.launch("--no-python", "/nowhere/program")
    assert missing.wait() == 1
    assert "cannot start /nowhere/program: No such file or directory" in missing.stderr()


STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
bare = subprocess.Popen(["sleep", "1000"], env={})
with open(sys.argv[1] + "/bare" + os.environ["RANK"], "w") as file:
    file.write(str(bare.pid))
open(sys.argv[1] + "/up" + os.environ["RANK"], "w").close()
while True: signal.pause()
"""


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stubborn(bed: Bed, *words: str) -> object:
    agent = bed.launch("--nproc-per-node", "2", *words, bed.script("stubborn.py", STUBBORN), str(bed.folder))
    for rank in range(2):
        until(f"rank {rank}", (bed.folder / f"up{rank}").exists)
    return agent


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_nothing_is_left_when_a_signal_ends_the_launcher(bed: Bed, number: signal.Signals) -> None:
    """Known complaint 15: one --shutdown-timeout for all paths."""
    agent = stubborn(bed, "--shutdown-timeout", "0.3")
    agent.signal(number)
    until("the signal to be seen", lambda: number.name in agent.stderr())
    for _ in range(2):
        agent.signal(signal.SIGTERM)  # a scheduler says it again
    assert agent.wait() == 128 + number
    assert not processes_with(bed.mark)


def test_user_signals_reach_the_ranked_workers(bed: Bed) -> None:
    """Known complaint 16: SIGUSR1/2 not forwarded. Known complaint 17: signals go to ranks only."""
    script = bed.script(
        "usr.py",
        "import os, signal, subprocess\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('heard', flush=True))\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(bed.folder)!r} + '/up' + os.environ['RANK'], 'w').close()\n"
        "signal.pause()\n"
        "assert child.poll() is None\n",
    )
    agent = bed.launch("--nproc-per-node", "2", script)
    for rank in range(2):
        until(f"rank {rank}", (bed.folder / f"up{rank}").exists)
    agent.signal(signal.SIGUSR1)
    assert agent.wait() == 0, agent.stderr()
    assert sorted(agent.stdout().splitlines()) == ["[default0]:heard", "[default1]:heard"]


def test_a_second_ctrl_c_kills_at_once(bed: Bed) -> None:
    agent = stubborn(bed, "--shutdown-timeout", "1000")
    agent.signal(signal.SIGINT)
    until("the first to be seen", lambda: "SIGINT" in agent.stderr())
    agent.signal(signal.SIGINT)
    assert agent.wait() == 130
    assert not processes_with(bed.mark)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nothing_survives_a_killed_agent(bed: Bed, method: str) -> None:
    """Known complaint 9: a crashed launcher's workers, and their data workers, live on for hours."""
    agent = stubborn(bed, "--start-method", method)
    bare = [int(path.read_text()) for path in bed.folder.glob("bare*")]  # they do not carry the mark of the test
    os.kill(agent.pids()["w1"], signal.SIGSTOP)
    agent.process.kill()
    agent.process.wait()
    until("all to be gone", lambda: not processes_with(bed.mark) and not any(map(alive, bare)), 2.0)
    shown = bed.cli("status", agent.folder.name)
    assert shown.returncode == 69
    assert "gone without a word" in shown.stderr
    assert json.loads(bed.cli("jobs", "--json").stdout)[0]["state"] == "lost"


def test_what_a_worker_leaves_behind_ends_with_it(bed: Bed) -> None:
    text = "import subprocess\nsubprocess.Popen(['sleep', '1000'])\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    agent = bed.launch(bed.script("leaves.py", text))
    assert agent.wait() == 0
    assert not processes_with(bed.mark)


def test_floods_binary_bytes_and_missing_newlines_are_relayed(bed: Bed) -> None:
    script = bed.script(
        "flood.py",
        "import os, sys\n"
        "os.write(1, b'x' * 300_000)\n"
        "os.write(1, b'\\n\\xff\\xfe\\x00 bytes\\n')\n"
        "os.write(1, b'no newline')\n"
        "os.write(2, b'on stderr')\n",
    )
    agent = bed.launch("--nproc-per-node", "2", script)
    assert agent.wait() == 0
    data = agent.out.read_bytes()
    for rank in range(2):
        prefix = f"[default{rank}]:".encode()
        lines = [line[len(prefix) :] for line in data.splitlines() if line.startswith(prefix)]
        assert sum(line.count(b"x") for line in lines) == 300_000
        assert b"\xff\xfe\x00 bytes" in lines
        assert b"no newline" in lines
        assert (prefix + b"on stderr\n") in agent.err.read_bytes()
    assert {line[:10] for line in data.splitlines()} == {b"[default0]", b"[default1]"}


def test_a_closed_stdout_does_not_end_the_job(bed: Bed) -> None:
    reading, writing = os.pipe()
    script = bed.script("talk.py", "for n in range(1000): print(n)\n")
    agent = bed.launch(script, stdout=writing)
    os.close(writing)
    os.close(reading)
    assert agent.wait() == 0
    assert agent.log("w0").count("\n") == 1000
    assert "stdout is closed" in agent.stderr()


def test_two_jobs_run_side_by_side_and_must_be_named(bed: Bed) -> None:
    """Known complaint 21: two jobs share stale state because the id is "none"."""
    one, two = bed.fake(1, 0, "--job", "one"), bed.fake(1, 0, "--job", "two")
    twice = bed.launch("--job", "one", "x.py")
    assert twice.wait() == 2
    assert "a job one is running" in twice.stderr()
    which = bed.cli("status")
    assert which.returncode == 2
    assert "2 jobs are running here: one, two; say which one" in which.stderr
    socket = Path(json.loads((one.folder / "job.json").read_text())["socket"])
    assert socket.parent == one.folder
    assert (socket.stat().st_mode & 0o777, socket.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert bed.cli("stop", "one").returncode == 0
    assert json.loads(bed.cli("status", "--json").stdout)["job"] == "two"
    ended = bed.cli("resize", "one", "--workers", "2")
    assert (ended.returncode, ended.stderr) == (69, "liverun: job one has ended (stopped, exit code 0)\n")
    assert json.loads(bed.cli("status", "one", "--json").stdout)["state"] == "stopped"
    assert one.wait() == 0
    assert two.finish() == 0
    again = bed.launch("--job", "one", bed.script("ok.py", ""))
    assert again.wait() == 0
    assert (bed.root / "one.1" / "job.json").exists()


def test_a_run_folder_too_deep_for_a_socket_gets_one_that_fits_and_is_removed(bed: Bed) -> None:
    deep = bed.folder / ("d" * 60) / ("e" * 60)
    agent = bed.launch(
        "--run-dir", str(deep), "--nproc-per-node", "1", str(Path(__file__).with_name("fake_worker.py"))
    )
    record = until("the record", lambda: list(deep.glob("*/job.json")))[0]
    socket = Path(json.loads(record.read_text())["socket"])
    assert len(os.fsencode(socket)) <= 107
    until("the first world", lambda: '"world"' in (record.parent / "events.jsonl").read_text())
    assert bed.cli("status", "--run-dir", str(deep)).returncode == 0
    assert (socket.stat().st_mode & 0o777, socket.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    bed.end_file.touch()
    assert agent.wait() == 0
    assert not socket.parent.exists()


def test_a_template_that_cannot_import_is_said_with_its_last_lines(bed: Bed) -> None:
    agent = bed.launch(bed.script("ok.py", ""), LIVERUN_PRELOAD="none,no_such_module_here")
    assert agent.wait() == 1
    assert "No module named 'no_such_module_here'" in agent.stderr()


def test_a_port_that_is_taken_is_said_and_does_not_use_up_restarts(bed: Bed) -> None:
    """Known complaint 20: address already in use."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        agent = bed.launch("--master-port", str(port), "--max-restarts", "3", bed.script("ok.py", ""))
        assert agent.wait() == 1
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in agent.stderr()
    assert agent.kinds() == ["started", "worker_failed"]
