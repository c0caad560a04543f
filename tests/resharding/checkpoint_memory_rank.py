"""What ``test_checkpoint_memory`` measures: FOLDER. Every piece of work runs in a process of its own, which has done it once.

Needs glibc to give back at once what is freed (``MALLOC_MMAP_THRESHOLD_``): what comes next is seen as growth again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from launcher.checkpoint import buffers_of
from liverun.memory import ResidentPeak
from resharding import megatron  # noqa: F401 - conversions import it when they run
from resharding.boxes import DTYPE_SIZES_BYTES, Box, Holding, Piece
from resharding.checkpoint import reader
from resharding.checkpoint.convert import convert
from resharding.checkpoint.deepspeed import DeepSpeedSource
from resharding.checkpoint.export import FAMILY, export_llama
from resharding.checkpoint.folder import fresh_nonce
from resharding.checkpoint.format import Meta
from resharding.checkpoint.fused import gate_up, query_key_value
from resharding.checkpoint.megatron_dist import MegatronSource
from resharding.checkpoint.megatron_write import write_megatron
from resharding.checkpoint.opened import Checkpoint
from resharding.checkpoint.parts import Part
from resharding.checkpoint.sums import BITS
from resharding.checkpoint.universal import UniversalSource
from resharding.listing import Tensor

SHAPE = (2048, 512)
LARGEST = 4 * 2**20
KINDS = {"weight": "float32", "exp_avg": "float32", "exp_avg_sq": "bfloat16"}
FEW, MANY = 1, 3
"""layers"""
NAMES = ("mlp.linear_fc1", "mlp.linear_fc2")
RULES = {
    "rules": [
        {"match": ".*linear_fc1.*", "pattern": "fragments", "parts": [1, 1]},
        {"match": ".*linear_fc2.*", "pattern": "fragments", "axis": 1},
    ]
}
"""for slices of two tensor parallel ranks"""
LLAMA = {**FAMILY, "rotary_base": 10000, "layernorm_epsilon": 1e-5, "max_sequence_length": 128}


def peak_of(work: Callable[[int], object], layers: int) -> int:
    """Return by how many bytes a process grew at most while it did the work of so many layers."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        work(FEW)  # code and tables that are used for the first time are no part of it
        with ResidentPeak() as peak:
            work(layers)
        os.write(there, str(peak.extra_bytes).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not status
    return int(os.read(here, 64))


class Made:
    """A source that has no numbers of its own in memory."""

    nbytes = 0
    mark = "made"
    meta = Meta(
        step=7, consumed_samples=56,
        optimizer={"groups": {"one": {"lr": 0.5, "step": 7.0}}, "settings": {"one": {"wd_mult": 1.0}}, "grad_scaler": {}},
    )  # fmt: skip

    def __init__(self, layers: int) -> None:
        self.tensors = [
            Tensor(f"{kind}/decoder.layers.{layer}.{NAMES[number]}.weight", KINDS[kind], SHAPE, False)
            for kind in KINDS for layer in range(layers) for number in range(2)
        ]  # fmt: skip
        names = [tensor.key.partition("/")[2] for tensor in self.tensors if "fc1" in tensor.key]
        self.fused = {name: gate_up(name, SHAPE[0] // 2) for name in names}

    def parts(self, key: str) -> Iterator[Part]:
        yield Part(key=key, offset=(0, 0), data=np.full(SHAPE, 7, dtype=BITS[DTYPE_SIZES_BYTES[KINDS[key.partition("/")[0]]]]))

    def complaint(self) -> None:
        return None


class Llama(Made):
    """The same, of weights that Llama has."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        names = [f"decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in range(layers)]
        self.tensors = [
            *(tensor for tensor in self.tensors if tensor.key.startswith("weight/")),
            *(Tensor(f"weight/{name}", KINDS["weight"], SHAPE, False) for name in names),
            Tensor("weight/embedding.word_embeddings.weight", KINDS["weight"], SHAPE, False),
        ]
        self.fused |= {name: query_key_value(name, heads=24, groups=4, head_dim=SHAPE[0] // 32) for name in names}


def holding_of(layers: int) -> Holding:
    """Places for all of every third tensor, and most columns of the others."""
    pieces = []
    for number, tensor in enumerate(Made(layers).tensors):
        memory = torch.full(SHAPE, -1, dtype=getattr(torch, tensor.dtype))
        columns = SHAPE[1] if number % 3 == 0 else SHAPE[1] * 7 // 8
        box = Box(tensor.key, tensor.dtype, SHAPE, (0, SHAPE[1] - columns), (SHAPE[0], columns))
        pieces.append(Piece(box, lambda view=memory[:, :columns]: view))
    return Holding.of(pieces)


def main() -> None:
    folder = Path(sys.argv[1])
    held = {layers: holding_of(layers) for layers in (FEW, MANY)}

    def make(layers: int) -> None:
        convert(Made(layers), folder / fresh_nonce())

    def write(layers: int) -> None:
        with Checkpoint.open(folder / f"ours{layers}") as checkpoint:
            write_megatron(checkpoint, folder / fresh_nonce())

    def back(layers: int) -> None:
        convert(MegatronSource(folder / f"theirs{layers}"), folder / fresh_nonce())

    def buckets(layers: int) -> None:
        convert(MegatronSource(folder / f"buckets{layers}", buffers_of=buffers_of), folder / fresh_nonce())

    def zero(layers: int) -> None:
        convert(DeepSpeedSource(folder / f"zero{layers}", model={}, patterns={}), folder / fresh_nonce())

    def zero_3(layers: int) -> None:
        convert(DeepSpeedSource(folder / f"zero-3-{layers}", model={}, patterns={}), folder / fresh_nonce())

    def slices(layers: int) -> None:
        convert(DeepSpeedSource(folder / f"slices{layers}", model={}, patterns=RULES), folder / fresh_nonce())

    def universal(layers: int) -> None:
        convert(UniversalSource(folder / f"universal{layers}", model={}), folder / fresh_nonce())

    def export(layers: int) -> None:
        with Checkpoint.open(folder / f"llama{layers}") as checkpoint:
            export_llama(checkpoint, folder / fresh_nonce(), model=LLAMA)

    def read(layers: int) -> None:
        with Checkpoint.open(folder / f"ours{layers}") as checkpoint:
            assert reader.read_into(checkpoint, held[layers]) == held[layers].nbytes

    for layers in (FEW, MANY):
        with Checkpoint.open(convert(Made(layers), folder / f"ours{layers}").path) as checkpoint:
            write_megatron(checkpoint, folder / f"theirs{layers}")
        convert(Llama(layers), folder / "made").path.rename(folder / f"llama{layers}")
    found = {}
    for work in (make, write, back, buckets, zero, zero_3, slices, universal, export, read):
        found[work.__name__] = [peak_of(work, layers) for layers in (FEW, MANY)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
