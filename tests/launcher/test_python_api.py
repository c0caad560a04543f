"""liverun from Python: what PyTorch's own launcher tests ask of torch.distributed.run and elastic_launch."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launcher_bed import Bed, processes_with, until

torch_api = pytest.importorskip("torch.distributed.launcher.api")
errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")

from launcher import api  # noqa: E402
from launcher.api import elastic_launch, main, parse_min_max_nnodes  # noqa: E402

pytestmark = pytest.mark.e2e

TOUCH = (
    "import os, sys\n"
    "names = ('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'ROLE_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'ROLE_WORLD_SIZE',"
    " 'GROUP_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RESTART_COUNT', 'TORCHELASTIC_MAX_RESTARTS',"
    " 'TORCHELASTIC_RUN_ID', 'OMP_NUM_THREADS')\n"
    "for name in names: assert name in os.environ, name\n"
    "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(' '.join(sys.argv[2:]))\n"
)


@pytest.fixture
def here(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jobs of this process live in the test's folder, and import nothing they do not need."""
    for name, value in bed.environ(LIVERUN_PRELOAD="none").items():
        monkeypatch.setenv(name, value)
    (bed.folder / "ranks").mkdir()
    return bed.folder


def touched(here: Path) -> list[str]:
    found = sorted(path.name for path in (here / "ranks").iterdir())
    for path in (here / "ranks").iterdir():
        path.unlink()
    return found


def config(here: Path, **more: Any) -> Any:
    values = {
        "min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "run_id": "r", "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0", "max_restarts": 0, "monitor_interval": 0.02, "start_method": "fork",
        "logs_specs": torch_api.DefaultLogsSpecs(log_dir=str(here / "logs")),
    } | more  # fmt: skip
    return torch_api.LaunchConfig(**values)


def scaled(factor: int) -> int:
    return factor + int(os.environ["RANK"])


def failing(rank: str) -> None:
    if os.environ["RANK"] == rank:
        raise ValueError("bad function")
    signal.pause()


def summed() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return float(value.item())


def leaving(code: int) -> None:
    sys.exit(code)


def test_nodes_are_parsed_as_torch_parses_them() -> None:
    assert parse_min_max_nnodes("1") == (1, 1)
    assert parse_min_max_nnodes("2:20") == (2, 20)
    with pytest.raises(RuntimeError, match="MIN:MAX"):
        parse_min_max_nnodes("2:20:30")
    with pytest.raises(ValueError, match="few"):
        parse_min_max_nnodes("few")


@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes=1", "--nproc-per-node=3", "--monitor-interval=1", "--start-method=spawn"],
        ["--nnodes", "1:1", "--nproc_per_node", "3", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--rdzv_id=7"],
        ["--standalone", "--nproc-per-node=3", "--role=trainer", "--max_restarts=0", "--log_dir=LOGS", "-r", "3"],
        ["--nproc-per-node=3", "--master-addr=127.0.0.1", "--node-rank=0", "--duplicate-stdout-filters=a,b"],
    ],
)
def test_simple_launch_with_each_form_of_flag(here: Path, words: list[str]) -> None:
    words = [word.replace("LOGS", str(here / "logs")) for word in words]
    script = here / "touch.py"
    script.write_text(TOUCH)
    main([*words, str(script), str(here / "ranks"), "--nproc-per-node", "a b"])
    assert (here / "ranks" / "0").read_text() == "--nproc-per-node a b"
    assert touched(here) == ["0", "1", "2"]


def test_launch_from_variables_of_a_module_and_of_a_program(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "touch.py").write_text(TOUCH)
    monkeypatch.chdir(here)
    main(["-m", "touch", str(here / "ranks")])
    assert touched(here) == ["0"]
    for name, value in (("PET_NNODES", "1"), ("PET_NPROC_PER_NODE", "2"), ("PET_MODULE", "1"), ("PET_START_METHOD", "spawn")):
        monkeypatch.setenv(name, value)
    main(["touch", str(here / "ranks")])
    assert touched(here) == ["0", "1"]
    monkeypatch.setenv("PET_MODULE", "0")
    main(["--no-python", sys.executable, "touch.py", str(here / "ranks")])
    assert touched(here) == ["0", "1"]
    main(["--run-path", str(here / "touch.py"), str(here / "ranks")])
    assert touched(here) == ["0", "1"]


@pytest.mark.parametrize(
    ("word", "patched", "count"),
    [
        ("auto", {"torch._utils.cpu_count": 2}, 2),
        ("cpu", {"torch._utils.cpu_count": 3}, 3),
        ("gpu", {"torch.cuda.is_available": True, "torch.cuda.device_count": 2}, 2),
        ("2", {}, 2),
    ],
)
def test_the_number_of_workers_is_what_torch_says_in_this_process(
    here: Path, monkeypatch: pytest.MonkeyPatch, word: str, patched: dict[str, Any], count: int
) -> None:
    for name, value in patched.items():
        monkeypatch.setattr(name, lambda value=value: value)
    (here / "touch.py").write_text(TOUCH)
    main([f"--nproc-per-node={word}", str(here / "touch.py"), str(here / "ranks")])
    assert len(touched(here)) == count


