"""The ``liverun`` command. ``liverun [OPTIONS] script.py [ARGS]`` is ``liverun run ...``.

Every option can also come from the environment: ``LIVERUN_<OPTION>``, and ``PET_<OPTION>`` for torchrun's.
Nothing here imports torch; what a command needs is imported when it runs.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from launcher import checkpoint
from launcher.abbreviate import AmbiguousError, Flag, expand

COMMANDS = ("run", "resize", "drain", "status", "events", "jobs", "stop", "store", "plan", "checkpoint")
FROM_AGENT = (
    "LIVERUN_JOB", "LIVERUN_RUN_DIR", "LIVERUN_LAYOUT", "LIVERUN_CHECKPOINT_DIR", "LIVERUN_CHECKPOINT_EVERY",
    "LIVERUN_KEEP_LAST", "LIVERUN_NOTICES", "LIVERUN_NOTICE_FILE", "LIVERUN_NOTICE_SIGNAL",
)  # fmt: skip
"""meant for, or set by, the agent above; a launcher started inside a worker must not take them for its own options"""

app = typer.Typer(
    name="liverun", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    no_args_is_help=True, help=(__doc__ or "").partition("Nothing here")[0],
)  # fmt: skip


app.add_typer(checkpoint.app)


def whole_number(text: str) -> int:
    """Read a whole number; what is none is named in the error, as the parser's own would not."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def seconds(text: str) -> float:
    """Read a duration in seconds, finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text!r} is not a number of seconds")
    return value


def option(
    name: str, text: str, *more: str, torchrun: bool = False, parser: Callable[[str], Any] | None = None
) -> Any:
    """Declare an option in both spellings, and its environment variables."""
    flags = [name] + ([name[:2] + name[2:].replace("-", "_")] if "-" in name[2:] else []) + list(more)
    dest = name[2:].replace("-", "_").upper()
    return typer.Option(
        *flags,
        help=text,
        parser=parser,
        envvar=[f"LIVERUN_{dest}"] + ([f"PET_{dest}"] if torchrun else []),
        show_envvar=False,
    )


def switch(name: str, text: str, *more: str) -> Any:
    """Declare a torchrun flag without a value."""
    return option(name, text, *more, torchrun=True)


def torch_option(name: str, text: str, *more: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Declare an option of torchrun."""
    return option(name, text, *more, torchrun=True, parser=parser)


class RunCommand(TyperCommand):
    """``liverun run``: options may be cut short, and end where the script begins."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write cut options in full, then parse as ever."""
        flags = [
            Flag(
                names=tuple(param.opts), takes_value=not getattr(param, "is_flag", False),
                torchrun=f"PET_{(param.name or '').upper()}" in (param.envvar or ())
                or param.name in ("logs_specs", "numa_binding"),
            )
            for param in self.get_params(ctx) if param.param_type_name == "option"
        ]  # fmt: skip
        try:
            words = expand(args, flags)
        except AmbiguousError as error:
            raise typer.BadParameter(str(error), ctx=ctx) from None
        return super().parse_args(ctx, words)


Job = Annotated[
    str | None, typer.Argument(help="the job; may be left out when one runs here", envvar="LIVERUN_JOB")
]
RunDir = Annotated[str | None, option("--run-dir", "folder in which jobs keep their run folders")]
AsJson = Annotated[bool, option("--json", "print JSON on stdout")]


