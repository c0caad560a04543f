"""``liverun checkpoint``: take one, look at one, compare two, and turn others' into ours and back.

What a command needs is imported when it runs; only ``convert`` and ``export`` import torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.tree import Tree

    from resharding.checkpoint.buckets import Buffer
    from resharding.checkpoint.opened import Checkpoint

app = typer.Typer(
    name="checkpoint", rich_markup_mode=None, no_args_is_help=True,
    help="Take a checkpoint of a running job, look into one, check it, compare two, convert and export.",
)  # fmt: skip
CheckpointPath = Annotated[Path, typer.Argument(help="a checkpoint, or a folder of them: the newest")]
AsJson = Annotated[
    bool, typer.Option("--json", help="print JSON on stdout", envvar="LIVERUN_JSON", show_envvar=False)
]


@contextmanager
def _opened(path: Path) -> Iterator[Checkpoint]:
    """Open a checkpoint; what is wrong with it ends the command with 2, or with 1 if it is damaged later on."""
    from launcher.client import complain
    from resharding.checkpoint.format import BadCheckpoint
    from resharding.checkpoint.opened import Checkpoint

    try:
        with Checkpoint.open(path) as checkpoint:
            yield checkpoint
    except BadCheckpoint as error:
        complain(str(error), 1 if "damaged" in str(error) or "cut short" in str(error) else 2)
    except OSError as error:
        complain(f"{error.filename or path} cannot be read: {error.strerror or error}", 2)


@app.command()
def save(
    job: Annotated[
        str | None, typer.Argument(help="the job; may be left out when one runs here", envvar="LIVERUN_JOB")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="seconds it may take", envvar="LIVERUN_TIMEOUT")
    ] = 600.0,
    run_dir: Annotated[
        str | None,
        typer.Option("--run-dir", "--run_dir", help="folder of the jobs' run folders", envvar="LIVERUN_RUN_DIR"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Have a running job take a checkpoint at its next boundary, and wait until it exists."""
    from launcher import client
    from launcher.control import Outcome, SaveRequest

    if not 0 < timeout < float("inf"):
        client.complain(f"--timeout {timeout:g} is no time to wait", 2)
    _, record = client.job_folder(job, run_dir)
    for answer in client.talk(record, SaveRequest(timeout_s=timeout)):
        if isinstance(answer, Outcome):
            if as_json:
                print(json.dumps({"ok": answer.ok, "reason": answer.reason, **answer.fields}))
            elif answer.ok:
                said = answer.fields
                print(f"{said['path']}: step {said['step']}, pause {said['pause_s']:.3f} s")
            if not answer.ok:
                client.complain(f"{answer.outcome}: {answer.reason}", 1)
            return
    client.complain(f"job {record.id} ended before it answered", 69)


@app.command()
def inspect(path: CheckpointPath, as_json: AsJson = False) -> None:
    """Show what lies in a checkpoint: tensors, sizes, and the layout it came from."""
    from resharding.checkpoint import describe

    with _opened(path) as checkpoint:
        found = describe.described(checkpoint)
        if as_json:
            print(json.dumps(found))
            return
        from launcher.render import console

        out = console(sys.stdout)
        kinds = ", ".join(f"{kind} {describe.size_words(row['bytes'])}" for kind, row in found["kinds"].items())
        out.print(f"{checkpoint.folder}: step {found['step']}, {describe.size_words(found['bytes'])}", style="bold")
        out.print(f"from {describe.layout_words(found['origin'])}; {found['consumed_samples']} samples; {kinds}")
        out.print(_tree(describe.tree_of(list(checkpoint.index.entries)), checkpoint.folder.name))


def _tree(nodes: dict[str, Any], title: str) -> Tree:
    from rich.tree import Tree

    tree = Tree(title)
    for word, inner in nodes.items():
        if isinstance(inner, dict):
            tree.add(_tree(inner, word))
        else:
            entries = inner
            kinds = ", ".join(f"{entry.kind} {entry.dtype}" for entry in entries)
            tree.add(f"{word.rstrip(chr(0))} {list(entries[0].shape)}  {kinds}")
    return tree


