"""What do checkpoints cost: liverun's, Megatron's torch_dist, and torch's DCP, side by side?

    python benchmarks/checkpoint.py [--json] [--runs 3] [--systems liverun deepspeed …] [--deepspeed]

Two ranks hold a GPT and its optimizer, tp=2, and save; two others load it as tp=1, dp=2. Each system has processes of
its own for each of the two. All sync their files; all read from a warm page cache. DCP knows no Megatron: it is given
tensors of the same names, shapes and bytes, cut by rows to save and by columns to load.

With ``--deepspeed``, and where it is installed: DeepSpeed (ZeRO stage 1) saves parameters of the same shapes from one
rank, turns that into a universal checkpoint, and two ranks load it, so that each holds all weights and half of the
optimizer, as with the others.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from common import LARGE, ROOT, TORCHRUN, conditions, environment, num_parameters

SYSTEMS = ("liverun", "liverun_last", "torch_dist", "dcp", "dcp_async")
DEEPSPEED = "deepspeed"
WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=3, help="runs of each system, in turns; the median counts")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="which; all by default")
    parser.add_argument("--deepspeed", action="store_true", help="DeepSpeed's convert-then-load too")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*args.worker)
        return
    systems = list(args.systems)
    if args.deepspeed and importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed, so it is left out; pip install -e '.[deepspeed]'", file=sys.stderr)
    elif args.deepspeed:
        systems.append(DEEPSPEED)
    runs: dict[str, list[dict]] = {system: [] for system in systems}
    for _ in range(args.runs):
        for system in systems:
            with tempfile.TemporaryDirectory(prefix="liverun-bench-") as folder:
                runs[system].append(measure(system, Path(folder)))
    result = {"conditions": conditions(), "parameters": num_parameters(LARGE), "runs": args.runs, "systems": {}}
    for system, rows in runs.items():
        result["systems"][system] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(json.dumps(result) if args.json else shown(result))


def measure(system: str, folder: Path) -> dict:
    """Save with one world and load with another; times in seconds, the slowest rank counts."""
    saved = ask(system, "save", folder)
    target = folder / "saved"
    found = {"bytes": sum(path.stat().st_size for path in target.rglob("*") if path.is_file())}
    found["convert_s"] = to_universal(folder) if system == DEEPSPEED else 0.0
    loaded = ask(system, "load", folder)
    for name in ("pause_s", "save_s", "save_peak_bytes"):
        found[name] = max(rank[name] for rank in saved)
    for name in ("load_s", "load_peak_bytes"):
        found[name] = max(rank[name] for rank in loaded)
    return found


def ask(system: str, action: str, folder: Path) -> list[dict]:
    workers = 1 if (system, action) == (DEEPSPEED, "save") else WORKERS
    command = [*TORCHRUN, "--nproc-per-node", str(workers), __file__, "--worker", system, action, str(folder)]
    done = subprocess.run(
        command, env=environment(folder) | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{system} {action}: {done.stderr[-3000:]}")
    return [json.loads((folder / f"{action}-{rank}.json").read_text()) for rank in range(workers)]


def work(system: str, action: str, folder_name: str) -> None:
    """Be one rank of one world."""
    if system == DEEPSPEED:
        work_deepspeed(action, Path(folder_name))
        return
    sys.path.insert(0, str(ROOT / "examples" / "gpt"))
    import torch
    from model import build_model, build_optimizer

    import liverun
    from liverun.memory import ResidentPeak
    from resharding import megatron

    folder = Path(folder_name)
    flags = {name[2:].replace("-", "_"): value for name, value in LARGE.items()}
    args = Namespace(
        **flags, hidden_dropout=0.0, attention_dropout=0.0, bf16=False, transformer_impl="local",
        make_vocab_size_divisible_by=128, untie_embeddings_and_output_weights=False, no_distributed_optimizer=False,
        lr=1e-3, min_lr=1e-4, weight_decay=0.01, clip_grad=1.0, lr_decay_samples=None, lr_warmup_samples=8,
        train_steps=10, dist_ckpt_optim_fully_reshardable=True, num_experts=None, moe_router_topk=2,
    )  # fmt: skip

    def build(world: liverun.World) -> liverun.Training:
        world.seed(1)
        model = build_model(args, world.layout, world.device)
        optimizer, scheduler = build_optimizer(args, model)
        return liverun.Training(model=model, optimizer=optimizer, scheduler=scheduler)

    job = liverun.join(build, layout=liverun.Layout(tp=2 if action == "save" else 1))
    megatron.materialize_optimizer_state(job.training.optimizer)
    with torch.no_grad():
        for leaf in job.training.optimizer.chained_optimizers:
            for state in leaf.optimizer.state.values():
                state["exp_avg"].normal_()
                state["exp_avg_sq"].normal_()
                state["step"].fill_(3)
    prepare = {"liverun": of_liverun, "liverun_last": of_liverun, "torch_dist": of_torch_dist}.get(system, of_dcp)
    run = prepare(job, args, folder / "saved", action, asynchronous=system in ("liverun", "dcp_async"))
    torch.distributed.barrier()
    with ResidentPeak() as peak:
        began = time.perf_counter()
        wait = run()
        pause_s = time.perf_counter() - began
        if wait is not None:
            wait()
        torch.distributed.barrier()
        seconds = time.perf_counter() - began
    found = {f"{action}_s": seconds, f"{action}_peak_bytes": peak.extra_bytes}
    if action == "save":
        found["pause_s"] = pause_s if wait is not None else seconds
    (folder / f"{action}-{os.environ['RANK']}.json").write_text(json.dumps(found))


def of_liverun(job, _args, folder: Path, action: str, *, asynchronous: bool):
    """As ``--checkpoint-dir`` does once the ranks know what each holds; beside the training, or at its end."""
    from liverun.checkpoint import Saver, Settings
    from liverun.switch import Position

    saver = Saver(Settings(folder=folder))
    saver.enter(job._standing, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    saver.known()
    if action == "load":
        return lambda: saver.load(job.world.device) and None

    def save():
        saver.save(Position(step=3, consumed_samples=12), is_last=not asynchronous)
        return saver.wait if asynchronous else None

    return save


def of_torch_dist(job, args, folder: Path, action: str, **_):
    """As the example does: ``fully_reshardable``, written by all ranks."""
    import checkpoint

    if action == "load":
        return lambda: checkpoint.load(args, str(folder), job.training) and None
    return lambda: checkpoint.save(args, str(folder), 3, job.training)


def of_dcp(job, _args, folder: Path, action: str, *, asynchronous: bool):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORKERS,))
    said: list = [None] * WORKERS
    torch.distributed.all_gather_object(said, {box.key: box.global_shape for box in job._standing.holding.boxes})
    state = {}
    for key, shape in sorted({key: shape for each in said for key, shape in each.items()}.items()):
        axis = 0 if action == "save" else len(shape) - 1
        placement = Shard(axis) if shape[axis] % WORKERS == 0 else Replicate()
        if len(shape) == 1 and action == "load":
            placement = Replicate()
        state[key] = distribute_tensor(torch.randn(shape), mesh, [placement])
        assert isinstance(state[key], DTensor)
    if action == "load":
        return lambda: dcp.load(state, checkpoint_id=str(folder))
    if not asynchronous:
        return lambda: dcp.save(state, checkpoint_id=str(folder)) and None

    def save():
        return dcp.async_save(state, checkpoint_id=str(folder)).result

    return save


def work_deepspeed(action: str, folder: Path) -> None:
    """Be one rank of DeepSpeed, which knows no Megatron model: its parameters have the same shapes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch

    from liverun.memory import ResidentPeak

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled here and now
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = torch.nn.Module()
    net.all = torch.nn.ParameterList(torch.randn(shape) for shape in shapes_of(LARGE))
    net.forward = lambda: sum(param.square().sum() for param in net.all)
    size = torch.distributed.get_world_size()
    config = {
        "train_batch_size": size, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": action == "load"},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=config)
    if action == "save":
        engine.backward(engine())
        engine.step()
    torch.distributed.barrier()
    with ResidentPeak() as peak:
        began = time.perf_counter()
        if action == "save":
            engine.save_checkpoint(str(folder / "saved"))
            sync(folder / "saved")
        else:
            engine.load_checkpoint(str(folder / "saved"), tag="universal")
        torch.distributed.barrier()
        seconds = time.perf_counter() - began
    found = {f"{action}_s": seconds, f"{action}_peak_bytes": peak.extra_bytes, "pause_s": seconds}
    (folder / f"{action}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def shapes_of(flags: dict) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters that ``num_parameters`` counts."""
    hidden, ffn, groups = flags["--hidden-size"], flags["--ffn-hidden-size"], flags["--num-query-groups"]
    qkv = hidden + 2 * groups * hidden // flags["--num-attention-heads"]
    layer = [(hidden,), (qkv, hidden), (hidden, hidden), (hidden,), (2 * ffn, hidden), (hidden, ffn)]
    return [(384, hidden), *layer * flags["--num-layers"], (hidden,)]


def sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def to_universal(folder: Path) -> float:
    """Run DeepSpeed's converter with its own number of processes; the time without starting and importing it."""
    step = folder / "saved" / (folder / "saved" / "latest").read_text().strip()
    code = (
        "import sys, time; from deepspeed.checkpoint.ds_to_universal import *\n"
        "began = time.perf_counter(); main(parse_arguments()); print('took', time.perf_counter() - began)"
    )
    words = ["--input_folder", step, "--output_folder", folder / "saved" / "universal", "--inject_missing_state"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], env=environment(folder) | {"DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return float(done.stdout.rpartition("took ")[2])


def shown(result: dict) -> str:
    lines = [str(result["conditions"]), f"{result['parameters'] / 1e6:.1f} M parameters, {result['runs']} runs"]
    heads = f"{'convert s':>11}{'load s':>9}{'MB':>8}{'save peak MB':>14}{'load peak MB':>14}"
    lines.append(f"{'':12}{'pause s':>9}{'save s':>9}{heads}")
    for system, row in result["systems"].items():
        lines.append(
            f"{system:12}{row['pause_s']:9.3f}{row['save_s']:9.3f}{row['convert_s']:11.3f}"
            f"{row['load_s']:9.3f}{row['bytes'] / 1e6:8.1f}"
            f"{row['save_peak_bytes'] / 1e6:14.1f}{row['load_peak_bytes'] / 1e6:14.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