@app.command(cls=RunCommand, context_settings={"allow_interspersed_args": False})
def run(  # noqa: PLR0917  (typer reads options from the signature)
    script: Annotated[str, typer.Argument(help="script, module (-m) or program (--no-python)")],
    args: Annotated[list[str] | None, typer.Argument(help="its arguments, passed on untouched")] = None,
    nnodes: Annotated[str, torch_option("--nnodes", "number of nodes, N or MIN:MAX")] = "1:1",
    nproc_per_node: Annotated[
        str, torch_option("--nproc-per-node", "ranked workers per node: a number, auto, cpu, gpu or xpu")
    ] = "1",
    standbys: Annotated[int, option("--standbys", "further workers that wait for a rank")] = 0,
    layout: Annotated[str | None, option("--layout", "first layout, like tp=2,pp=1")] = None,
    job: Annotated[str | None, option("--job", "id of the job; unique if left out")] = None,
    run_dir: RunDir = None,
    keep_runs: Annotated[
        int,
        option("--keep-runs", "run folders of ended jobs to keep; older ones are removed", parser=whole_number),
    ] = 20,
    staging: Annotated[str, option("--staging", "staging memory of a worker during a resize")] = "64MiB",
    verify: Annotated[
        str, option("--verify", "what a resize compares of what arrived: full, sample (1 slice in 8) or off")
    ] = "full",
    keep: Annotated[
        str,
        option(
            "--keep", "the old state until a resize commits: always, never (layers are given back), or auto"
        ),
    ] = "auto",
    defer: Annotated[
        str, option("--defer", "what moves beside the first step after a resize: optimizer, or nothing")
    ] = "nothing",
    checkpoint_dir: Annotated[
        str | None, option("--checkpoint-dir", "resume from the newest checkpoint in this folder, and save into it")
    ] = None,
    checkpoint_every: Annotated[
        int | None, option("--checkpoint-every", "steps between two checkpoints", parser=whole_number)
    ] = None,
    keep_last: Annotated[
        int | None, option("--keep-last", "checkpoints to keep; all if left out", parser=whole_number)
    ] = None,
    notices: Annotated[
        str,
        option("--notices", "clouds to ask whether this node will go: none, aws, aws-rebalance, gcp, azure"),
    ] = "none",
    notice_file: Annotated[
        str | None, option("--notice-file", "the node will go once this file is there; line 1: in how many seconds")
    ] = None,
    notice_signal: Annotated[
        str | None, option("--notice-signal", "a signal that says this node will go, like SIGUSR1; none if left out")
    ] = None,
    preload: Annotated[
        str,
        option(
            "--preload", "further modules, comma-separated, imported once for all workers; 'none': no module"
        ),
    ] = "",
    restart: Annotated[
        str,
        option("--restart", "processes that are well run a script that joins again (keep), or are replaced (fresh)"),
    ] = "keep",
    max_restarts: Annotated[
        int, torch_option("--max-restarts", "restarts of the whole world after a failure", parser=whole_number)
    ] = 0,
    shutdown_timeout: Annotated[
        float | None,
        torch_option("--shutdown-timeout", "seconds between asking workers to end and SIGKILL; 30", parser=seconds),
    ] = None,
    monitor_interval: Annotated[
        float, torch_option("--monitor-interval", "seconds between looks at the logs", parser=seconds)
    ] = 0.1,
    log_dir: Annotated[
        str | None,
        torch_option("--log-dir", "where redirected and teed streams go, instead of the run folder"),
    ] = None,
    module: Annotated[bool, switch("--module", "run a module, as python -m does", "-m")] = False,
    no_python: Annotated[bool, switch("--no-python", "run a program that is not python's")] = False,
    run_path: Annotated[bool, switch("--run-path", "run the script with runpy.run_path")] = False,
    standalone: Annotated[bool, switch("--standalone", "one node, no rendezvous")] = False,
    master_addr: Annotated[
        str | None, torch_option("--master-addr", "address the first world's store listens at; 127.0.0.1")
    ] = None,
    master_port: Annotated[
        int | None, torch_option("--master-port", "its port; a free one if left out, or 0", parser=whole_number)
    ] = None,
    rdzv_backend: Annotated[
        str, torch_option("--rdzv-backend", "liverun (also as static or c10d): a store of our own; or etcd")
    ] = "static",
    rdzv_endpoint: Annotated[
        str, torch_option("--rdzv-endpoint", "HOST:PORT where the nodes meet, the same on each; of etcd, a list")
    ] = "",
    rdzv_id: Annotated[
        str, torch_option("--rdzv-id", "shown to workers as TORCHELASTIC_RUN_ID; the job's id if left out")
    ] = "none",
    rdzv_conf: Annotated[
        str, torch_option("--rdzv-conf", "join_timeout=600,last_call_timeout=5,keep_alive_interval=5,…")
    ] = "",
    node_rank: Annotated[
        int | None, torch_option("--node-rank", "place of this node among the nodes", parser=whole_number)
    ] = None,
    local_addr: Annotated[
        str | None, torch_option("--local-addr", "where other nodes reach this one")
    ] = None,
    start_method: Annotated[
        str | None,
        torch_option("--start-method", "spawn: a new interpreter for each worker; else they are forked"),
    ] = None,
    role: Annotated[str, torch_option("--role", "name of the workers' role")] = "default",
    redirects: Annotated[
        str,
        torch_option(
            "--redirects", "keep off the console: 1 stdout, 2 stderr, 3 both, or RANK:N,RANK:N", "-r"
        ),
    ] = "0",
    tee: Annotated[
        str, torch_option("--tee", "into log files and on the console, prefixed; like --redirects", "-t")
    ] = "0",
    local_ranks_filter: Annotated[
        str, torch_option("--local-ranks-filter", "show only these local ranks on the console: 0,1,2")
    ] = "",
    ranks_filter: Annotated[
        str, option("--ranks-filter", "show only these global ranks on the console, in every world: 0,1,2")
    ] = "",
    duplicate_stdout_filters: Annotated[
        str,
        torch_option("--duplicate-stdout-filters", "copy teed lines with one of these words to a file"),
    ] = "",
    duplicate_stderr_filters: Annotated[
        str, torch_option("--duplicate-stderr-filters", "the same for stderr; ',,' stands for a comma")
    ] = "",
    event_log_handler: Annotated[
        str, torch_option("--event-log-handler", "console: torch's events on stderr as JSON")
    ] = "null",
    logs_specs: Annotated[
        str | None, option("--logs-specs", "entry point of torchrun.logs_specs that says where logs go")
    ] = None,
    numa_binding: Annotated[
        str | None,
        option("--numa-binding", "bind to the CPUs near a worker's GPU: node, socket, exclusive, core-complex"),
    ] = None,
    signals_to_handle: Annotated[
        str, torch_option("--signals-to-handle", "signals that end the job; workers are sent them")
    ] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    virtual_local_rank: Annotated[
        bool, switch("--virtual-local-rank", "LOCAL_RANK is 0 and CUDA_VISIBLE_DEVICES one device")
    ] = False,
) -> None:
    """Run a script on this node, with workers that can change their world."""
    words = dict(locals())
    from launcher.agent import run_agent, say
    from launcher.options import UsageError
    from launcher.outcome import write_reason
    from launcher.request import RunWords, read
    from launcher.rundir import JobError

    try:
        options, warnings = read(RunWords(**words), dict(os.environ), os.geteuid())
    except UsageError as error:
        say(str(error))
        write_reason(os.environ, str(error))
        raise SystemExit(2) from None
    for warning in warnings:
        say(warning, options.log_level)
    try:
        code = run_agent(options, sys.argv)
    except JobError as error:
        say(str(error))
        write_reason(os.environ, str(error))
        code = error.exit_code
    raise SystemExit(code)


