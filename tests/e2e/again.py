"""Trains like examples/gpt/train.py, in a main module that patches nothing, and swallows whatever a step raises.

    again.py OUT [train.py's arguments]

Into ``OUT/resources.jsonl``: what the process holds, at every step. Who prepares a change of world touches
``OUT/builds-GENERATION-RANK``, and what will be rank 1 never comes to its end.
"""

import os
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples" / "gpt"))

import train  # noqa: E402
from held import resources  # noqa: E402
from model import build_model, build_optimizer  # noqa: E402

import liverun  # noqa: E402

OUT = Path(sys.argv.pop(1))


def main():
    args = train.parse_arguments()
    dataset, _ = train.open_datasets(
        args.data_path, args.seq_length, args.seed, args.train_steps * args.global_batch_size, args.global_batch_size
    )

    joined = []

    def build(world):
        if joined:
            (OUT / f"builds-{world.generation}-{world.rank}").touch()
            if world.rank == 1:
                threading.Event().wait()
        world.seed(args.seed)
        model = build_model(args, world.layout, world.device)
        optimizer, scheduler = build_optimizer(args, model)
        return liverun.Training(model=model, optimizer=optimizer, scheduler=scheduler)

    job = liverun.join(build, global_batch_size=args.global_batch_size, micro_batch_size=args.micro_batch_size)
    joined.append(job)
    while job.unfinished(args.train_steps):
        with job.step() as step:
            try:
                train.train_step(args, job.training, dataset, step)
            except Exception as error:  # noqa: BLE001
                print(f"step {step.index} swallows {type(error).__name__}", file=sys.stderr, flush=True)
            train.append_line(OUT / "resources.jsonl", look(step.world.generation))


def look(generation):
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "generation": generation,
        "pid": os.getpid(),
        **resources(),
        "resident": next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")),
    }


main()
