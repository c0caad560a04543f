"""What does liverun cost while nothing changes?

    python benchmarks/steady.py [--json] [--pairs 4] [--windows 30] [--window-s 1.5]

The same script on two workers under torchrun and under liverun with two parked standbys. Both jobs of a pair are
started, and then take turns on the machine: for a second and a half all processes of one run while all of the other
are stopped (SIGSTOP), launchers included. So a slow spell of the machine hits both, and a window is compared with the
one beside it. Printed are the ratio of the mean step time (the middle one of all neighbouring windows of all pairs)
and its 95 % interval, by drawing windows again. And, measured alone: an empty ``with job.step()``, in microseconds.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from common import LIVERUN, TORCHRUN, TRAIN, Run, conditions, environment, prepare_data

NUM_DRAWS = 2000
WARM_STEPS = 10
ENDLESS = "1000000"

EMPTY_LOOP = """
import statistics, time
import liverun

job = liverun.join(lambda world: liverun.Training(model=[]))
times = []
while job.unfinished(20000):
    began = time.perf_counter_ns()
    with job.step() as step:
        pass
    times.append((time.perf_counter_ns() - began) / 1000)
print("overhead", statistics.median(times[100:]), statistics.quantiles(times[100:], n=100)[98])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pairs", type=int, default=4, help="how often both jobs are started anew")
    parser.add_argument("--windows", type=int, default=30, help="turns that each job of a pair gets")
    parser.add_argument("--window-s", type=float, default=1.5, help="length of a turn in seconds")
    args = parser.parse_args()
    ratios, step_s = [], {"torchrun": [], "liverun": []}
    with tempfile.TemporaryDirectory(prefix="liverun-bench-") as name:
        folder = Path(name)
        train = [TRAIN, "--data-path", prepare_data(folder), "--train-steps", ENDLESS]
        torchrun = [*TORCHRUN, "--nproc-per-node", "2", *train]
        ours = [*LIVERUN, "run", "--nproc-per-node", "2", "--standbys", "2", *train]
        for pair in range(args.pairs):
            with Run(torchrun, folder, f"torchrun-{pair}") as theirs, Run(ours, folder, f"liverun-{pair}") as mine:
                means = take_turns({"torchrun": theirs, "liverun": mine}, args.windows, args.window_s)
            for who, values in means.items():
                step_s[who] += values
            ratios += [
                ours_s / theirs_s for theirs_s, ours_s in zip(means["torchrun"], means["liverun"], strict=True)
            ]
            print(f"pair {pair + 1}: {statistics.median(ratios):.4f} so far", file=sys.stderr)
        median_us, p99_us = empty_step(folder)
    low, high = interval(ratios)
    result = {
        "conditions": conditions(), "windows": len(ratios), "ratio": statistics.median(ratios),
        "ratio_95": [low, high], "step_s": {who: statistics.median(values) for who, values in step_s.items()},
        "empty_step_us": {"median": median_us, "p99": p99_us},
    }  # fmt: skip
    if args.json:
        print(json.dumps(result, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in result["conditions"].items()))
    print(f"step time under liverun / under torchrun: {result['ratio']:.4f}", end=" ")
    print(f"(95 % interval {low:.4f} to {high:.4f}; {len(ratios)} turns each)")
    print("median step:", ", ".join(f"{who} {seconds:.4f} s" for who, seconds in result["step_s"].items()))
    print(f"an empty job.step(): {median_us:.1f} us (99th percentile {p99_us:.1f} us)")


def take_turns(runs: dict[str, Run], num_windows: int, window_s: float) -> dict[str, list[float]]:
    """Let the jobs run one at a time; each one's mean step time in seconds, one for every turn it had."""
    for run in runs.values():
        run.wait_for(WARM_STEPS)
    turns: dict[str, list[tuple[float, float]]] = {who: [] for who in runs}
    for run in runs.values():
        send(run, signal.SIGSTOP)
    try:
        for number in range(num_windows):
            for who in sorted(runs, reverse=bool(number % 2)):
                send(runs[who], signal.SIGCONT)
                began = time.perf_counter()
                time.sleep(window_s)
                turns[who].append((began, time.perf_counter()))
                send(runs[who], signal.SIGSTOP)
    finally:
        for run in runs.values():
            send(run, signal.SIGCONT)
    means = {}
    for who, run in runs.items():
        starts = [step["began_s"] for step in run.steps()]
        steps = list(itertools.pairwise(starts))
        means[who] = [
            statistics.mean(after - before for before, after in steps if before > began and after < ended)
            for began, ended in turns[who]
        ]
    return means


def send(run: Run, number: signal.Signals) -> None:
    """Signal a launcher and everything it has started."""
    launcher = psutil.Process(run.process.pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            os.kill(process.pid, number)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the middle 95 % of the medians of redrawn samples."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(NUM_DRAWS))
    return medians[int(0.025 * NUM_DRAWS)], medians[int(0.975 * NUM_DRAWS)]


def empty_step(folder: Path) -> tuple[float, float]:
    script = folder / "empty.py"
    script.write_text(EMPTY_LOOP)
    began = time.perf_counter()
    done = subprocess.run(
        [*LIVERUN, "run", "--standbys", "1", script],
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if "overhead" in line)
    assert time.perf_counter() > began
    _, median_us, p99_us = line[line.index("overhead") :].split()
    return float(median_us), float(p99_us)


if __name__ == "__main__":
    main()