@app.command()
def resize(  # noqa: PLR0917  (typer reads options from the signature)
    job: Job = None,
    workers: Annotated[
        int | None,
        option("--workers", "workers of the new world; as many as now if left out", parser=whole_number),
    ] = None,
    layout: Annotated[str | None, option("--layout", "layout of the new world; axes not named are 1")] = None,
    nodes: Annotated[int | None, option("--nodes", "nodes of the new world", parser=whole_number)] = None,
    replace: Annotated[
        str | None, option("--replace", "put a standby in place of this worker (id or rank)")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="wait until it is done", envvar="LIVERUN_WAIT")
    ] = True,
    timeout: Annotated[
        float, option("--timeout", "seconds that preparing may take", parser=seconds)
    ] = 60.0,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Ask a running job for another world."""
    from launcher import client
    from launcher.control import ResizeRequest
    from launcher.options import UsageError, parse_layout

    if nodes is not None and nodes < 1:
        client.complain(f"--nodes {nodes}: ask for at least 1", 2)
    if workers is None and layout is None and replace is None and nodes is None:
        client.complain("say what the world is to be: --workers N, --layout tp=2, or --replace RANK", 2)
    if replace is not None and (workers is not None or layout is not None or nodes is not None):
        client.complain("--replace keeps size and layout; leave --workers, --nodes and --layout out", 2)
    if timeout <= 0:
        client.complain(f"--timeout {timeout:g} is no time at all", 2)
    try:
        parse_layout(layout)
    except UsageError as error:
        client.complain(str(error), 2)
    wishes = [("--nodes", nodes), ("--workers", workers), ("--layout", layout), ("--replace", replace)]
    cause = "resize" + "".join(f" {name} {value}" for name, value in wishes if value is not None)
    _, record = client.job_folder(job, run_dir)
    request = ResizeRequest(
        workers=workers, nodes=nodes, layout=layout, replace=replace, timeout_s=timeout, cause=cause
    )
    raise SystemExit(client.resize(record, request, wait=wait, as_json=as_json))


@app.command()
def drain(  # noqa: PLR0917  (typer reads options from the signature)
    node: Annotated[str, typer.Argument(help="id or address of the node; 'liverun status' shows them")],
    job: Annotated[
        str | None, typer.Argument(help="the job; may be left out when one runs here", envvar="LIVERUN_JOB")
    ] = None,
    deadline: Annotated[
        str, option("--deadline", "how long moving its work away may take, like 30s or 2m")
    ] = "30s",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="wait until it is gone", envvar="LIVERUN_WAIT")
    ] = True,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Move a node's work to the others, then let it go."""
    from launcher import client
    from launcher.control import DrainRequest
    from launcher.options import UsageError, parse_duration

    try:
        deadline_s = parse_duration(deadline)
    except UsageError as error:
        client.complain(str(error), 2)
    _, record = client.job_folder(job, run_dir)
    request = DrainRequest(node=node, deadline_s=deadline_s)
    raise SystemExit(client.resize(record, request, wait=wait, as_json=as_json))


