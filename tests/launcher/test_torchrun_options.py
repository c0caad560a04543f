"""Every option of torchrun, in every spelling, against what torchrun's own parser makes of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from launcher_bed import Bed, until
from typer.main import get_command

from launcher.abbreviate import AmbiguousError, Flag, expand
from launcher.cli import app
from launcher.options import UsageError, parse_endpoint, parse_nproc, parse_signals
from launcher.streams import StreamChoice, line_prefix, parse_filters, parse_ranks

TORCHRUN = {
    "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone",
    "max_restarts", "monitor_interval", "start_method", "event_log_handler", "role", "module", "no_python",
    "run_path", "log_dir", "redirects", "tee", "local_ranks_filter", "duplicate_stdout_filters",
    "duplicate_stderr_filters", "node_rank", "master_addr", "master_port", "local_addr", "logs_specs",
    "numa_binding", "signals_to_handle", "shutdown_timeout", "virtual_local_rank",
}  # fmt: skip
NOT_FROM_PET = {"logs_specs", "numa_binding"}
SHOW = (
    "import json, os, sys\n"
    "print(json.dumps({'argv': sys.argv, 'path0': sys.path[0], 'name': __name__, 'env': dict(os.environ)}))\n"
)


def run_flags() -> list[Flag]:
    """What the command itself declares."""
    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    return [
        Flag(names=tuple(p.opts), takes_value=not p.is_flag, torchrun=p.name in TORCHRUN)
        for p in command.params
        if p.param_type_name == "option"
    ]


@pytest.mark.e2e
def test_every_option_of_torchrun_is_there_with_its_flags_its_default_and_its_variable() -> None:
    """Known complaint 24: every option by flag and by environment."""
    run = pytest.importorskip("torch.distributed.run")
    ours = {p.name: p for p in get_command(app).commands["run"].params}  # type: ignore[attr-defined]
    theirs = [a for a in run.get_args_parser()._actions if a.option_strings and a.dest != "help"]
    assert {action.dest for action in theirs} == TORCHRUN
    for action in theirs:
        option = ours[action.dest]
        assert set(action.option_strings) <= set(option.opts), action.dest
        from_pet = f"PET_{action.dest.upper()}" in option.envvar
        assert from_pet is (action.dest not in NOT_FROM_PET)
        assert (action.nargs == 0) is option.is_flag
        if action.dest not in ("start_method", "master_addr", "event_log_handler"):
            assert option.default in (action.default, ",".join(action.default or ()) if action.default == [] else None), action.dest


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--redirect=3", "x.py", "--redirect=3"], ["--redirects=3", "x.py", "--redirect=3"]),
        (["--nproc", "2", "x.py"], ["--nproc-per-node", "2", "x.py"]),
        (["--nproc_p=2", "x.py"], ["--nproc_per_node=2", "x.py"]),
        (["-r3", "-t=1", "x.py", "-r3"], ["-r", "3", "-t", "1", "x.py", "-r3"]),
        (["-mr", "3", "mod", "-m"], ["-m", "-r", "3", "mod", "-m"]),
        (["--stand", "x.py"], ["--standalone", "x.py"]),  # not ours, --standbys
        (["--standb", "1", "x.py"], ["--standbys", "1", "x.py"]),
        (["--nn", "--master-p", "x.py"], ["--nnodes", "--master-p", "x.py"]),  # the value is not looked at
        (["--tee", "--", "x.py"], ["--tee", "--", "x.py"]),
        (["--", "--nproc", "2"], ["--", "--nproc", "2"]),
        (["-", "--nproc"], ["-", "--nproc"]),
        (["--unknown", "x.py"], ["--unknown", "x.py"]),
        (["-z", "x.py"], ["-z", "x.py"]),
        (["--nproc"], ["--nproc-per-node"]),
        ([], []),
    ],
)
def test_options_may_be_cut_short_until_the_script(words: list[str], expected: list[str]) -> None:
    assert expand(words, run_flags()) == expected


def test_a_prefix_of_several_options_is_refused_by_name(bed: Bed) -> None:
    with pytest.raises(AmbiguousError, match=r"--log is ambiguous; it could be --log-dir, --logs-specs"):
        expand(["--log", "3", "x.py"], run_flags())
    done = bed.cli("--rdzv", "3", "x.py")
    assert done.returncode == 2
    assert "--rdzv is ambiguous; it could be --rdzv-backend" in done.stderr


@pytest.mark.e2e
def test_cut_options_mean_what_argparse_makes_of_them() -> None:
    """Whatever torchrun's own parser takes as an abbreviation means the same here."""
    run = pytest.importorskip("torch.distributed.run")
    flags, values = run_flags(), {"module", "no_python", "run_path", "standalone", "virtual_local_rank"}
    tried = 0
    for action in run.get_args_parser()._actions:
        for full in action.option_strings:
            if not full.startswith("--") or action.dest == "help":
                continue
            for end in range(4, len(full) + 1):
                word = full[:end]
                value = [] if action.dest in values else [action.choices[-1] if action.choices else "1"]
                try:
                    parsed = run.parse_args([word, *value, "x.py"])
                except SystemExit:
                    continue
                tried += 1
                got = expand([word, *value, "x.py"], flags)
                assert got[0].replace("_", "-") == full.replace("_", "-"), word
                assert parsed.training_script == "x.py"
    assert tried > 200


