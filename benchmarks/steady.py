"""What does liverun cost while nothing changes?

    python benchmarks/steady.py [--json] [--pairs 4] [--steps 60]

The same script on two workers under torchrun and under liverun with two parked standbys, in turns, so that a
slow spell of the machine hits both; each pair gives one ratio of median step times. And, measured alone: an
empty ``with job.step()``, in microseconds.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import LIVERUN, TORCHRUN, TRAIN, Run, conditions, environment, prepare_data

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
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="liverun-bench-") as name:
        folder = Path(name)
        train = [TRAIN, "--data-path", prepare_data(folder), "--train-steps", str(args.steps)]
        torchrun = [*TORCHRUN, "--nproc-per-node", "2", *train]
        ours = [*LIVERUN, "run", "--nproc-per-node", "2", "--standbys", "2", *train]
        pairs = []
        for pair in range(args.pairs):
            runs = [("torchrun", torchrun), ("liverun", ours)]
            seconds = {
                who: step_time(command, folder, f"{who}-{pair}")
                for who, command in (runs if pair % 2 else runs[::-1])
            }
            pairs.append(seconds)
            print(f"pair {pair + 1}: {seconds}", file=sys.stderr)
        median_us, p99_us = empty_step(folder)
    ratios = [pair["liverun"] / pair["torchrun"] for pair in pairs]
    result = {
        "conditions": conditions(), "pairs": pairs, "ratios": ratios, "ratio": statistics.median(ratios),
        "empty_step_us": {"median": median_us, "p99": p99_us},
    }  # fmt: skip
    if args.json:
        print(json.dumps(result, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in result["conditions"].items()))
    print(f"step time under liverun / under torchrun: {result['ratio']:.3f}", end=" ")
    print(f"(median of {len(ratios)} pairs; {min(ratios):.3f} to {max(ratios):.3f})")
    print(f"an empty job.step(): {median_us:.1f} us (99th percentile {p99_us:.1f} us)")


def step_time(command: list, folder: Path, name: str) -> float:
    """Return the median time from one step's start to the next's, after the first ten."""
    with Run(command, folder, name) as run:
        steps = run.wait()
    began = [step["began_s"] for step in steps[10:]]
    return statistics.median(after - before for before, after in itertools.pairwise(began))


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