@app.command()
def status(
    job: Job = None,
    run_dir: RunDir = None,
    as_json: AsJson = False,
    watch: Annotated[bool, option("--watch", "again every second until the job ends")] = False,
) -> None:
    """Show a job as it is now."""
    import time

    from launcher import client
    from launcher.render import print_status

    folder, record = client.job_folder(job, run_dir, ended_too=True)
    while True:
        shown = client.fetch_status(folder, record)
        if as_json:
            print(json.dumps(shown), flush=True)
        else:
            print_status(shown)
        if not watch or shown["state"] in ("finished", "failed", "stopped"):
            return
        time.sleep(1.0)


@app.command()
def events(
    job: Job = None,
    run_dir: RunDir = None,
    as_json: AsJson = False,
    follow: Annotated[bool, option("--follow", "go on until the job ends")] = False,
    since: Annotated[int, option("--since", "only this generation and later ones")] = 0,
) -> None:
    """Show what happened to a job's world."""
    from launcher import client
    from launcher.events import read_events
    from launcher.render import event_line
    from launcher.rundir import read_record

    folder, _ = client.job_folder(job, run_dir, ended_too=True)

    def ended() -> bool:
        record = read_record(folder)
        return record is None or record.ended_already

    for event in read_events(folder / "events.jsonl", since=since, follow=follow, ended=ended):
        print(json.dumps(event) if as_json else event_line(event), flush=True)