def test_the_script_gets_its_arguments_untouched(bed: Bed) -> None:
    args = ["a b", "", "--nproc", "9", "-r", "3", "--", "-m", "*", "--tee=1", "é", "$x"]
    agent = bed.launch("--nproc", "1", "--redirect=0", bed.script("show.py", SHOW), *args)
    assert agent.wait() == 0, agent.stderr()
    assert json.loads(agent.stdout())["argv"][1:] == args


def test_the_local_rank_macro_is_filled_in(bed: Bed) -> None:
    agent = bed.launch("--nproc-per-node", "2", "--no-python", "/bin/echo", "rank=${local_rank}", "$$ ${other}")
    assert agent.wait() == 0
    assert sorted(agent.stdout().splitlines()) == [
        "[default0]:rank=0 $$ ${other}", "[default1]:rank=1 $$ ${other}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "value", "name", "seen"),
    [
        ("PET_ROLE", "trainer", "ROLE_NAME", "trainer"),
        ("PET_RDZV_ID", "r7", "TORCHELASTIC_RUN_ID", "r7"),
        ("PET_MAX_RESTARTS", "4", "TORCHELASTIC_MAX_RESTARTS", "4"),
        ("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1", "TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1"),
        ("PET_MASTER_ADDR", "127.0.0.2", "MASTER_ADDR", "127.0.0.2"),
        ("PET_LOCAL_ADDR", "127.0.0.3", "MASTER_ADDR", "127.0.0.3"),
        ("PET_VIRTUAL_LOCAL_RANK", "1", "CUDA_VISIBLE_DEVICES", "0"),
        ("PET_STANDALONE", "1", "RANK", "0"),
    ],
)
def test_options_come_from_torchruns_variables(bed: Bed, variable: str, value: str, name: str, seen: str) -> None:
    """Known complaint 24: a time-out cannot be set from the environment."""
    agent = bed.launch(bed.script("show.py", SHOW), **{variable: value})
    assert agent.wait() == 0, agent.stderr()
    assert json.loads(agent.stdout())["env"][name] == seen


def test_run_ids_are_unique_unless_given_and_standalone_ignores_a_given_one(bed: Bed) -> None:
    """Known complaint 21: two jobs share stale state because the id is "none"."""
    script = bed.script("show.py", "import os\nprint(os.environ['TORCHELASTIC_RUN_ID'])\n")
    ids = []
    for words in ([], ["--rdzv-id", "none"], ["--standalone", "--rdzv-id", "mine"], ["--rdzv-id", "mine"]):
        agent = bed.launch(*words, script)
        assert agent.wait() == 0
        ids.append(agent.stdout().strip())
    assert ids[3] == "mine"
    assert len({*ids, "none"}) == 5


