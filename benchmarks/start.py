"""How long until a job's script runs, and what does a worker cost in memory: torchrun, and liverun?

    python benchmarks/start.py [--json] [--runs 5] [--workers 4]

Both start the same script, which imports what examples/gpt/train.py imports (torch, megatron.core, liverun), with the
same number of workers, in turns. Time runs from the command to the first line of ``main`` in the last worker, by the
clock that all processes of a machine share. Memory is each worker's unique set size at that line: what would be free
if it alone ended. Pages that forked workers share with the template are nobody's, so the template is counted beside.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from common import LIVERUN, PATIENCE_S, ROOT, TORCHRUN, conditions, environment

SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT / "examples" / "gpt")!r})
import train

def main():
    began = time.monotonic()
    path = os.path.join(sys.argv[1], os.environ["RANK"])
    with open(path + ".new", "w") as file:
        file.write(f"{{began}} {{os.getpid()}}")
    os.rename(path + ".new", path)
    while not os.path.exists(os.path.join(sys.argv[1], "end")):
        time.sleep(0.05)

main()
"""
COMMANDS = {"torchrun": TORCHRUN, "liverun": [*LIVERUN, "run", "--standalone"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, in turns; the median counts")
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    result = {"conditions": conditions(), "workers": args.workers, "runs": args.runs}
    with tempfile.TemporaryDirectory(prefix="liverun-bench-") as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        found = {name: [] for name in COMMANDS}
        start(Path(folder), "liverun", script, args.workers)  # once, so that no file is read from disk any more
        for run in range(args.runs):
            for name in COMMANDS:
                found[name].append(start(Path(folder), name, script, args.workers))
                print(f"{name}, run {run + 1}: {found[name][-1]}", file=sys.stderr)
    result |= {name: summary(runs) for name, runs in found.items()}
    result["ratio"] = result["torchrun"]["start_s"] / result["liverun"]["start_s"]
    result["ratio_of_pairs"] = [
        one["start_s"] / two["start_s"] for one, two in zip(found["torchrun"], found["liverun"], strict=True)
    ]
    print(json.dumps(result, indent=2)) if args.json else show(result)


def start(folder: Path, name: str, script: Path, num_workers: int) -> dict:
    """Start one job, wait for all of its workers, look at their memory, end it."""
    marks = Path(tempfile.mkdtemp(dir=folder))
    log = (marks / "log").open("wb")
    started = time.monotonic()
    process = subprocess.Popen(
        [*COMMANDS[name], "--nproc-per-node", str(num_workers), str(script), str(marks)],
        env=environment(folder), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        workers = wait_for(process, marks, num_workers)
        uss = [psutil.Process(pid).memory_full_info().uss for _, pid in workers]
        pids = {pid for _, pid in workers}
        rest = [p for p in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True))
                if p.pid not in pids]  # fmt: skip
        return {
            "start_s": max(began for began, _ in workers) - started,
            "worker_uss_bytes": statistics.median(uss),
            "rest_uss_bytes": sum(p.memory_full_info().uss for p in rest),
            "job_pss_bytes": sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
            + sum(p.memory_full_info().pss for p in rest),
        }
    finally:
        (marks / "end").touch()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def wait_for(process: subprocess.Popen, marks: Path, num_workers: int) -> list[tuple[float, int]]:
    deadline_s = time.monotonic() + PATIENCE_S
    paths = [marks / str(rank) for rank in range(num_workers)]
    while not all(path.exists() for path in paths):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the workers did not come: {(marks / 'log').read_text()[-2000:]}")
        time.sleep(0.02)
    lines = [path.read_text().split() for path in paths]
    return [(float(began), int(pid)) for began, pid in lines]


def summary(runs: list[dict]) -> dict:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]} | {
        "all_start_s": [run["start_s"] for run in runs]
    }


def show(result: dict) -> None:
    print(", ".join(f"{name} {value}" for name, value in result["conditions"].items()))
    print(f"{result['workers']} workers, medians of {result['runs']} runs\n")
    print(f"{'':10}{'start':>10}{'worker USS':>14}{'rest USS':>14}{'job PSS':>14}")
    for name in COMMANDS:
        row = result[name]
        sizes = "".join(f"{row[f'{key}_bytes'] / 2**20:>10.0f} MiB" for key in ("worker_uss", "rest_uss", "job_pss"))
        print(f"{name:10}{row['start_s']:>8.2f} s{sizes}")
    pairs = ", ".join(f"{ratio:.2f}" for ratio in result["ratio_of_pairs"])
    print(f"\nliverun's script runs after 1/{result['ratio']:.2f} of torchrun's time (pairs: {pairs})")


if __name__ == "__main__":
    main()
