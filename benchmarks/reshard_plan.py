"""How long one rank of a large job plans, how much memory that takes, and what ranks tell each other for it.

    python benchmarks/reshard_plan.py                      # the curve, 64 to 4,096 ranks
    python benchmarks/reshard_plan.py --ranks 1024 --balance

Shapes of a Llama with 70 B parameters, bf16 with fp32 main parameters and Adam's two moments in a distributed
optimizer; tp 8, pp 4, eight ranks to a host. One data parallel replica leaves: either of each stage one host, so
that all others keep their place (``kept``), or the last hosts, so that some change their stage (``moved``).

Layouts are arithmetic here, no model is built; ``tests/resharding/test_large_worlds.py`` holds the arithmetic
against Megatron. Each measured rank is a process of its own that gets the messages of all others, unpacks them and
plans; its time is processor time, its memory the operating system's high-water mark, interpreter and numpy included.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from resharding.listing import Block, Listing, Tensor, exchange
from resharding.plan import plan_all, plan_for, totals_of

STATE_KINDS = (("main", "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32"))
GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Llama:
    layers: int = 80
    hidden: int = 8192
    heads: int = 64
    groups: int = 8
    ffn: int = 28672
    vocab: int = 128256


@dataclass(frozen=True)
class World:
    tp: int
    pp: int
    dp: int

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return tp, dp and pp rank: Megatron's order, tensor parallel ranks next to each other."""
        return rank % self.tp, rank // self.tp % self.dp, rank // self.tp // self.dp


Part = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]
"""name, global shape, offset, shape, padded"""