def test_a_static_endpoint_and_a_master_port_are_where_the_store_listens(bed: Bed) -> None:
    """Known complaint 22: given addresses are replaced."""
    script = bed.script("show.py", "import os\nprint(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])\n")
    for words in (["--rdzv-endpoint", "127.0.0.1:38471"], ["--master-port", "38471"], ["--master_port=38471"]):
        agent = bed.launch(*words, script)
        assert agent.wait() == 0, agent.stderr()
        assert agent.stdout() == "127.0.0.1 38471\n"


def test_start_method_spawn_is_a_fresh_interpreter_and_the_default_a_fork(bed: Bed) -> None:
    script = bed.script("who.py", "import sys\nprint('liverun.template' in sys.modules, sys.stdout.write_through, sys.path[0])\n")
    for method, forked in ((None, True), ("fork", True), ("forkserver", True), ("spawn", False)):
        agent = bed.launch(*(["--start-method", method] if method else []), script)
        assert agent.wait() == 0, agent.stderr()
        words = agent.stdout().split()
        assert words == [str(forked), "True", str(bed.folder)]  # torchrun runs python -u


def test_the_start_method_comes_from_its_variable_and_an_option_goes_before_it(bed: Bed) -> None:
    script = bed.script("who.py", "import sys\nprint('liverun.template' in sys.modules)\n")
    for words, variable, forked in (((), "spawn", False), (("--start-method", "fork"), "spawn", True), ((), "", True)):
        agent = bed.launch(*words, script, PET_START_METHOD=variable)
        assert agent.wait() == 0, agent.stderr()
        assert agent.stdout() == f"{forked}\n"


