"""One rank of ``test_memory``: RANK CASE FOLDER MODE. Moves a state of 416 MB and says what that took."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from resharding.boxes import Box, Holding, Piece
from resharding.digest import digest
from resharding.pages import PageReturner
from resharding.plan import plan_for
from resharding.stream import execute
from resharding.transport import ProcessGroupTransport

LAYERS, ROWS, WIDTH = 26, 2048, 1024
KINDS = ("weight", "exp_avg")
STAGING = 16 << 20
LAYER_BYTES = ROWS * WIDTH * 4 * len(KINDS)

Share = dict[int, tuple[int, int]]
"""rows of each layer"""
ALL, LOW, HIGH = (range(LAYERS), (0, ROWS)), (range(LAYERS // 2), (0, ROWS)), (range(LAYERS // 2, LAYERS), (0, ROWS))
UPPER, LOWER = (range(LAYERS), (0, ROWS // 2)), (range(LAYERS), (ROWS // 2, ROWS))
NONE = (range(0), (0, 0))
CASES = {
    "moving": ([LOW, HIGH], [HIGH, LOW]),
    "growing": ([ALL, NONE], [LOW, HIGH]),
    "shrinking": ([LOW, HIGH], [ALL, NONE]),
    "from stages to halves": ([LOW, HIGH], [UPPER, LOWER]),
    "from halves to stages": ([UPPER, LOWER], [HIGH, LOW]),
    "experts in one tensor": ([LOW, HIGH], [HIGH, LOW]),
}


def holding(share, num_experts: int = 1) -> Holding:
    """A buffer for each kind, layers one after the other, nothing of it touched; experts are columns of a layer."""
    layers, (first, last) = share
    pieces = []
    for kind in KINDS:
        rows = last - first
        buffer = torch.empty(len(layers) * rows * WIDTH)
        for place, layer in enumerate(layers):
            whole = buffer[place * rows * WIDTH : (place + 1) * rows * WIDTH].view(rows, WIDTH)
            width = WIDTH // num_experts
            for expert, view in enumerate(whole.split(width, dim=1)):
                box = Box(f"{kind}/layers.{layer}.w{expert}", "float32", (ROWS, width), (first, 0), (rows, width))
                pieces.append(Piece(box, lambda view=view: view))
    return Holding.of(pieces)


def fill(piece: Piece, view: torch.Tensor) -> None:
    salt = sum(map(ord, piece.box.key)) % 97
    start = piece.box.offset[0] * piece.box.shape[1]
    for rows in view.split(32):  # what is used beside the state would count
        rows.copy_(torch.arange(start, start + rows.numel(), dtype=torch.float32).view(rows.shape)).add_(salt)
        start += rows.numel()


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def main() -> None:
    rank, (before, after), folder, mode = int(sys.argv[1]), CASES[sys.argv[2]], Path(sys.argv[3]), sys.argv[4]
    group = dist.ProcessGroupGloo(dist.FileStore(str(folder / "store"), 2), rank, 2, timedelta(seconds=60))
    group.allreduce([torch.zeros(1)]).wait()
    digest(torch.zeros(1 << 20, dtype=torch.uint8))
    num_experts = 8 if "experts" in sys.argv[2] else 1
    sides = [[holding(share, num_experts) for share in side] for side in (before, after)]
    source, target = sides[0][rank], sides[1][rank]
    plan = plan_for(rank, *([side.boxes for side in world] for world in sides), ["here"] * 2)
    base = status("VmRSS")
    for piece in source.pieces:
        fill(piece, piece.view())
    Path("/proc/self/clear_refs").write_text("5")
    returner = PageReturner(source)
    claimed, most_live = 0, source.nbytes

    def claim(piece: int) -> None:
        nonlocal claimed
        claimed += target.pieces[piece].box.nbytes
        count()

    def release(piece: int) -> None:
        returner.piece(piece)
        count()

    def count() -> None:
        nonlocal most_live
        most_live = max(most_live, source.nbytes - returner.num_bytes + claimed)

    report = execute(
        plan, source, target, ProcessGroupTransport(group), STAGING, keep=mode == "keep", claim=claim,
        release=None if mode == "keep" else release,
    )  # fmt: skip
    peak = status("VmHWM") - base
    wanted = torch.empty(ROWS, WIDTH // num_experts)
    wrong = []
    for piece in target.pieces:
        fill(piece, wanted[: piece.box.shape[0]])
        if not torch.equal(piece.view(), wanted[: piece.box.shape[0]]):
            wrong.append(piece.box.key)
    group.allreduce([torch.zeros(1)]).wait()
    print(
        json.dumps(
            {
                "peak": peak, "live": most_live + report.staging_bytes, "source": source.nbytes, "target": target.nbytes, "wrong": wrong,
                "given_back": returner.num_bytes, "layer": LAYER_BYTES, "staging": STAGING,
                "seconds": report.seconds, "verify_s": report.verify_s, "moved": report.bytes_moved,
                "local": report.bytes_local,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