@app.command()
def verify(path: CheckpointPath, as_json: AsJson = False) -> None:
    """Read everything and compare every digest; exit code 1 and the names of the damaged tensors if any is."""
    with _opened(path) as checkpoint:
        bad = list(checkpoint.damaged_headers())
        first = ""
        with _progress("verifying", checkpoint.index.nbytes) as advance:
            for entry in checkpoint.index.entries:
                sentence = checkpoint.damage(entry)
                if sentence is not None:
                    bad.append(sentence)
                    first = first or entry.key
                advance(entry.nbytes)
        if as_json:
            print(json.dumps({"path": str(checkpoint.folder), "ok": not bad, "first": first, "damaged": bad}))
        elif not bad:
            print(f"{checkpoint.folder}: all {len(checkpoint.index.entries)} tensors are as they were written")
        for sentence in bad:
            sys.stderr.write(f"liverun: {sentence}\n")
        if bad:
            raise SystemExit(1)


@app.command()
def diff(a: CheckpointPath, b: CheckpointPath, as_json: AsJson = False) -> None:
    """Show which tensors of two checkpoints differ, and by how much; exit code 1 if any does."""
    from resharding.checkpoint.compare import differences

    with _opened(a) as one, _opened(b) as other:
        found = []
        for difference in differences(one, other):
            found.append(difference)
            if not as_json:
                print(f"{difference.key}: {difference.what}: {difference.detail}", flush=True)
        if as_json:
            steps = {"a": one.index.meta.step, "b": other.index.meta.step}
            print(json.dumps({"same": not found, "steps": steps, "tensors": [each.as_dict() for each in found]}))
        elif not found:
            print(f"all {len(one.index.entries)} tensors are the same")
        if found:
            raise SystemExit(1)


ConfigOption = Annotated[
    Path | None,
    typer.Option("--model-config", help="JSON of the model's arguments that the checkpoint does not tell"),
]
StepOption = Annotated[int | None, typer.Option("--step", help="steps that were completed, if it does not say")]
SamplesOption = Annotated[
    int | None, typer.Option("--consumed-samples", help="samples that were used, if it does not say")
]
VocabOption = Annotated[
    int | None, typer.Option("--vocab-size", help="rows of the vocabulary that are no padding; others are left out")
]


@app.command()
def convert(  # noqa: PLR0917  (typer reads options from the signature)
    source: Annotated[Path, typer.Argument(help="a checkpoint of Megatron, DeepSpeed or liverun")],
    target: Annotated[Path, typer.Argument(help="folder of liverun checkpoints; of torch_dist: a new folder")],
    to: Annotated[str, typer.Option("--to", help="liverun, or torch_dist for Megatron to load")] = "",
    step: StepOption = None,
    consumed_samples: SamplesOption = None,
    vocab_size: VocabOption = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="leave the optimizer out")] = False,
    model_config: ConfigOption = None,
    patterns: Annotated[
        Path | None, typer.Option("--patterns", help="JSON: how tensor parallel slices go together (DeepSpeed)")
    ] = None,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="torch_dist for a job with ep above 1")
    ] = False,
) -> None:
    """Turn a checkpoint of Megatron or DeepSpeed into one of ours, or one of ours into Megatron's torch_dist."""
    from launcher.client import complain

    kind = _kind_of(source)
    wanted = to or ("torch_dist" if kind == "liverun" else "liverun")
    if wanted not in ("liverun", "torch_dist") or (kind == "liverun") == (wanted == "liverun"):
        complain(f"--to {wanted}: a checkpoint of {kind} is not converted to that", 2)
    from resharding.checkpoint.format import BadCheckpoint

    model = _model_of(model_config)
    if kind == "liverun":
        from resharding.checkpoint.megatron_write import write_megatron

        with _opened(source) as checkpoint, _progress("converting", checkpoint.index.nbytes) as advance:
            print(write_megatron(checkpoint, target, expert_parallel=expert_parallel, progress=advance))
        return
    from resharding.checkpoint.convert import convert as run
    from resharding.checkpoint.sources import open_source

    try:
        found = open_source(
            kind, source, model=model, step=step, consumed_samples=consumed_samples, vocab_size=vocab_size,
            weights_only=weights_only, patterns=_json_of(patterns), buffers_of=buffers_of,
        )  # fmt: skip
        with _progress("converting", found.nbytes) as advance:
            done = run(found, target, progress=advance)
    except BadCheckpoint as error:
        complain(str(error), 1)
    except OSError as error:
        complain(f"{error.filename or target}: {error.strerror or error}", 1)
    resumed = f"; {done.num_resumed} tensors were done before" if done.num_resumed else ""
    print(f"{done.path}: step {found.meta.step}{resumed}")