def test_workers_of_fresh_interpreters_join_and_are_resized(bed: Bed) -> None:
    """A standby of its own interpreter, and all of them ended with the job."""
    agent = bed.fake(1, 1, "--start-method", "spawn")
    agent.event("world")
    until("the standby", lambda: agent.status()["nodes"][0]["standbys"] == 1)
    before = agent.pids()
    done = bed.cli("resize", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert agent.pids()["w0"] == before["w0"]
    for pid in agent.pids().values():
        assert b"liverun.template" not in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    assert agent.finish() == 0


def test_modules_and_paths_run_in_both_start_methods(bed: Bed) -> None:
    (bed.folder / "pack.py").write_text(SHOW)
    for method in ("fork", "spawn"):
        for words, first in ((("-m", "pack"), str(bed.folder)), (("--run-path", str(bed.folder / "pack.py")), None)):
            agent = bed.launch("--start-method", method, *words, "-x", "1")
            assert agent.wait() == 0, agent.stderr()
            seen = json.loads(agent.stdout())
            assert (seen["argv"][1:], seen["name"]) == (["-x", "1"], "__main__")
            assert (seen["path0"] == str(bed.folder)) is (first is not None)


def test_run_path_goes_before_no_python_and_a_bad_exit_is_one(bed: Bed) -> None:
    script = bed.script("bad.py", "raise SystemExit(5)\n")
    agent = bed.launch("--run-path", "--no-python", script)
    assert agent.wait() == 1
    assert "exit code 5" in agent.stderr()


def test_forked_workers_do_not_draw_the_same_random_numbers(bed: Bed) -> None:
    pytest.importorskip("numpy")
    script = bed.script("draw.py", "import random, numpy\nprint(random.random(), numpy.random.rand())\n")
    agent = bed.launch("--nproc-per-node", "2", script, LIVERUN_PRELOAD="none,numpy.random")
    assert agent.wait() == 0
    one, two = (line.partition(":")[2].split() for line in agent.stdout().splitlines())
    assert one[0] != two[0]
    assert one[1] != two[1]


def test_a_print_is_seen_at_once_and_pipes_end_as_in_a_shell(bed: Bed) -> None:
    script = bed.script("wait.py", "import signal, sys\nsys.stdout.write('no newline')\nsignal.pause()\n")
    agent = bed.launch(script)
    until("the words", lambda: agent.stdout() == "no newline")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    piped = bed.launch("--no-python", "/bin/sh", "-c", "yes | head -1")
    assert piped.wait() == 0
    assert (piped.stdout(), "roken pipe" in piped.stderr()) == ("y\n", False)


def test_virtual_local_ranks_see_one_device_each(bed: Bed) -> None:
    script = bed.script("show.py", "import os\nprint(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])\n")
    agent = bed.launch("--virtual-local-rank", "--nproc-per-node", "2", script, CUDA_VISIBLE_DEVICES="4, 7")
    assert agent.wait() == 0
    assert sorted(agent.stdout().splitlines()) == ["[default0]:0 0 4", "[default1]:1 0 7"]
    few = bed.cli("--virtual-local-rank", "--nproc-per-node", "3", script, CUDA_VISIBLE_DEVICES="4,7")
    assert few.returncode == 2
    assert "3 workers, but CUDA_VISIBLE_DEVICES=4,7 names 2" in few.stderr


def test_a_signal_to_handle_ends_the_job_and_is_what_workers_get(bed: Bed) -> None:
    """Known complaint 16: SIGUSR1/2 not forwarded."""
    script = bed.script(
        "usr.py",
        "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: (print('saved'), sys.exit(0)))\nprint('up')\nsignal.pause()\n",
    )
    agent = bed.launch("--signals-to-handle", "SIGTERM,SIGUSR1,SIGNOPE", script)
    until("the worker", lambda: agent.stdout() == "up\n")
    agent.signal(signal.SIGUSR1)
    assert agent.wait() == 128 + signal.SIGUSR1
    assert agent.stdout() == "up\nsaved\n"
    assert "SIGNOPE cannot be handled" in agent.stderr()


def test_torchs_events_are_printed_on_request(bed: Bed) -> None:
    agent = bed.launch("--event-log-handler", "console", "--nproc-per-node", "2", "--role", "r", bed.script("ok.py", ""))
    assert agent.wait() == 0
    events = [json.loads(line) for line in agent.stderr().splitlines() if line.startswith("{")]
    assert [e["name"].rpartition(".")[2] for e in events] == ["START", "START", "SUCCEEDED", "SUCCEEDED", "SUCCEEDED"]
    assert [e["source"] for e in events] == ["WORKER"] * 4 + ["AGENT"]
    assert {e["metadata"]["global_rank"] for e in events} == {0, 1, None}
    assert all(e["metadata"]["role"] == "r" and e["timestamp"] == 0 for e in events)
    failed = bed.launch("--event-log-handler", "console", bed.script("bad.py", "raise ValueError('bad')"))
    assert failed.wait() == 1
    last = [json.loads(line) for line in failed.stderr().splitlines() if line.startswith("{")]
    assert [e["metadata"]["state"] for e in last] == ["START", "FAILED", "SUCCEEDED"]
    assert "ValueError: bad" in last[1]["metadata"]["raw_error"]


@pytest.mark.e2e
def test_numa_binding_is_torchs_own(bed: Bed) -> None:
    """A stand-in for torch's look at the hardware shows that its answer is what a worker is bound to."""
    pytest.importorskip("torch")
    (bed.folder / "fakenuma.py").write_text(
        "import torch.numa.binding as b\n"
        "b._get_validated_logical_cpus_to_bind_to = lambda *, gpu_index, numa_options: {min(__import__('os').sched_getaffinity(0))}\n"
    )
    script = bed.script("cpus.py", "import os\nprint(len(os.sched_getaffinity(0)))\n")
    for method in ("fork", "spawn"):
        agent = bed.launch(
            "--numa-binding", "node", "--start-method", method, script,
            LIVERUN_PRELOAD="none,fakenuma", PYTHONPATH=f"{bed.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        )  # fmt: skip
        assert agent.wait() == 0, agent.stderr()
        assert agent.stdout() == "1\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--start-method", "thread", "x.py"], "--start-method 'thread' is none of spawn, fork, forkserver"),
        (["--numa-binding", "near", "x.py"], "--numa-binding 'near' is none of node"),
        (["--event-log-handler", "tape", "x.py"], "--event-log-handler 'tape' is none of null"),
        (["-r", "4", "x.py"], "--redirects '4': write 0 (nothing)"),
        (["-t", "0:1,x:2", "x.py"], "--tee '0:1,x:2': write 0"),
        (["--local-ranks-filter", "0;1", "x.py"], "--local-ranks-filter '0;1' is no comma-separated list"),
        (["--rdzv-conf", "timeout", "x.py"], "--rdzv-conf 'timeout': write KEY=VALUE"),
        (["--rdzv-endpoint", "host", "x.py"], "the port is missing"),
        (["--rdzv-endpoint", "host:port", "x.py"], "--rdzv-endpoint 'host:port' is not HOST:PORT"),
        (["--rdzv-id", "a/b", "x.py"], "--rdzv-id 'a/b'"),
        (["--monitor-interval", "0", "x.py"], "--monitor-interval 0 is no time at all"),
        (["--max-restarts", "many", "x.py"], "'many' is not a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_sentence_and_exit_code_2(bed: Bed, words: list[str], sentence: str) -> None:
    done = bed.cli(*words)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_the_shutdown_timeout_comes_from_torchs_variable_too(bed: Bed) -> None:
    """Known complaint 15: one --shutdown-timeout for all paths."""
    done = bed.cli(bed.script("ok.py", ""), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="soon")
    assert (done.returncode, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT='soon'" in done.stderr) == (2, True)
    script = bed.script("deaf.py", "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\nsignal.pause()\n")
    agent = bed.launch(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    until("the worker", lambda: agent.stdout() == "up\n")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    assert "the workers have 1 s to end" in agent.stderr()


def test_values_are_read_as_torch_reads_them() -> None:
    choice = StreamChoice.parse("0:3,10:1,2:0", "-r")
    assert [choice.has(rank, 1) for rank in (0, 1, 2, 10)] == [True, False, False, True]
    assert [choice.has(rank, 2) for rank in (0, 1, 2, 10)] == [True, False, False, False]
    assert StreamChoice.parse("2", "-r").has(99, 2)
    assert parse_filters("apple,a,,b,") == ("apple", "a,b", "")
    assert parse_filters("") == ()
    assert parse_ranks("0, 12", "x") == frozenset({0, 12})
    assert line_prefix("[${role_name}|${rank}|$local_rank]$x", role="r", rank=3, local_rank=1) == "[r|3|1]$x"
    assert line_prefix(None, role="r", rank=3, local_rank=1) == "[r3]:"
    for text, expected in (
        ("h:1", ("h", 1)), ("[::1]:2", ("::1", 2)), ("[::1]", ("::1", None)), ("h", ("h", None)),
    ):  # fmt: skip
        assert parse_endpoint(text) == expected
    assert parse_signals("SIGTERM, SIGUSR2,SIGKILL,") == ([signal.SIGTERM, signal.SIGUSR2], ["SIGKILL"])


def test_nproc_asks_torch_only_for_devices_we_cannot_count() -> None:
    asked: list[str] = []

    def count(kind: str) -> int:
        asked.append(kind)
        return 4 if kind == "xpu" else 0

    assert parse_nproc("xpu", num_cpus=2, num_gpus=0, ask_torch=count) == 4
    assert parse_nproc("3", num_cpus=2, num_gpus=0, ask_torch=count) == 3
    with pytest.raises(UsageError, match="torch finds no device called tpu here"):
        parse_nproc("tpu", num_cpus=2, num_gpus=0, ask_torch=count)
    with pytest.raises(UsageError, match="neither a number of at least 1"):
        parse_nproc("-1", num_cpus=2, num_gpus=0, ask_torch=count)
    assert asked == ["xpu", "tpu"]


def test_the_commands_start_without_what_the_script_needs(bed: Bed) -> None:
    """A program, and fresh interpreters, do not wait for the template to import torch."""
    look = (
        "import pathlib\n"
        "for e in pathlib.Path('/proc').iterdir():\n"
        "    if e.name.isdigit() and b'liverun.template' in (e / 'cmdline').read_bytes():\n"
        "        env = (e / 'environ').read_bytes().replace(b'\\0', b'\\n').decode()\n"
        f"        if {bed.mark!r} in env: open({str(bed.folder / 'template')!r}, 'w').write(env)\n"
    )
    script = bed.script("look.py", look)
    for words in (("--no-python", sys.executable, script), ("--start-method", "spawn", script)):
        agent = bed.launch(*words, LIVERUN_PRELOAD="")
        assert agent.wait() == 0
        assert "LIVERUN_PRELOAD=none" in (bed.folder / "template").read_text()
