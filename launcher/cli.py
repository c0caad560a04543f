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
from pathlib import Path
from typing import Annotated, Any

import typer

COMMANDS = ("run", "resize", "status", "events", "jobs", "stop")
FROM_AGENT = ("LIVERUN_JOB", "LIVERUN_RUN_DIR", "LIVERUN_LAYOUT")
"""set for workers; a launcher started inside a worker must not take them for its own options"""

app = typer.Typer(
    name="liverun", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    no_args_is_help=True, help=(__doc__ or "").partition("Nothing here")[0],
)  # fmt: skip


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


def torch_option(name: str, text: str, *more: str) -> Any:
    """Declare an option of torchrun."""
    return option(name, text, *more, torchrun=True)


Job = Annotated[
    str | None, typer.Argument(help="the job; may be left out when one runs here", envvar="LIVERUN_JOB")
]
RunDir = Annotated[str | None, option("--run-dir", "folder in which jobs keep their run folders")]
AsJson = Annotated[bool, option("--json", "print JSON on stdout")]


@app.command(context_settings={"allow_interspersed_args": False})
def run(  # noqa: PLR0917  (typer reads options from the signature)
    script: Annotated[str, typer.Argument(help="script, module (-m) or program (--no-python)")],
    args: Annotated[list[str] | None, typer.Argument(help="its arguments, passed on untouched")] = None,
    nnodes: Annotated[str, torch_option("--nnodes", "number of nodes, N or MIN:MAX")] = "1:1",
    nproc_per_node: Annotated[
        str, torch_option("--nproc-per-node", "ranked workers per node: a number, auto, cpu or gpu")
    ] = "1",
    standbys: Annotated[
        int,
        option(
            "--standbys",
            "further workers that wait for a rank",
        ),
    ] = 0,
    layout: Annotated[str | None, option("--layout", "first layout, like tp=2,pp=1")] = None,
    job: Annotated[str | None, option("--job", "id of the job; unique if left out")] = None,
    run_dir: RunDir = None,
    staging: Annotated[str, option("--staging", "staging memory of a worker during a resize")] = "512MiB",
    preload: Annotated[
        str,
        option(
            "--preload", "further modules, comma-separated, imported once for all workers; 'none': no module"
        ),
    ] = "",
    max_restarts: Annotated[
        int, torch_option("--max-restarts", "restarts of the whole world after a failure")
    ] = 0,
    shutdown_timeout: Annotated[
        float, torch_option("--shutdown-timeout", "seconds between asking workers to end and SIGKILL")
    ] = 30.0,
    monitor_interval: Annotated[
        float, torch_option("--monitor-interval", "seconds between looks at the logs")
    ] = 0.05,
    log_dir: Annotated[
        str | None, torch_option("--log-dir", "where logs go, instead of the run folder")
    ] = None,
    module: Annotated[bool, switch("--module", "run a module, as python -m does", "-m")] = False,
    no_python: Annotated[bool, switch("--no-python", "run a program that is not python's")] = False,
    standalone: Annotated[bool, switch("--standalone", "one node, no rendezvous")] = False,
    master_addr: Annotated[
        str, torch_option("--master-addr", "address the first world's store listens at")
    ] = "127.0.0.1",
    master_port: Annotated[int, torch_option("--master-port", "its port; 0 takes a free one")] = 0,
    rdzv_backend: Annotated[str, torch_option("--rdzv-backend", "accepted")] = "static",
    rdzv_endpoint: Annotated[str, torch_option("--rdzv-endpoint", "accepted")] = "",
    rdzv_id: Annotated[str, torch_option("--rdzv-id", "shown to workers as TORCHELASTIC_RUN_ID")] = "none",
    rdzv_conf: Annotated[str, torch_option("--rdzv-conf", "ignored")] = "",
    node_rank: Annotated[int, torch_option("--node-rank", "ignored")] = 0,
    local_addr: Annotated[str | None, torch_option("--local-addr", "ignored")] = None,
    start_method: Annotated[str | None, torch_option("--start-method", "ignored")] = None,
    role: Annotated[str | None, torch_option("--role", "ignored")] = None,
    redirects: Annotated[str | None, torch_option("--redirects", "ignored", "-r")] = None,
    tee: Annotated[str | None, torch_option("--tee", "ignored", "-t")] = None,
    local_ranks_filter: Annotated[str | None, torch_option("--local-ranks-filter", "ignored")] = None,
    event_log_handler: Annotated[str | None, torch_option("--event-log-handler", "ignored")] = None,
    logs_specs: Annotated[str | None, torch_option("--logs-specs", "ignored")] = None,
    numa_binding: Annotated[str | None, torch_option("--numa-binding", "ignored")] = None,
    signals_to_handle: Annotated[str | None, torch_option("--signals-to-handle", "ignored")] = None,
    run_path: Annotated[bool, switch("--run-path", "ignored")] = False,
    virtual_local_rank: Annotated[bool, switch("--virtual-local-rank", "ignored")] = False,
) -> None:
    """Run a script on this node, with workers that can change their world."""
    from launcher.agent import run_agent, say
    from launcher.options import (
        RunOptions,
        UsageError,
        check_job_id,
        count_cpus,
        count_gpus,
        parse_bytes,
        parse_layout,
        parse_nnodes,
        parse_nproc,
        refuse_if,
    )
    from launcher.rundir import JobError, resolve_root

    ignored = {
        "--rdzv-conf": rdzv_conf, "--node-rank": node_rank, "--local-addr": local_addr,
        "--start-method": start_method, "--role": role, "--redirects": redirects, "--tee": tee,
        "--local-ranks-filter": local_ranks_filter, "--event-log-handler": event_log_handler,
        "--logs-specs": logs_specs, "--numa-binding": numa_binding, "--signals-to-handle": signals_to_handle,
        "--run-path": run_path, "--virtual-local-rank": virtual_local_rank,
        "--rdzv-backend": "" if rdzv_backend in ("static", "c10d") else rdzv_backend,
        "--rdzv-endpoint": rdzv_endpoint and not standalone,
    }  # fmt: skip
    environ = dict(os.environ)
    try:
        parse_nnodes(nnodes)
        refuse_if(module and no_python, "--module and --no-python exclude each other")
        negative = standbys < 0 or max_restarts < 0 or shutdown_timeout < 0
        refuse_if(negative, "--standbys, --max-restarts and --shutdown-timeout are not below 0")
        nproc = parse_nproc(nproc_per_node, num_cpus=count_cpus(), num_gpus=count_gpus(environ))
        first_layout = parse_layout(layout)
        misfit = first_layout.misfit(nproc) if first_layout is not None else None
        refuse_if(misfit is not None, misfit or "")
        options = RunOptions(
            mode="module" if module else "program" if no_python else "script",
            argv=(script, *(args or ())), nproc=nproc, standbys=standbys, layout=first_layout,
            job=check_job_id(job), root=resolve_root(run_dir, environ, os.geteuid()),
            log_dir=Path(log_dir).absolute() if log_dir else None, staging_bytes=parse_bytes(staging),
            max_restarts=max_restarts, shutdown_timeout_s=shutdown_timeout, host=master_addr,
            port=master_port, rdzv_id=rdzv_id, preload=preload,
            monitor_interval_s=monitor_interval, environ=environ,
        )  # fmt: skip
    except UsageError as error:
        say(str(error))
        raise SystemExit(2) from None
    for name, value in ignored.items():
        if value:
            say(f"{name} is ignored by this version")
    try:
        code = run_agent(options, sys.argv)
    except JobError as error:
        say(str(error))
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

    if nodes not in (None, 1):
        client.complain(f"--nodes {nodes}: this version runs on one node only", 2)
    if workers is None and layout is None and replace is None and nodes is None:
        client.complain("say what the world is to be: --workers N, --layout tp=2, or --replace RANK", 2)
    if replace is not None and (workers is not None or layout is not None):
        client.complain("--replace keeps size and layout; leave --workers and --layout out", 2)
    if timeout <= 0:
        client.complain(f"--timeout {timeout:g} is no time at all", 2)
    try:
        parse_layout(layout)
    except UsageError as error:
        client.complain(str(error), 2)
    wishes = [("--workers", workers), ("--layout", layout), ("--replace", replace)]
    cause = "resize" + "".join(f" {name} {value}" for name, value in wishes if value is not None)
    _, record = client.job_folder(job, run_dir)
    request = ResizeRequest(workers=workers, layout=layout, replace=replace, timeout_s=timeout, cause=cause)
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


@app.command()
def stop(job: Job = None, run_dir: RunDir = None) -> None:
    """End a job cleanly, and wait until nothing of it is left."""
    from launcher import client

    folder, record = client.job_folder(job, run_dir)
    raise SystemExit(client.stop(folder, record))


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