def test_two_launchers_in_torchs_words_make_one_job(here: Path, bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own test of several agents starts them: elastic range, a host's name, quotes that no shell took."""
    monkeypatch.setenv("HOME", str(here))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        "--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-conf='join_timeout=30,last_call_timeout=30,timeout=5'", "--rdzv-id=7", "--monitor-interval=1",
        bed.script("touch.py", TOUCH), str(here / "ranks"),
    ]  # fmt: skip
    other = subprocess.Popen([sys.executable, "-c", f"from launcher.api import main; main({words!r})"])
    bed.agents.append(other)
    main(words)
    assert other.wait(60) == 0
    assert touched(here) == ["0", "1", "2", "3"]


def test_wrong_wishes_are_raised_as_torch_raises_them(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Unsupported nproc_per_node value: unknown"):
        main(["--nproc-per-node=unknown", "x.py"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="Cuda is not available"):
        main(["--nproc-per-node=gpu", "x.py"])
    with pytest.raises(RuntimeError, match="MIN:MAX"):
        main(["--nnodes=1:2:3", "x.py"])
    with pytest.raises(AssertionError, match="min_nodes must be > 0"):
        main(["--nnodes=0", "x.py"])
    with pytest.raises(AssertionError, match="max_restarts"):
        main(["--max-restarts=-1", "x.py"])
    with pytest.raises(ValueError, match="say where the nodes meet"):
        main(["--nnodes=1:2", "x.py"])
    with pytest.raises(ValueError, match="no package here registers it"):
        main(["--logs-specs=DOES_NOT_EXIST", "x.py"])
    with pytest.raises(ValueError, match="--module and --no-python exclude each other"):
        main(["-m", "--no-python", "x.py"])
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(io.StringIO()):
        main(["--no-such-option", "x.py"])
    assert ended.value.code == 2


def test_a_worker_that_fails_is_torchs_error_and_goes_to_the_callers_error_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known complaint 10: exit 0 though a child failed. Known complaint 11: no traceback."""
    script = here / "fail.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] != '1':\n    open(f'{__file__}{os.environ[\"RANK\"]}', 'w').close()\n    signal.pause()\n"
        "while not all(os.path.exists(f'{__file__}{rank}') for rank in (0, 2)): time.sleep(0.01)\n"
        "raise ValueError('bad one')\n"
    )
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(here / "mine.json"))
    with pytest.raises(errors.ChildFailedError, match="bad one") as failed:
        main(["--nproc-per-node=3", "--log-dir", str(here / "logs"), str(script)])
    rank, first = failed.value.get_first_failure()
    assert (rank, first.local_rank, first.exitcode) == (1, 1, 1)
    assert first.error_file.endswith("attempt_0/1/error.json")
    assert {r: f.exitcode for r, f in failed.value.failures.items()} == {0: -15, 1: 1, 2: -15}
    assert "bad one" in (here / "mine.json").read_text()
    for text, code in (("raise SystemExit(9)", 9), ("import os; os.kill(os.getpid(), 11)", -11)):
        script.write_text(text)
        with pytest.raises(errors.ChildFailedError) as failed:
            main([str(script)])
        assert failed.value.failures[0].exitcode == code


def test_the_root_cause_is_what_was_seen_first_even_without_an_error_file(tmp_path: Path) -> None:
    """Known complaint 11: root cause first."""
    late = tmp_path / "error.json"
    late.write_text('{"message": {"message": "peer is gone", "extraInfo": {"py_callstack": "x", "timestamp": "100"}}}')
    failures = [
        {"rank": 3, "local_rank": 3, "pid": 1, "exitcode": -11, "error_file": "", "at": 100.2},
        {"rank": 0, "local_rank": 0, "pid": 2, "exitcode": 1, "error_file": str(late), "at": 100.9},
    ]
    error: Any = api._child_failed("name", failures)
    assert error.get_first_failure()[0] == 3


def test_what_workers_print_goes_to_this_process_stdout(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = here / "say.py"
    script.write_text("import os, sys\nprint('creating', os.environ['RANK'])\nprint('warning', file=sys.stderr)\n")
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: ")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(["--nproc-per-node=2", "--tee=3", str(script)])
    assert sorted(out.getvalue().splitlines()) == ["[rank0]: creating 0", "[rank1]: creating 1"]
    assert "[rank1]: warning\n" in err.getvalue()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_function_is_launched_and_its_results_come_back_by_rank(here: Path, method: str) -> None:
    launch = elastic_launch(config(here, start_method=method), scaled)
    assert launch(10) == {0: 10, 1: 11}
    assert elastic_launch(config(here, start_method=method), leaving)(0) == {0: None, 1: None}
    with pytest.raises(errors.ChildFailedError):
        elastic_launch(config(here, start_method=method), leaving)(3)


def test_a_function_can_talk_to_the_others_over_a_static_endpoint(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIVERUN_PRELOAD", "none,torch")
    static = config(here, rdzv_backend="static", rdzv_endpoint="127.0.0.1:0", rdzv_configs={"rank": 0})
    assert elastic_launch(static, summed)() == {0: 3.0, 1: 3.0}


def test_a_function_that_fails_is_torchs_error(here: Path) -> None:
    with pytest.raises(errors.ChildFailedError, match="ValueError: bad function") as failed:
        elastic_launch(config(here), failing)("1")
    assert failed.value.get_first_failure()[0] == 1
    assert failed.value.name == "failing"


def test_programs_are_launched_and_return_nothing(here: Path) -> None:
    (here / "touch.py").write_text(TOUCH)
    assert elastic_launch(config(here), sys.executable)("-u", str(here / "touch.py"), here / "ranks") == {}
    assert touched(here) == ["0", "1"]
    with pytest.raises(errors.ChildFailedError, match="/bin/false FAILED"):
        elastic_launch(config(here), "/bin/false")()
    with pytest.raises(AssertionError):
        elastic_launch(config(here), None)()


def test_every_field_of_torchs_configuration_is_handed_on(here: Path) -> None:
    std = torch_api.DefaultLogsSpecs.__init__.__globals__["Std"]
    numa = torch_api.NumaOptions(affinity_mode=__import__("torch.numa.binding").numa.binding.AffinityMode("node"))
    full = config(
        here, role="r", shutdown_timeout=7, signals_to_handle="SIGTERM", local_addr="127.0.0.9", numa_options=numa,
        duplicate_stdout_filters=["a,b", "c"], virtual_local_rank=True, rdzv_backend="static", rdzv_endpoint="h:1",
        logs_specs=torch_api.DefaultLogsSpecs(str(here), {0: std.OUT, 12: std.ALL}, std.ERR, {1, 0}),
    )  # fmt: skip
    words = api.config_words(full)
    for word in (
        "--nnodes=1:1", "--nproc-per-node=2", "--role=r", "--rdzv-id=r", "--max-restarts=0", "--monitor-interval=0.02",
        "--shutdown-timeout=7", "--start-method=fork", "--signals-to-handle=SIGTERM", "--local-addr=127.0.0.9",
        "--rdzv-backend=static", "--rdzv-endpoint=h:1", f"--log-dir={here}", "--redirects=0:1,12:3", "--tee=2",
        "--local-ranks-filter=0,1", "--duplicate-stdout-filters=a,,b,c", "--numa-binding=node", "--virtual-local-rank",
    ):  # fmt: skip
        assert word in words

    class Strange(torch_api.DefaultLogsSpecs):
        pass

    with pytest.raises(ValueError, match="Strange must be named"):
        api.config_words(config(here, logs_specs=Strange(str(here))))


CALLER = (
    "import sys\nfrom launcher.api import main\n"
    "try: main(['--nproc-per-node=2', sys.argv[1]])\n"
    "except BaseException as error: print(type(error).__name__, getattr(error, 'sigval', None), flush=True); raise\n"
)
PAUSE = "import os, signal\nopen(__file__ + os.environ['RANK'], 'w').close()\nsignal.pause()\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_caller_that_gets_a_signal_takes_the_job_with_it(bed: Bed, number: signal.Signals) -> None:
    """Known complaint 9: a crashed launcher's workers live on."""
    script = bed.script("pause.py", PAUSE)
    caller = subprocess.Popen(
        [sys.executable, bed.script("caller.py", CALLER), script], env=bed.environ(LIVERUN_PRELOAD="none"), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=bed.folder,
    )  # fmt: skip
    bed.agents.append(caller)
    for rank in range(2):
        until(f"rank {rank}", Path(script + str(rank)).exists)
    caller.send_signal(number)
    assert caller.wait(60) == (1 if number is signal.SIGTERM else -number)
    until("all to be gone", lambda: not processes_with(bed.mark), 20)
    assert caller.stdout is not None
    expected = f"SignalException {signal.SIGTERM!r}" if number is signal.SIGTERM else ""
    assert caller.stdout.read().strip() in (expected, "SignalException 15")


def test_nothing_of_this_process_is_touched(here: Path) -> None:
    """Other children of the caller are neither killed nor reaped, and its signal handlers come back."""
    other = subprocess.Popen(["sleep", "100"])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    started = time.monotonic()
    assert elastic_launch(config(here), scaled)(1) == {0: 1, 1: 2}
    assert time.monotonic() - started < 60
    assert other.poll() is None
    other.kill()
    assert other.wait() == -9
    assert {number: signal.getsignal(number) for number in before} == before
