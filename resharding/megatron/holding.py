"""What a rank holds of model and optimizer, as pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from resharding.boxes import Holding, Piece, Shape
from resharding.listing import Block, Tensor
from resharding.megatron.parts import Part, Unsupported, boxes_in_range, placed_parts
from resharding.megatron.shards import Shard, kinds_of, leaves, shards_of


def holding_of(model_chunks: Sequence[torch.nn.Module], optimizer: Any | None) -> Holding:
    """Return what this rank holds of model and optimizer.

    Kinds are the first part of each key: ``weight/`` (parameters and persistent buffers), ``main/`` (fp32
    main parameters, where they are not the parameters themselves), and one per optimizer state, such as
    ``exp_avg/``.

    ``model_chunks`` may be wrapped (DDP, Float16Module). Runs no collective, reads no element, and takes
    tensors of any device, meta included; pieces are resolved when their view is asked for, so storages may
    come and go and Adam's state need not exist yet. Megatron's parallel state has to be that of the model's
    world.

    Raises ``Unsupported`` naming what cannot be moved.
    """
    placed = list(placed_parts(model_chunks))
    pieces = [_weight(part) for part in placed]
    parts_of: dict[int, list[Part]] = defaultdict(list)
    for part in placed:
        parts_of[id(part.owner)].append(part)
    trainable = {
        id(param): name for chunk in model_chunks for name, param in chunk.named_parameters() if param.requires_grad
    }
    for ident, name in trainable.items():
        if ident not in parts_of:
            raise Unsupported(f"parameter {name} is not in the model's sharded_state_dict()")
    if optimizer is not None:
        for shard in shards_of(optimizer):
            if id(shard.param) not in parts_of:
                raise Unsupported(
                    f"the optimizer trains a parameter of shape {tuple(shard.param.shape)} "
                    "that is not in the model's sharded_state_dict()"
                )
        pieces.extend(_optimizer_state(optimizer, parts_of))
    return Holding.of(pieces)


def _weight(part: Part) -> Piece:
    start = (0,) * len(part.shape)
    return Piece(
        part.box("weight", part.owner.dtype, start, part.shape),
        part.accessor(lambda: part.owner, 0, start, part.shape),
    )


def _optimizer_state(optimizer: Any, parts_of: Mapping[int, Sequence[Part]]) -> Iterator[Piece]:
    """Yield the pieces of every shard; those of one buffer together, described by how the buffer is cut."""
    buffer_of: dict[int, tuple[Any, Any]] = {}
    for leaf in leaves(optimizer):
        if isinstance(leaf, DistributedOptimizer):
            for buffer in leaf.buffers:
                buffer_of.update({id(param): (leaf, buffer) for param in buffer.params})
    by_buffer: dict[int, dict[int, Shard]] = defaultdict(dict)
    for shard in shards_of(optimizer):
        if id(shard.param) in buffer_of:
            by_buffer[id(buffer_of[id(shard.param)][1])][id(shard.param)] = shard
            continue
        for part in parts_of[id(shard.param)]:
            for pieces in _optimizer_pieces(part, shard):
                yield from pieces
    for leaf, buffer in {id(buffer): (leaf, buffer) for leaf, buffer in buffer_of.values()}.values():
        yield from _buffer_pieces(leaf, buffer, by_buffer[id(buffer)], parts_of)


def _optimizer_pieces(part: Part, shard: Shard) -> Iterator[list[Piece]]:
    """Yield for each box of a part the pieces of all kinds."""
    if not shard.param.is_contiguous():
        raise Unsupported(f"{part.key} is trained but not contiguous")
    kinds = kinds_of(part, shard)
    for start, shape in boxes_in_range(part, shard.first, shard.last):
        yield [
            Piece(part.box(kind, dtype, start, shape), part.accessor(tensor, shard.first, start, shape))
            for kind, dtype, tensor in kinds
        ]


def _buffer_pieces(
    leaf: Any, buffer: Any, shards: Mapping[int, Shard], parts_of: Mapping[int, Sequence[Part]]
) -> Iterator[Piece]:
    """Yield what this rank's ranges of a buffer hold, in the order of a ``Block``: box by box, kinds within.

    The block is what all ranks of the data parallel group have in common. A rank with no range of the buffer
    has no kinds to name, and so no piece and no block.
    """
    order = sorted(buffer.param_index_map.items(), key=lambda entry: entry[1][0])
    kinds: set[tuple[tuple[str, torch.dtype], ...]] = set()
    pieces: list[Piece] = []
    parts: list[Part] = []
    places: list[tuple[int, int]] = []
    for param, (first, *_, bucket) in order:
        for part in parts_of.get(id(param), ()):
            parts.append(part)
            places.append((bucket, first - buffer.buckets[bucket].offset + part.base))
            shard = shards.get(id(param))
            if shard is not None:
                kinds.add(tuple((kind, dtype) for kind, dtype, _ in kinds_of(part, shard)))
                for row in _optimizer_pieces(part, shard):
                    pieces.extend(row)
    if len(kinds) != 1 or not all(map(_is_dense, parts)):
        yield from pieces
        return
    units: dict[tuple[Tensor, ...], int] = {}
    table: list[tuple[int, Shape, Shape]] = []
    named = kinds.pop()
    for part in parts:
        boxes = [part.box(kind, dtype, (0,) * len(part.shape), part.shape) for kind, dtype in named]
        unit = tuple(Tensor(box.key, box.dtype, box.global_shape, box.padded) for box in boxes)
        table.append((units.setdefault(unit, len(units)), boxes[0].offset, boxes[0].shape))
    numels = tuple(int(bucket.grad_data.numel()) for bucket in buffer.buckets)
    block = Block(tuple(units), tuple(table), numels, tuple(places), leaf.data_parallel_group.size())
    follows = (block, leaf.data_parallel_group.rank())
    for piece in pieces:
        yield replace(piece, block=follows)


def _is_dense(part: Part) -> bool:
    """Tell whether a part is one contiguous stretch of its parameter, in C order."""
    stride = 1
    for size, step in zip(reversed(part.shape), reversed(part.strides), strict=True):
        if size > 1 and step != stride:
            return False
        stride *= size
    return True
