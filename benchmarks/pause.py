"""How long does training stand still when its world changes: torchrun with a checkpoint, and liverun live?

    python benchmarks/pause.py [--json] [--runs 3] [--only "tp=2 -> tp=1"]

The same script, model and batch. torchrun saves with Megatron's torch_dist, ends, starts again under the new
layout, loads and trains. Both pauses run from the end of the last step before to the start and the end of the
first step after. torchrun is told at once to save and end: no time is counted for somebody noticing.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import (
    LARGE,
    LIVERUN,
    TORCHRUN,
    TRAIN,
    Run,
    as_arguments,
    conditions,
    environment,
    layout_arguments,
    num_parameters,
    prepare_data,
)  # fmt: skip

# name: workers and layout before, workers and layout after
CASES = {
    "tp=2 -> tp=1": ((2, "tp=2"), (1, "tp=1")),
    "tp=1 -> tp=2": ((1, "tp=1"), (2, "tp=2")),
    "dp=2 -> dp=1": ((2, "tp=1"), (1, "tp=1")),
    "pp=2 -> pp=1": ((2, "pp=2"), (1, "tp=1")),
}
STEPS_BEFORE = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each case, alternately; the median counts"
    )
    parser.add_argument("--only", choices=CASES, help="just one case")
    args = parser.parse_args()
    result = {"conditions": conditions(), "parameters": num_parameters(LARGE), "runs": args.runs, "cases": {}}
    with tempfile.TemporaryDirectory(prefix="liverun-bench-") as folder:
        data = prepare_data(Path(folder))
        train = [TRAIN, *as_arguments(LARGE), "--data-path", data]
        for name, (before, after) in CASES.items():
            if args.only in (None, name):
                pairs = []
                for run in range(args.runs):
                    pairs.append(
                        (
                            restart(Path(folder), train, before, after),
                            live(Path(folder), train, before, after),
                        )
                    )
                    print(f"{name}, run {run + 1}: {pairs[-1]}", file=sys.stderr)
                result["cases"][name] = summary(pairs)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


def restart(folder: Path, train: list, before: tuple, after: tuple) -> dict:
    """Measure torchrun: save, end, start again under the new layout, load."""
    saved = folder / "checkpoint"
    shutil.rmtree(saved, ignore_errors=True)
    for log in folder.glob("torchrun-*"):
        log.unlink()
    options = ["--dist-ckpt-optim-fully-reshardable", "--train-steps", "40"]
    command = [*TORCHRUN, "--nproc-per-node", str(before[0]), *train, *options, *layout_arguments(before[1])]
    stop = ["--save", saved, "--save-interval", str(STEPS_BEFORE), "--exit-after-save"]
    with Run([*command, *stop], folder, "torchrun-before") as run:
        last = run.wait()[-1]
    command = [*TORCHRUN, "--nproc-per-node", str(after[0]), *train, *options, *layout_arguments(after[1])]
    with Run([*command, "--load", saved], folder, "torchrun-after") as run:
        first = run.wait_for(1)[0]
    assert first["step"] == last["step"] + 1, (first, last)
    return pause(last, first)


def live(folder: Path, train: list, before: tuple, after: tuple, options: tuple | list = ()) -> dict:
    """Measure liverun, given further options: the same change, without stopping."""
    for log in folder.glob("liverun*"):
        log.unlink()
    standbys = max(before[0], after[0]) - before[0]
    command = [*LIVERUN, "run", "--nproc-per-node", str(before[0]), "--standbys", str(standbys), *options]
    with Run(
        [*command, *train, "--train-steps", "1000", *layout_arguments(before[1])], folder, "liverun"
    ) as run:
        run.wait_for(STEPS_BEFORE)
        resize = [*LIVERUN, "resize", "--workers", str(after[0]), "--layout", after[1], "--json"]
        subprocess.run(resize, env=environment(folder), check=True, capture_output=True)
        run.wait_for(len(run.steps()) + 2)
        steps = run.steps()
        status = [*LIVERUN, "status", "--json"]
        said = json.loads(
            subprocess.run(status, env=environment(folder), check=True, capture_output=True).stdout
        )
        subprocess.run([*LIVERUN, "stop"], env=environment(folder), check=True, capture_output=True)
        run.wait()
    index = next(index for index, step in enumerate(steps) if step["world_size"] == after[0] and index
                 and step["generation"] != steps[index - 1]["generation"])  # fmt: skip
    resize = said["last_resize"]
    keep = {key: resize[key] for key in ("phases", "bytes_moved", "bytes_local", "peak_extra_bytes", "kept")}
    phases, verify_s = resize["phases"], resize["verify"]["seconds"]
    stream_s = phases["stream_s"]
    keep["parts"] = {
        "cut": phases["arm_s"] + phases["transfer_s"] - stream_s,
        "transfer": stream_s - verify_s,
        "check": verify_s,
        "switch": resize["pause_s"] - phases["arm_s"] - phases["transfer_s"],
    }
    slowest = max(step["step_s"] for step in steps[index - 4 : index])
    usual = statistics.median(step["step_s"] for step in steps[1:index])
    return pause(steps[index - 1], steps[index]) | keep | {"slowdown_while_preparing": slowest / usual}


def pause(last: dict, first: dict) -> dict:
    ended_s = last["began_s"] + last["step_s"]
    return {
        "to_start_s": first["began_s"] - ended_s,
        "to_end_s": first["began_s"] + first["step_s"] - ended_s,
    }


def summary(pairs: list) -> dict:
    torchrun, ours = ([pair[side] for pair in pairs] for side in (0, 1))
    case = {
        name: {key: statistics.median(run[key] for run in runs) for key in ("to_start_s", "to_end_s")}
        | {"all_to_start_s": [run["to_start_s"] for run in runs]}
        for name, runs in (("torchrun", torchrun), ("liverun", ours))
    }
    case["liverun"]["phases"] = {
        phase: statistics.median(run["phases"][phase] for run in ours) for phase in ours[0]["phases"]
    }
    case["liverun"] |= {key: ours[0][key] for key in ("bytes_moved", "bytes_local")}
    case["liverun"]["slowdown_while_preparing"] = statistics.median(
        run["slowdown_while_preparing"] for run in ours
    )
    case["ratio"] = case["torchrun"]["to_start_s"] / case["liverun"]["to_start_s"]
    return case


def show(result: dict) -> None:
    print(", ".join(f"{name} {value}" for name, value in result["conditions"].items()))
    print(f"{result['parameters'] / 1e6:.1f} M parameters, fp32, medians of {result['runs']} runs, seconds")
    print("pause: end of the last step before to start (end) of the first step after\n")
    print(f"{'':15}{'torchrun':>18}{'liverun':>18}{'ratio':>8}   phases of liverun's resize")
    for name, case in result["cases"].items():
        both = [
            f"{case[who]['to_start_s']:.2f} ({case[who]['to_end_s']:.2f})" for who in ("torchrun", "liverun")
        ]
        phases = ", ".join(f"{key[:-2]} {value:.3f}" for key, value in case["liverun"]["phases"].items())
        print(f"{name:15}{both[0]:>18}{both[1]:>18}{case['ratio']:>7.0f}x   {phases}")


if __name__ == "__main__":
    main()
