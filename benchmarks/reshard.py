"""What a change of world costs, part by part: against the bare wire, against torchrun, against Megatron's resharding.

    python benchmarks/reshard.py [--json] [--runs 1] [--parameters 25 100] [--only wire|live]

* The wire: two processes over gloo, 256 MiB of fp32; bare sends and receives as large as the stream's messages and as
  large as 64 MiB, and the stream with digests of everything, of a sample and of nothing, in turns; and the stream of
  as many bytes that lie in columns, and are packed and unpacked. Processor time of both ranks beside it.
* Weights of a bf16 GPT from tp=2 to pp=2: ``megatron.core.resharding`` over gloo, and the stream, in turns.
* Live: ``examples/gpt/train.py`` in bf16 with fp32 main parameters and Adam, from tp=2 on two workers to one, the
  pause in parts, with everything in it and with the optimizer's state deferred; and the same change with torchrun
  and a ``torch_dist`` checkpoint, as in ``pause.py``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import TRAIN, as_arguments, conditions, environment, num_parameters, prepare_data
from pause import live, restart

SIZES = {
    25: {
        "--num-layers": 8, "--hidden-size": 512, "--num-attention-heads": 8, "--num-query-groups": 4,
        "--ffn-hidden-size": 1536,
    },
    100: {
        "--num-layers": 12, "--hidden-size": 768, "--num-attention-heads": 12, "--num-query-groups": 12,
        "--ffn-hidden-size": 2560,
    },
}  # fmt: skip
"""millions of parameters, about"""
BATCH = {"--seq-length": 32, "--micro-batch-size": 1, "--global-batch-size": 2}
CASES = {
    "tp=2 -> tp=1": ((2, "tp=2"), (1, "tp=1")),
    "pp=2 -> tp=2": ((2, "pp=2"), (2, "tp=2")),
}
STAGING = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=1, help="runs of each live case; the median counts")
    parser.add_argument("--parameters", type=int, nargs="+", default=list(SIZES), choices=SIZES, help="in millions")
    parser.add_argument("--only", choices=["wire", "live"], help="just one part")
    parser.add_argument("--no-torchrun", action="store_true", help="live changes only")
    args = parser.parse_args()
    result = {"conditions": conditions()}
    with tempfile.TemporaryDirectory(prefix="liverun-bench-") as name:
        folder = Path(name)
        if args.only != "live":
            result |= pair(folder)
        if args.only != "wire":
            data = prepare_data(folder)
            result["live"] = {
                f"{num_parameters(SIZES[size]) / 1e6:.1f} M, {case}": changes(folder, data, size, case, args)
                for size in args.parameters
                for case in CASES
            }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


def pair(folder: Path) -> dict:
    """Run both ranks of ``reshard_pair.py``; what rank 0 says, and the larger memory of the two."""
    script = Path(__file__).with_name("reshard_pair.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), folder, "12", "768", str(STAGING)], env=environment(folder),
            stdout=subprocess.PIPE, stderr=None if rank == 0 else subprocess.DEVNULL, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = said[0]
    for name in ("megatron", "liverun"):
        if name in found["weights"]:
            found["weights"][name]["extra_bytes"] = max(one["weights"][name]["extra_bytes"] for one in said)
    return found


def changes(folder: Path, data: str, size: int, case: str, args: argparse.Namespace) -> dict:
    before, after = CASES[case]
    train = [TRAIN, *as_arguments(SIZES[size] | BATCH), "--data-path", data, "--bf16"]
    runs, deferred, restarts = [], [], []
    for _ in range(args.runs):
        runs.append(live(folder, train, before, after))
        deferred.append(live(folder, train, before, after, ["--defer=optimizer"]))
        if not args.no_torchrun:
            restarts.append(restart(folder, train, before, after))
    pause_s = statistics.median(run["to_start_s"] for run in runs)
    parts = {
        name: statistics.median(run["parts"][name] for run in runs) for name in ("cut", "transfer", "check", "switch")
    }
    found = {
        "pause_s": pause_s,
        "to_end_s": statistics.median(run["to_end_s"] for run in runs),
        "parts": parts,
        "bytes_moved": runs[0]["bytes_moved"],
        "bytes_local": runs[0]["bytes_local"],
        "bytes_per_s": (runs[0]["bytes_moved"] + runs[0]["bytes_local"]) / parts["transfer"],
        "peak_extra_bytes": max(run["peak_extra_bytes"] for run in runs),
        "kept": runs[0]["kept"],
        "deferred_pause_s": statistics.median(run["to_start_s"] for run in deferred),
        "deferred_to_end_s": statistics.median(run["to_end_s"] for run in deferred),
    }
    if restarts:
        found["torchrun_s"] = statistics.median(run["to_start_s"] for run in restarts)
        found["ratio"] = found["torchrun_s"] / pause_s
    return found


def show(result: dict) -> None:
    print(", ".join(f"{name} {value}" for name, value in result["conditions"].items()))
    for name, rows in result.get("wire", {}).items():
        print(f"\n256 MiB {name}")
        best = max(row["bytes_per_s"] for key, row in rows.items() if key.startswith("bare"))
        for key, row in rows.items():
            rate = row["bytes_per_s"]
            text = f"{rate / 1e9:6.2f} GB/s  {rate / best:5.0%} of the best bare rate"
            busy = f"{row['processor_s'] / row['seconds']:.2f} cores busy"
            print(f"  {key:42}{row['seconds']:8.3f} s {text}, {busy}, {row.get('verify_s', 0.0):.3f} s in digests")
    if "weights" in result:
        print(f"\nweights of a bf16 GPT from tp=2 to pp=2: {json.dumps(result['weights'])}")
    for name, row in result.get("live", {}).items():
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in row["parts"].items())
        moved, local = row["bytes_moved"] / 1e6, row["bytes_local"] / 1e6
        print(f"\n{name}: pause {row['pause_s']:.3f} s ({parts}); {moved:.0f} MB moved, {local:.0f} MB local")
        print(f"  {row['bytes_per_s'] / 1e9:.2f} GB/s moved and local together, checking left out")
        late_s, shorter = row["deferred_pause_s"], row["pause_s"] / row["deferred_pause_s"]
        print(f"  --defer optimizer: pause {late_s:.3f} s, {shorter:.1f} times shorter")
        print(f"  to the end of the first step: {row['to_end_s']:.3f} s, deferred {row['deferred_to_end_s']:.3f} s")
        if "ratio" in row:
            print(f"  torchrun with torch_dist: {row['torchrun_s']:.2f} s, {row['ratio']:.0f} times as long")


if __name__ == "__main__":
    main()