@app.command()
def jobs(run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """List the jobs of this user on this node."""
    import dataclasses

    from launcher.render import print_jobs
    from launcher.rundir import list_jobs, resolve_root

    records = list_jobs(resolve_root(run_dir, os.environ, os.geteuid()))
    if as_json:
        print(json.dumps([dataclasses.asdict(record) for record in records]))
    else:
        print_jobs(records)


@app.command(context_settings={"allow_interspersed_args": False})
def plan(  # noqa: PLR0917  (typer reads options from the signature)
    before: Annotated[str, option("--from", "layout before, dp included, like tp=2,pp=2,dp=4")],
    after: Annotated[str, option("--to", "layout after")],
    flags: Annotated[
        list[str] | None, typer.Argument(help="after --: the model's flags as a Megatron script has them")
    ] = None,
    model: Annotated[str | None, option("--model", "file with a JSON object of the model's flags")] = None,
    workers_per_node: Annotated[
        int, option("--workers-per-node", "workers of a node; 0: one node has them all", parser=whole_number)
    ] = 0,
    rate: Annotated[str, option("--rate", "bytes a worker sends, and receives, in a second")] = "1GB",
    staging: Annotated[str, option("--staging", "staging memory of a worker during a resize")] = "64MiB",
    as_json: AsJson = False,
) -> None:
    """Say what a resize would move and take, with nothing running."""
    from launcher import client
    from launcher.options import UsageError, parse_bytes
    from launcher.planning import run_plan

    try:
        words = {
            "from": before, "to": after, "workers-per-node": str(workers_per_node or 2**31),
            "bytes-per-s": str(parse_bytes(rate)), "staging-bytes": str(parse_bytes(staging)),
        }  # fmt: skip
    except UsageError as error:
        client.complain(str(error), 2)
    if workers_per_node < 0 or words["bytes-per-s"] == "0":
        client.complain("--workers-per-node is not below 0, and --rate is above 0", 2)
    if model is not None:
        words["model"] = model
    raise SystemExit(run_plan(words, flags or [], as_json=as_json))


@app.command()
def stop(job: Job = None, run_dir: RunDir = None) -> None:
    """End a job cleanly, and wait until nothing of it is left."""
    from launcher import client

    folder, record = client.job_folder(job, run_dir)
    raise SystemExit(client.stop(folder, record))


@app.command()
def store(  # noqa: PLR0917  (typer reads options from the signature)
    job: Annotated[str | None, option("--job", "id of the job that the store serves")] = None,
    host: Annotated[str | None, option("--host", "the one address to listen at")] = None,
    port: Annotated[str, option("--port", "its port; 0 takes a free one, and says which")] = "0",
    journal: Annotated[str | None, option("--journal", "the file that keeps everything; made if not there")] = None,
    # find_token() reads the variable of that name: given as an option, it would be made where it is missing
    token_file: Annotated[
        str | None,
        typer.Option("--token-file", "--token_file", help="the job's token, mode 0600; made if not there"),
    ] = None,
    place_file: Annotated[str | None, option("--place-file", "where to write address and port as JSON")] = None,
    tls_cert: Annotated[str | None, option("--tls-cert", "certificate of the store, with its chain, PEM")] = None,
    tls_key: Annotated[str | None, option("--tls-key", "its key, PEM")] = None,
    tls_client_ca: Annotated[
        str | None, option("--tls-client-ca", "ask clients for a certificate of this authority")
    ] = None,
    salvage: Annotated[bool, option("--salvage", "open a damaged journal up to where it is whole")] = False,
) -> None:
    """Serve a job's rendezvous store on a host that outlives its nodes, until SIGTERM."""
    words = dict(locals())
    from launcher.options import UsageError
    from launcher.store.command import read
    from launcher.store.service import main as serve

    try:
        options = read(**words)
    except UsageError as error:
        sys.stderr.write(f"liverun store: {error}\n")
        raise SystemExit(2) from None
    raise SystemExit(serve(options))


def main() -> None:
    """Entry of the ``liverun`` command."""
    words = sys.argv[1:]
    if words and words[0] not in (*COMMANDS, "--help"):
        words = ["run", *words]
    if words and words[0] == "run" and "LIVERUN_WORKER" in os.environ:
        for name in FROM_AGENT:
            os.environ.pop(name, None)
    try:
        app(words, prog_name="liverun")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
