"""One of the two ranks of ``reshard.py``: RANK FOLDER LAYERS HIDDEN. Prints one JSON object.

Bare sends and the engine's stream take turns over one gloo group; then Megatron's own resharding and the engine move
the weights of one GPT from tp=2 to pp=2, each over a group of its own, the CPU device layer behind ``torch.cuda``.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from liverun import device  # noqa: E402
from liverun.memory import ResidentPeak  # noqa: E402
from resharding import megatron  # noqa: E402
from resharding.boxes import Box, Holding, Piece  # noqa: E402
from resharding.plan import plan_for  # noqa: E402
from resharding.stream import execute  # noqa: E402
from resharding.transport import ProcessGroupTransport  # noqa: E402

MIB = 1 << 20
ROUNDS = 5
NUM_TENSORS, TENSOR_BYTES = 64, 4 * MIB
TENSORS_PER_LAYER = 8
"""what is on its way at once where layers move one after the other"""
WINDOW = 2
"""bare messages under way at once, as in the stream"""


def bare(group, rank: int, tensors: list, both: bool, chunk_bytes: int) -> dict:
    """Send every byte in chunks, as few as the stream has under way."""
    out = torch.cat([t.view(torch.uint8).view(-1) for t in tensors]) if (rank == 0 or both) else None
    into = torch.empty(NUM_TENSORS * TENSOR_BYTES, dtype=torch.uint8) if (rank == 1 or both) else None
    if into is not None:
        into.zero_()
    group.barrier().wait()
    started, processor = time.perf_counter(), time.process_time()
    under_way = []
    for at in range(0, NUM_TENSORS * TENSOR_BYTES, chunk_bytes):
        if len(under_way) == WINDOW:
            for work in under_way.pop(0):
                work.wait()
        works = []
        if out is not None:
            works.append(group.send([out[at : at + chunk_bytes]], 1 - rank, 7))
        if into is not None:
            works.append(group.recv([into[at : at + chunk_bytes]], 1 - rank, 7))
        under_way.append(works)
    for works in under_way:
        for work in works:
            work.wait()
    group.barrier().wait()
    return {"seconds": time.perf_counter() - started, "processor_s": time.process_time() - processor}


def holding(tensors: list, first: int) -> Holding:
    pieces = []
    for number, live in enumerate(tensors):
        layer, place = divmod(first + number, TENSORS_PER_LAYER)
        box = Box(f"weight/layers.{layer}.w{place}", "float32", tuple(live.shape), (0, 0), tuple(live.shape))
        pieces.append(Piece(box, lambda live=live: live))
    return Holding.of(pieces)


def stream(group, rank: int, old: list, new: list, staging: int, **options) -> dict:
    """Move the state; seconds and what the engine says of them."""
    sides = [[side.boxes for side in world] for world in (old, new)]
    plan = plan_for(rank, *sides, ["here"] * 2)
    transport = ProcessGroupTransport(group)
    group.barrier().wait()
    started, processor = time.perf_counter(), time.process_time()
    report = execute(plan, old[rank], new[rank], transport, staging, **options)
    group.barrier().wait()
    return {
        "seconds": time.perf_counter() - started,
        "processor_s": time.process_time() - processor,
        "verify_s": report.verify_s,
        "direct": report.num_direct,
    }


def whole() -> list:
    """Return tensors that lie contiguous: they leave and arrive where they are."""
    return [torch.rand(TENSOR_BYTES // 4096, 1024) for _ in range(NUM_TENSORS)]


def columns() -> list:
    """Return as many tensors of the same size, each half the columns of a wider one: packed here, unpacked there."""
    wide = [torch.rand(TENSOR_BYTES // 4096, 2048) for _ in range(NUM_TENSORS // 2)]
    return [half for tensor in wide for half in tensor.split(1024, dim=1)]


def sides(mine: list, other: list, *, both: bool) -> tuple[list, list]:
    """Return the old and the new world; boxes are the same on both ranks, and each uses its own side."""
    nobody = Holding.of([])
    if not both:
        return [holding(mine, 0), nobody], [nobody, holding(other, 0)]
    return [holding(mine, 0), holding(mine, NUM_TENSORS)], [holding(other, NUM_TENSORS), holding(other, 0)]


def wire(group, rank: int, staging: int) -> dict:
    """Bare sends and the stream in turns; medians, and the processor time of both ranks together."""
    mine, other, cut, other_cut = whole(), whole(), columns(), columns()
    result = {}
    for name, both in (("one way", False), ("both ways", True)):
        plain, packed = sides(mine, other, both=both), sides(cut, other_cut, both=both)
        cases: dict[str, Callable[[], dict]] = {
            f"bare, {chunk // MIB} MiB": partial(bare, group, rank, mine, both, chunk)
            for chunk in (staging // 4, 64 * MIB)
        }
        for verify in ("off", "sample", "full"):
            cases[f"stream, verify {verify}"] = partial(stream, group, rank, *plain, staging, verify=verify)
        cases["stream, layer by layer, verify full"] = partial(stream, group, rank, *plain, staging, keep=False)
        for verify in ("off", "full"):
            cases[f"stream, cut along columns, verify {verify}"] = partial(
                stream, group, rank, *packed, staging, verify=verify
            )
        found: dict[str, list[dict]] = {case: [] for case in cases}
        for _ in range(ROUNDS):
            for case, run in cases.items():
                found[case].append(run())
                assert "columns" not in case or not found[case][-1]["direct"]
        medians = {
            case: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            for case, rows in found.items()
        }
        of_both = [{}, {}]
        dist.all_gather_object(of_both, medians)
        result[name] = {
            case: row
            | {
                "processor_s": sum(of_one[case]["processor_s"] for of_one in of_both),
                "bytes_per_s": NUM_TENSORS * TENSOR_BYTES / row["seconds"],
            }
            for case, row in medians.items()
        }
    return result


def gpt(layout: dict, layers: int, hidden: int):
    """Build a bf16 GPT for the layout that Megatron's parallel state is in."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(layout["tp"], layout["pp"])
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=8, ffn_hidden_size=4 * hidden,
        tensor_model_parallel_size=layout["tp"], pipeline_model_parallel_size=layout["pp"], bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False, normalization="RMSNorm", add_bias_linear=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=1024, max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).to(torch.bfloat16)  # fmt: skip
    held = megatron.holding_of([model], None)
    parallel_state.destroy_model_parallel()  # forgets its groups, which live on
    return model, held


