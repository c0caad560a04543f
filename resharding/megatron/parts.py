"""Where Megatron says that each tensor of a model lies."""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from resharding.boxes import DTYPE_SIZES_BYTES, Box, Shape, flat_range_boxes


class Unsupported(ValueError):  # noqa: N818 - reads as what it is
    """The model or optimizer keeps state in a way that cannot be moved yet; the message names it."""


@dataclass(frozen=True)
class Part:
    """A tensor with a place of its own: which elements of ``owner`` it is, and where they belong globally."""

    key: str
    global_shape: Shape
    offset: Shape
    prepended: int
    padded: bool
    owner: torch.Tensor
    """the parameter or buffer"""
    base: int
    """the part's first element, counted in the owner's storage from the owner's first"""
    shape: Shape
    """without the prepended axes"""
    strides: Shape

    def box(self, kind: str, dtype: torch.dtype, start: Shape, shape: Shape) -> Box:
        """Return the global box of ``[start, start + shape)`` within this part."""
        whole = ((0,) * self.prepended + start, (1,) * self.prepended + shape)
        offset = tuple(o + s for o, s in zip(self.offset, whole[0], strict=True))
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPE_SIZES_BYTES:
            raise Unsupported(f"{kind}/{self.key} is kept as {name}, which cannot be moved yet")
        return Box(f"{kind}/{self.key}", name, self.global_shape, offset, whole[1], self.padded)

    def accessor(
        self, tensor: Callable[[], torch.Tensor], first: int, start: Shape, shape: Shape
    ) -> Callable[[], torch.Tensor]:
        """Return an accessor for ``[start, start + shape)`` of this part.

        ``tensor`` gives storage whose first element is the owner's element ``first``.
        """
        at = self.base - first + sum(s * stride for s, stride in zip(start, self.strides, strict=True))
        sizes = (1,) * self.prepended + shape
        strides = (1,) * self.prepended + self.strides

        def view() -> torch.Tensor:
            live = tensor().detach()
            return live.as_strided(sizes, strides, live.storage_offset() + at)

        return view


def placed_parts(model_chunks: Sequence[torch.nn.Module]) -> Iterator[Part]:
    """Yield every tensor with a place of its own; raises ``Unsupported`` for what has none."""
    for chunk in model_chunks:
        module = unwrapped(chunk)
        if not hasattr(module, "sharded_state_dict"):
            raise Unsupported(f"{type(module).__name__} has no sharded_state_dict()")
        metadata: dict[str, Any] = {"non_homogeneous_layers": True}
        group = getattr(getattr(module, "pg_collection", None), "dp_cp", None)
        if group is not None:
            metadata["dp_cp_group"] = group
        try:
            entries = list(_flat(module.sharded_state_dict(metadata=metadata)))
        except AssertionError as error:
            raise Unsupported(
                f"{type(module).__name__} cannot say where its state lies in this layout: sharded_state_dict() "
                f"{_failed_check(error)}"
            ) from error
        owners = _Owners(module)  # only now: a router's bias becomes fp32, in new storage, when it is asked for
        for name, entry in entries:
            yield from _parts_of(name, entry, owners)


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP, Float16Module and the like."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def _failed_check(error: AssertionError) -> str:
    """Say which check of Megatron's failed; many have no words of their own."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = f" ({error})" if str(error) else ""
    return f"fails at '{where.line}' in {where.name}{said}"


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _flat(value, f"{name}.{index}")
    else:
        yield name, tree


class _Owners:
    """Finds the parameter or buffer that a tensor is, or is a view of."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in (*module.parameters(), *module.buffers()):
            self._by_storage[storage_of(tensor)].append(tensor)

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the owner, or ``None`` for a copy."""
        for owner in self._by_storage.get(storage_of(tensor), ()):
            first = owner.storage_offset()
            if first <= tensor.storage_offset() < first + _extent(owner.shape, owner.stride()):
                return owner
        return None


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which views share."""
    return int(tensor.untyped_storage()._cdata)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return elements of storage from the first to the last of a view, both included; 0 for an empty one."""
    if not math.prod(shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _parts_of(name: str, entry: Any, owners: _Owners) -> Iterator[Part]:
    match entry:
        case ShardedTensor():
            yield from _parts_of_tensor(entry, entry.data, owners, probe=None)
        case ShardedTensorFactory():
            yield from _parts_of_factory(entry, owners)
        case ShardedObject(data=data):
            if not _is_empty(data):
                raise Unsupported(
                    f"{name} is an object of type {type(data).__name__}, which has no place in a tensor: "
                    "it belongs to one rank of one layout and cannot be split (such as the scales of FP8)"
                )
        case LocalNonpersistentObject() | None:
            pass
        case _ if not _is_empty(entry):
            raise Unsupported(f"{name} is a {type(entry).__name__} in sharded_state_dict(), not a sharded tensor")


def _is_empty(data: Any) -> bool:
    if data is None:
        return True
    if isinstance(data, torch.Tensor):
        return not data.numel()
    if hasattr(data, "getbuffer"):
        return not bytes(data.getbuffer()[:1])
    return hasattr(data, "__len__") and len(data) == 0


def _parts_of_factory(factory: ShardedTensorFactory, owners: _Owners) -> Iterator[Part]:
    """Build the factory on its own data; where that copies, build it again on the elements' numbers."""
    built = [entry for _, entry in _flat(factory.build())]
    probes: list[Any] = [None] * len(built)
    if any(not isinstance(entry, ShardedTensor) for entry in built):
        raise Unsupported(f"{factory.key} is built from parts that are no sharded tensors")
    if any(owners.find(entry.data) is None for entry in built):
        data = factory.data
        numbers = torch.arange(data.numel(), dtype=torch.int64, device="cpu").view(data.shape)
        again = factory.build_fn(factory.key, numbers, factory.replica_id, factory.flattened_range)
        probes = [entry.data for _, entry in _flat(again)]
    for entry, probe in zip(built, probes, strict=True):
        yield from _parts_of_tensor(entry, factory.data if probe is not None else entry.data, owners, probe=probe)