def parameters(model: Llama, world: World, tp: int, pp: int) -> Iterator[list[Part]]:
    """Yield the parts of each parameter of a stage, parameters in the order the model has them."""
    h, share = model.hidden, world.tp

    def rows(name: str, total: int, width: int, padded: bool = False) -> Part:
        return name, (total, width), (total // share * tp, 0), (total // share, width), padded

    def columns(name: str, total: int) -> Part:
        return name, (h, total), (0, total // share * tp), (h, total // share), False

    def norm(name: str) -> Part:
        return name, (h,), (0,), (h,), False

    if pp == 0:
        yield [rows("embedding.word_embeddings.weight", model.vocab, h, True)]
    per_stage = model.layers // world.pp
    for layer in range(pp * per_stage, (pp + 1) * per_stage):
        at = f"decoder.layers.{layer}"
        yield [norm(f"{at}.self_attention.linear_qkv.layer_norm_weight")]
        yield [columns(f"{at}.self_attention.linear_proj.weight", h)]
        yield [rows(f"{at}.self_attention.linear_qkv.weight", h + 2 * h * model.groups // model.heads, h)]
        yield [norm(f"{at}.mlp.linear_fc1.layer_norm_weight")]
        half = model.ffn // share
        yield [
            (f"{at}.mlp.linear_fc1.weight", (2 * model.ffn, h), (which * model.ffn + tp * half, 0), (half, h), False)
            for which in range(2)
        ]
        yield [columns(f"{at}.mlp.linear_fc2.weight", model.ffn)]
    if pp == world.pp - 1:
        yield [norm("decoder.final_layernorm.weight")]
        yield [rows("output_layer.weight", model.vocab, h, True)]


@cache
def blocks(model: Llama, world: World, tp: int, pp: int, bucket: int | None) -> tuple[Block, Block]:
    """Return weights and optimizer state of all data parallel ranks at one place, as Megatron's buffers lie."""
    params = list(parameters(model, world, tp, pp))
    units: dict[tuple[Tensor, ...], int] = {}
    table = []
    for name, whole, offset, shape, padded in (part for param in params for part in param):
        unit = (Tensor(f"weight/{name}", "bfloat16", whole, padded),)
        table.append((units.setdefault(unit, len(units)), offset, shape))
    weights = Block(tuple(units), tuple(table))
    states: dict[tuple[Tensor, ...], int] = {}
    table, places, buckets, at = [], [], [], 0
    divisor = math.lcm(world.dp, 128)
    for param in reversed(params):
        at = -(-at // 64) * 64
        for name, whole, offset, shape, padded in param:
            unit = tuple(Tensor(f"{kind}/{name}", dtype, whole, padded) for kind, dtype in STATE_KINDS)
            table.append((states.setdefault(unit, len(states)), offset, shape))
            places.append((len(buckets), at))
            at += math.prod(shape)
        if bucket is not None and pp == 0 and at >= bucket:  # later stages have one bucket: nothing to overlap
            buckets.append(-(-at // divisor) * divisor)
            at = 0
    if at:
        buckets.append(-(-at // divisor) * divisor)
    return weights, Block(tuple(states), tuple(table), tuple(buckets), tuple(places), world.dp)


def listing(model: Llama, world: World, rank: int, bucket: int | None) -> Listing:
    tp, dp, pp = world.place(rank)
    weights, states = blocks(model, world, tp, pp, bucket)
    return Listing(((weights, 0), (states, dp)))


def change(model: Llama, old: World, new: World, *, kept: bool) -> tuple[list[Listing], list[Listing], list[str]]:
    """Return the listings before and after, by rank of the old world, and hosts."""
    before = [listing(model, old, rank, bucket_of(old)) for rank in range(old.size)]
    staying = [rank for rank in range(old.size) if rank < new.size or kept]
    if kept:
        staying = [rank for rank in staying if old.place(rank)[1] < new.dp]
    after = [Listing(())] * old.size
    for rank, member in enumerate(staying):
        after[member] = listing(model, new, rank, bucket_of(new))
    return before, after, [f"host{rank // GPUS_PER_HOST}" for rank in range(old.size)]


def bucket_of(world: World) -> int:
    """Return Megatron's default."""
    return max(40_000_000, 1_000_000 * world.dp)


# --- one rank, in a process of its own ---------------------------------------------------------------


def record(before: Sequence[Listing], after: Sequence[Listing]) -> list[list[bytes]]:
    """Return what every rank says in each gather of ``exchange``."""
    said: list[list[bytes]] = []
    for _ in range(2):
        said.append([_said_next(said, rank, sides) for rank, sides in enumerate(zip(before, after, strict=True))])
    return said


def _said_next(answers: Sequence[list[bytes]], rank: int, sides: Sequence[Listing]) -> bytes:
    """Return what a rank says after it has got ``answers`` to what it said before."""
    left = list(answers)

    class Said(Exception):  # noqa: N818 - no error
        pass

    def gather(payload: bytes) -> list[bytes]:
        if left:
            return left.pop(0)
        raise Said(payload)

    try:
        exchange(gather, rank, *sides)
    except Said as stop:
        return bytes(stop.args[0])
    raise AssertionError("exchange ended early")


def measure_rank(folder: Path, rank: int, case: dict[str, int]) -> None:
    """Plan alone, and print what it took."""
    old, new = World(case["tp"], case["pp"], case["dp"]), World(case["tp"], case["pp"], case["dp"] - 1)
    data = [_unframed((folder / f"said{turn}").read_bytes()) for turn in range(2)]
    hosts = [f"host{peer // GPUS_PER_HOST}" for peer in range(old.size)]
    mine = [listing(Llama(), old, rank, bucket_of(old))]
    target = json.loads((folder / "targets").read_text())[rank]
    mine.append(Listing(()) if target is None else listing(Llama(), new, target, bucket_of(new)))
    calls = iter(data)

    def gather(payload: bytes) -> list[bytes]:
        everyone = next(calls)
        assert everyone[rank] == payload
        return everyone

    started = time.process_time()
    before, after = exchange(gather, rank, *mine)
    exchanged = time.process_time()
    plan = plan_for(rank, before, after, hosts)
    done = time.process_time()
    status = Path("/proc/self/status").read_text()
    peak_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(
        json.dumps(
            {
                "exchange_s": exchanged - started, "plan_s": done - exchanged, "peak_mb": peak_kb / 1000,
                "layout_bytes": sum(len(part) for turn in data for part in turn),
                "layout_bytes_padded": sum(len(turn) * max(map(len, turn)) for turn in data),
                "sends": len(plan.sends), "recvs": len(plan.recvs), "copies": len(plan.copies),
            }
        )
    )  # fmt: skip


def _framed(parts: Sequence[bytes]) -> bytes:
    return json.dumps([len(part) for part in parts]).encode() + b"\n" + b"".join(parts)


def _unframed(data: bytes) -> list[bytes]:
    head, _, rest = data.partition(b"\n")
    parts, at = [], 0
    for size in json.loads(head):
        parts.append(rest[at : at + size])
        at += size
    return parts


# --- the whole world ---------------------------------------------------------------------------------


def least_bytes(before: Sequence[Listing], after: Sequence[Listing]) -> int:
    """Return what has to travel at least: what each rank needs and does not hold, by one-dimensional arithmetic.

    Right where parts overlap only if they are the same part, as in a change of data parallelism.
    """
    total = 0
    for had, needs in zip(before, after, strict=True):
        held = _ranges(had)
        for part, wanted in _ranges(needs).items():
            width = part[0]
            for start, stop in wanted:
                inside = sum(max(0, min(stop, b) - max(start, a)) for a, b in held.get(part, ()))
                total += (stop - start - inside) * width
    return total


def _ranges(of: Listing) -> dict[tuple[object, ...], list[tuple[int, int]]]:
    found: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
    for block, index in of.entries:
        for row, (unit, offset, shape) in enumerate(block.table):
            width = sum(2 if tensor.dtype == "bfloat16" else 4 for tensor in block.units[unit])
            name = (width, block.units[unit][0].key, offset, shape)
            start, stop = 0, math.prod(shape)
            if block.buckets:
                bucket, at = block.places[row]
                shard = block.buckets[bucket] // block.num_shards
                start, stop = max(0, index * shard - at), min(stop, (index + 1) * shard - at)
            if start < stop:
                found[name].append((start, stop))
    return found


def balance(
    before: Sequence[Listing], after: Sequence[Listing], hosts: Sequence[str], old: World
) -> dict[str, float]:
    """Compare the busiest sender with a bound that no assignment can be below."""
    plans = plan_all(before, after, hosts)
    totals = totals_of(plans, hosts)
    forced = [0] * len(plans)
    stage = [0] * old.pp
    for plan in plans:
        for send in plan.sends:
            place = old.place(plan.rank)[2]
            stage[place] += send.nbytes
            _, index = before[plan.rank].entries[1]
            if send.cut.piece >= before[plan.rank].entries[0][0].num_boxes(0):
                forced[plan.rank] += send.nbytes
            assert index == old.place(plan.rank)[1]
    bound = max(*forced, *(math.ceil(total / old.tp / old.dp) for total in stage))
    least = least_bytes(before, after)
    return {
        "bytes_moved": totals.bytes_moved, "least_bytes": least, "ratio": totals.bytes_moved / max(1, least),
        "busiest": totals.most_bytes_sent, "bound": bound, "busiest_ratio": totals.most_bytes_sent / max(1, bound),
    }  # fmt: skip


def curve(ranks: Sequence[int], *, with_balance: bool) -> Iterator[dict[str, object]]:
    for size in ranks:
        old = World(8, 4, size // 32)
        new = World(8, 4, old.dp - 1)
        for kept in (True, False):
            before, after, hosts = change(Llama(), old, new, kept=kept)
            row: dict[str, object] = {"ranks": size, "to": new.size, "hosts": "kept" if kept else "moved"}
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                for turn, said in enumerate(record(before, after)):
                    (folder / f"said{turn}").write_bytes(_framed(said))
                staying = [i for i, side in enumerate(after) if side.entries]
                targets = {member: rank for rank, member in enumerate(staying)}
                (folder / "targets").write_text(json.dumps([targets.get(i) for i in range(old.size)]))
                worst: dict[str, float] = defaultdict(float)
                for rank in sorted({0, 8 * (old.dp - 1), old.size // 2, staying[-1], old.size - 1}):
                    command = [sys.executable, __file__, "--measure", str(folder), str(rank), str(old.dp)]
                    said_back = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                    for field, value in json.loads(said_back).items():
                        worst[field] = max(worst[field], value)
            row.update({field: round(value, 3) for field, value in worst.items()})
            if with_balance:
                row.update(balance(before, after, hosts, old))
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--balance", action="store_true", help="also plan for every rank, and compare the senders")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        folder, rank, dp = args.measure
        measure_rank(Path(folder), int(rank), {"tp": 8, "pp": 4, "dp": int(dp)})
        return
    for row in curve(args.ranks, with_balance=args.balance):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