def weights(rank: int, staging: int, layers: int, hidden: int) -> dict:
    """Move the weights of a GPT from tp=2 to pp=2, in both ways in turns."""
    from megatron.core.resharding.refit import clear_service_cache, swap_model_weights

    source, old = gpt({"tp": 2, "pp": 1}, layers, hidden)
    target, new = gpt({"tp": 1, "pp": 2}, layers, hidden)
    group = dist.distributed_c10d._get_default_group()
    boxes = []
    for side in (old, new):
        said = [None, None]
        dist.all_gather_object(said, side.boxes)
        boxes.append(said)
    plan = plan_for(rank, *boxes, ["here"] * 2)
    found: dict[str, list] = {"megatron": [], "liverun": []}
    clear_service_cache()
    for number in range(ROUNDS + 1):
        for name, runs in found.items():
            with torch.no_grad():
                for piece in new.pieces:
                    piece.view().fill_(-1)
            dist.barrier()
            started = time.perf_counter()
            with ResidentPeak() as peak:
                if name == "megatron":
                    swap_model_weights(source, target, "gloo")
                else:
                    execute(plan, old, new, ProcessGroupTransport(group), staging, verify="off")
            dist.barrier()
            if number:  # the first round makes plans, services and connections
                runs.append((time.perf_counter() - started, peak.extra_bytes))
    return {
        "weight_bytes": sum(piece.view().nbytes for piece in old.pieces),
        **{
            name: {"seconds": statistics.median(s for s, _ in runs), "extra_bytes": max(b for _, b in runs)}
            for name, runs in found.items()
        },
    }


def main() -> None:
    rank, folder, layers, hidden, staging = int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6])
    device.install()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/pair", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    group = dist.distributed_c10d._get_default_group()
    result = {"wire": wire(group, rank, staging)}
    try:
        result["weights"] = weights(rank, staging, layers, hidden)
    except (ImportError, RuntimeError, AttributeError) as error:
        result["weights"] = {"failed": f"{type(error).__name__}: {error}"}
    print(json.dumps(result))
    dist.barrier()


if __name__ == "__main__":
    main()