def _parts_of_tensor(
    entry: ShardedTensor, data: torch.Tensor | None, owners: _Owners, probe: torch.Tensor | None
) -> Iterator[Part]:
    if data is None or type(data) not in (torch.Tensor, torch.nn.Parameter):
        raise Unsupported(f"{entry.key} is kept as {type(data).__name__}, not as a plain tensor")
    if not math.prod(entry.local_shape):
        return
    owner = owners.find(data)
    if owner is None:
        raise Unsupported(f"{entry.key} is a copy in sharded_state_dict(), not the model's own storage")
    if probe is None:
        base, strides = data.storage_offset() - owner.storage_offset(), tuple(data.stride())
    else:
        base, strides = _grid(entry.key, probe)
        if not data.is_contiguous():
            raise Unsupported(f"{entry.key} is not contiguous, and is rearranged in sharded_state_dict()")
        base += data.storage_offset() - owner.storage_offset()
    yield Part(
        key=entry.key,
        global_shape=tuple(map(int, entry.global_shape)),
        offset=tuple(map(int, entry.global_offset)),
        prepended=entry.prepend_axis_num,
        padded=bool(entry.allow_shape_mismatch),
        owner=owner,
        base=int(base),
        shape=tuple(entry.local_shape),
        strides=strides,
    )


def _grid(key: str, numbers: torch.Tensor) -> tuple[int, Shape]:
    """Return offset and strides of a tensor of element numbers.

    Raises ``Unsupported`` if they form no grid with ascending steps.
    """
    base = int(numbers[(0,) * numbers.ndim])
    strides: list[int] = []
    expected = torch.full((), base, dtype=torch.int64)
    for axis, size in enumerate(numbers.shape):
        second = tuple(int(i == axis) for i in range(numbers.ndim))
        stride = int(numbers[second]) - base if size > 1 else 1
        strides.append(stride)
        along = torch.arange(size) * stride
        expected = expected + along.view([-1 if i == axis else 1 for i in range(numbers.ndim)])
    if min(strides, default=1) < 1 or not torch.equal(expected.expand(numbers.shape), numbers):
        raise Unsupported(f"{key} is rearranged in sharded_state_dict() in a way that is no regular grid")
    return base, tuple(strides)


def boxes_in_range(part: Part, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the boxes, in the part's coordinates, of its elements within ``[first, last)`` of the parameter.

    A part's elements, taken along its axes from the largest stride to the smallest, come in ascending order
    within the parameter; so a range of the parameter is a range of the part, in that order of axes.
    """
    axes = sorted((i for i, n in enumerate(part.shape) if n > 1), key=lambda i: -part.strides[i])
    shape = [part.shape[i] for i in axes]
    strides = [part.strides[i] for i in axes]
    for i, stride in enumerate(strides):
        if stride < _extent(shape[i + 1 :], strides[i + 1 :]):
            raise Unsupported(f"{part.key} has elements in sharded_state_dict() that overlap")
    start = _num_before(first - part.base, shape, strides)
    stop = _num_before(last - part.base, shape, strides)
    for offset, size in flat_range_boxes(shape, start, stop):
        starts, sizes = [0] * len(part.shape), [1] * len(part.shape)
        for i, o, n in zip(axes, offset, size, strict=True):
            starts[i], sizes[i] = o, n
        yield tuple(starts), tuple(sizes)


def _num_before(position: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Count elements of a grid, strides descending, that lie before ``position`` from its first element."""
    count = 0
    for i, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        span = _extent(shape[i + 1 :], strides[i + 1 :])
        whole = min(size, max(0, (position - span) // stride + 1))
        count += whole * math.prod(shape[i + 1 :])
        if whole == size:
            return count
        position -= whole * stride
    return count + (position > 0)