@app.command()
def export(  # noqa: PLR0917  (typer reads options from the signature)
    path: CheckpointPath,
    target: Annotated[Path, typer.Argument(help="a new folder")],
    vocab_size: VocabOption = None,
    rope_theta: Annotated[float | None, typer.Option("--rope-theta", help="base of rotary positions")] = None,
    norm_eps: Annotated[float | None, typer.Option("--norm-eps", help="epsilon of RMSNorm")] = None,
    max_positions: Annotated[int | None, typer.Option("--max-positions", help="longest sequence")] = None,
    model_config: ConfigOption = None,
) -> None:
    """Write the weights of a Llama-like model as a folder that Hugging Face's transformers loads."""
    from resharding.checkpoint.config import said_of
    from resharding.checkpoint.export import export_llama

    said = {"rotary_base": rope_theta, "layernorm_epsilon": norm_eps, "max_sequence_length": max_positions}
    model = said_of(_model_of(model_config)) | {name: value for name, value in said.items() if value is not None}
    with _opened(path) as checkpoint:
        total = sum(entry.nbytes for entry in checkpoint.index.entries if entry.kind == "weight")
        with _progress("exporting", total) as advance:
            print(export_llama(checkpoint, target, model=model, vocab_size=vocab_size, progress=advance))


def buffers_of(arguments: Mapping[str, Any]) -> list[Buffer]:
    """Return where a model has its parameters in flat buffers. Raises ``ValueError`` for what makes no model."""
    from launcher.planning import buffer_rows
    from resharding.checkpoint.buckets import read_buffer

    return [read_buffer(row) for row in buffer_rows(arguments)]


def _kind_of(path: Path) -> str:
    """Tell what wrote a checkpoint; ends the command where nothing known did."""
    from launcher.client import complain
    from resharding.checkpoint.folder import candidates, kind_of

    if (path / "index.json").is_file() or candidates(path):
        return "liverun"
    kind = kind_of(path)
    if kind is None:
        complain(f"{path} is no checkpoint of liverun, Megatron (torch_dist) or DeepSpeed; point at its folder", 2)
    return kind


def _model_of(path: Path | None) -> dict[str, Any]:
    """Read --model-config: JSON, or a checkpoint of ours that says which model it is of."""
    if path is None or not path.is_dir():
        return _json_of(path)
    from resharding.checkpoint.config import arguments_of

    with _opened(path) as checkpoint:
        return arguments_of(checkpoint.index)


def _json_of(path: Path | None) -> dict[str, Any]:
    from launcher.client import complain

    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        complain(f"{path} is no JSON that can be read: {error}", 2)
    if not isinstance(found, dict):
        complain(f"{path} holds no JSON object", 2)
    return found


@contextmanager
def _progress(word: str, nbytes: int) -> Iterator[Any]:
    """Show a bar on stderr if that is a terminal; yields a function to call with bytes done."""
    if not sys.stderr.isatty():
        yield lambda _count: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn(word), progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )  # fmt: skip
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(word, total=nbytes)
        yield lambda count: bar.advance(task, count)
