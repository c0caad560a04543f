"""What a Megatron model and its optimizer hold, as boxes; the one module here that imports Megatron.

Names and places come from Megatron's own ``sharded_state_dict()``, so that every model it can checkpoint
works and no table of parameter names exists here. Where a parameter is kept in parts with places of their own
(the gate and up halves of SwiGLU), the parts are built as views of the parameter, and storage offset and
strides tell which elements they are. The optimizer's tensors are flat ranges of parameters, and follow their
parameters' parts.
"""

from __future__ import annotations

import json
import math
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import megatron.core
import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    param_group_identifier_keys,
)

from resharding.boxes import DTYPE_SIZES_BYTES, Box, Holding, Piece, Shape, flat_range_boxes
from resharding.limits import misfit
from resharding.listing import Block, Tensor


class Unsupported(ValueError):  # noqa: N818 - reads as what it is
    """The model or optimizer keeps state in a way that cannot be moved yet; the message names it."""


GROUP_SETTINGS = (*param_group_identifier_keys, "max_lr", "min_lr", "start_wd", "end_wd")
"""Fields by which parameter groups of two worlds are the same group; they carry no names."""
SCHEDULED_FIELDS = ("lr", "weight_decay")
"""Fields of a parameter group that the scheduler writes."""
FIRST_WITH_SPLIT_EXPERTS = (0, 19)
"""The megatron-core release from which on experts have groups of their own at ep 1 as well, as far as is known."""
ADAM_STATES = ("exp_avg", "exp_avg_sq")


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
    placed = list(_placed(model_chunks))
    pieces = [_weight(part) for part in placed]
    parts_of: dict[int, list[_Part]] = defaultdict(list)
    for part in placed:
        parts_of[id(part.owner)].append(part)
    trainable = {
        id(param): name
        for chunk in model_chunks
        for name, param in chunk.named_parameters()
        if param.requires_grad
    }
    for ident, name in trainable.items():
        if ident not in parts_of:
            raise Unsupported(f"parameter {name} is not in the model's sharded_state_dict()")
    if optimizer is not None:
        for shard in _shards(optimizer):
            if id(shard.param) not in parts_of:
                raise Unsupported(
                    f"the optimizer trains a parameter of shape {tuple(shard.param.shape)} "
                    "that is not in the model's sharded_state_dict()"
                )
        pieces.extend(_optimizer_state(optimizer, parts_of))
    return Holding.of(pieces)


def settle(model_chunks: Sequence[torch.nn.Module]) -> None:
    """Complete every parameter after an optimizer step, where DDP puts that off (``overlap_param_gather``).

    A collective over the data parallel ranks: all members of the old world call it at the boundary, before
    their weights are read. Does nothing where parameters are complete. Training may go on afterwards.
    """
    for chunk in model_chunks:
        config = getattr(chunk, "ddp_config", None)
        if config is not None and getattr(config, "overlap_param_gather", False):
            chunk.disable_forward_pre_hook(param_sync=True)
            chunk.enable_forward_pre_hook()


def gradient_buffers(model_chunks: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield DDP's flat gradient buffers: what a step accumulates into, and nobody needs at a boundary."""
    for chunk in model_chunks:
        for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())):
            yield buffer.grad_data


def misfit_of(model_chunks: Sequence[torch.nn.Module], sizes: Mapping[str, int]) -> str | None:
    """Say in one sentence why this model cannot be split so, or ``None`` if it can.

    ``sizes`` has any of tp, pp, vpp, cp, ep, etp. The vocabulary is not judged: scripts pad it for every tp.
    """
    modules = [_unwrapped(chunk) for chunk in model_chunks]
    config = next((found for module in modules if (found := getattr(module, "config", None)) is not None), None)
    known = {name: sizes[name] for name in ("tp", "pp", "vpp", "cp", "ep", "etp") if name in sizes}
    if config is None:
        return None
    tp, ep, etp = (known.get(name, 1) for name in ("tp", "ep", "etp"))
    release = tuple(int(number) for number in megatron.core.__version__.split(".")[:2])
    if getattr(config, "num_moe_experts", None) and ep == 1 and tp % etp and release < FIRST_WITH_SPLIT_EXPERTS:
        return (
            f"etp={etp} with ep=1 needs tp to be a multiple of {etp}, not {tp}: "
            f"megatron-core {megatron.core.__version__} would average gradients of different parts of an expert"
        )
    return misfit(config, **known, is_mamba=any(hasattr(module, "mamba_stack_spec") for module in modules))


def misfit_of_optimizer(model_chunks: Sequence[torch.nn.Module], optimizer: Any) -> str | None:
    """Say in one sentence why another world could not take over the optimizer's state, or ``None`` if it can.

    Reads no element of a parameter. May be asked while a step runs, in which parameters are one step apart; where
    they stay so, ``common_state`` says it.
    """
    names = {
        id(param): name.removeprefix("module.")
        for chunk in model_chunks
        for name, param in chunk.named_parameters()
    }
    steps: dict[str, float] = {}
    try:
        for shard in _shards(optimizer):
            name = names.get(id(shard.param), f"a parameter of shape {tuple(shard.param.shape)}")
            if not _can_be_made(shard.optimizer, shard.group):
                return (
                    f"what {type(shard.optimizer).__name__} keeps for {name} cannot move; use torch's Adam or AdamW, "
                    "or SGD without momentum"
                )
            state = shard.optimizer.state.get(shard.main(), {})
            if "step" in state:
                steps[name] = _plain(state["step"])
    except Unsupported as reason:
        return str(reason)
    if steps:
        first, last = min(steps, key=lambda name: steps[name]), max(steps, key=lambda name: steps[name])
        if steps[last] - steps[first] > 1:
            return (
                f"{first} is at step {steps[first]:.0f} of the optimizer and {last} at step {steps[last]:.0f}; "
                "state moves only if all parameters have made the same number of steps"
            )
    return None


def group_names(optimizer: Any) -> set[str]:
    """Return the settings by which parameter groups find their state in another world, whatever becomes of experts.

    Groups of experts are told apart from dense ones only in worlds that split experts.
    """
    groups = (group for leaf in leaves(optimizer) for group in leaf.optimizer.param_groups)
    kept = ({name: value for name, value in group.items() if name != "is_expert_parallel"} for group in groups)
    return {_group_name(group) for group in kept}


def let_go(model_chunks: Sequence[torch.nn.Module]) -> None:
    """Make chunks that will not be used again collectable, with all they hold: buffers, groups, optimizer shards.

    A circle runs through C++, where Python's collector cannot see it: optimizer shards are views of parameters, the
    gradient accumulators of those carry DDP's hooks, and the hooks refer to DDP, which knows the optimizer. And
    rotary embeddings cache their results in their class, under themselves. So modules are emptied and such caches
    cleared; whoever still uses a chunk gets an error rather than yesterday's model.
    """
    for chunk in model_chunks:
        modules = list(chunk.modules())
        for param in chunk.parameters():
            vars(param).clear()
        for kind in {base for module in modules for base in type(module).__mro__}:
            for member in vars(kind).values():
                if hasattr(member, "cache_clear"):
                    member.cache_clear()
        for module in modules:
            vars(module).clear()


def materialize_optimizer_state(optimizer: Any, *, empty: bool = False) -> None:
    """Give every parameter of the optimizer the state that torch's Adam or AdamW makes in its first step.

    A freshly built optimizer has none, and so has nowhere to write to. ``step`` is 0 and the moments are
    zero, or uninitialised with ``empty``. State that exists is left as it is. Other optimizers: raises
    ``Unsupported`` unless their state exists or they keep none (plain SGD).
    """
    for leaf in leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            for param in group["params"]:
                if not leaf.optimizer.state.get(param):
                    state = _fresh_state(leaf.optimizer, group, param, empty=empty)
                    if state:
                        leaf.optimizer.state[param] = state


def common_state(optimizer: Any) -> dict[str, Any]:
    """Return what the optimizer keeps besides tensors: step, lr, weight decay per group; the grad scaler.

    The result is JSON. Groups are named by their settings. A rank that holds no range of a group has ``None``
    for its step. Raises ``Unsupported`` for parameters of one group at different steps.
    """
    groups: dict[str, dict[str, Any]] = {}
    scaler: dict[str, Any] = {}
    for leaf in leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            fields = {name: _plain(group[name]) for name in SCHEDULED_FIELDS if name in group}
            fields["step"] = _step_of(leaf.optimizer, group)
            name = _group_name(group)
            groups[name] = _agreed(f"parameter group {name}", [groups.get(name, {}), fields])
        found = getattr(leaf, "grad_scaler", None)
        if found is not None:
            state = {name: _plain(value) for name, value in found.state_dict().items()}
            scaler = _agreed("grad scaler", [scaler, state])
    return {"groups": groups, "grad_scaler": scaler}


def group_settings(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return every field of the parameter groups, by the group's name as in ``common_state``: betas, eps and so on.

    What a live world gets from its own configuration, and a file for others has to say. JSON; the same on all ranks.
    """
    found: dict[str, dict[str, Any]] = {}
    for leaf in leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            fields = {name: _plain(value) for name, value in group.items() if name not in ("params", "step")}
            found[_group_name(group)] = {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in fields.items()
                if isinstance(value, bool | int | float | str | list | tuple | None)
            }
    return found


def merge_common_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine what the ranks of a world have in common; empty states of joiners are fine.

    Raises ``ValueError`` naming the field on which two ranks disagree.
    """
    groups: dict[str, dict[str, Any]] = {}
    scaler: dict[str, Any] = {}
    for state in states:
        for name, fields in state.get("groups", {}).items():
            groups[name] = _agreed(f"parameter group {name}", [groups.get(name, {}), fields])
        scaler = _agreed("grad scaler", [scaler, state.get("grad_scaler", {})])
    return {"groups": groups, "grad_scaler": scaler}


def load_common_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Write a merged ``common_state`` into an optimizer whose tensor state exists.

    Megatron gives experts groups of their own only where ep is above 1; where the one world has them and the other
    has not, they are at what the group with otherwise the same settings is at.

    Raises ``ValueError`` if a group of this optimizer is not in it.
    """
    groups = with_expert_twins(state["groups"])
    for leaf in leaves(optimizer):
        for group in leaf.optimizer.param_groups:
            name = _group_name(group)
            if name not in groups:
                raise ValueError(f"no state for parameter group {name}; there is {list(state['groups'])}")
            fields = groups[name]
            for field in SCHEDULED_FIELDS:
                if field in fields:
                    group[field] = _like(group.get(field), fields[field])
            step = fields.get("step")
            if step is None:
                continue
            if "step" in group:
                group["step"] = _like(group["step"], step)
            for param in group["params"]:
                own = leaf.optimizer.state.get(param, {})
                if "step" in own:
                    own["step"] = _like(own["step"], step)
        scaler = getattr(leaf, "grad_scaler", None)
        if scaler is not None and state["grad_scaler"]:
            now = scaler.state_dict()
            scaler.load_state_dict({name: _like(now[name], state["grad_scaler"][name]) for name in now})


# --- model ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
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


def _placed(model_chunks: Sequence[torch.nn.Module]) -> Iterator[_Part]:
    for chunk in model_chunks:
        module = _unwrapped(chunk)
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


def _failed_check(error: AssertionError) -> str:
    """Say which check of Megatron's failed; many have no words of their own."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = f" ({error})" if str(error) else ""
    return f"fails at '{where.line}' in {where.name}{said}"


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


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
            self._by_storage[_storage(tensor)].append(tensor)

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the owner, or ``None`` for a copy."""
        for owner in self._by_storage.get(_storage(tensor), ()):
            first = owner.storage_offset()
            if first <= tensor.storage_offset() < first + _extent(owner.shape, owner.stride()):
                return owner
        return None


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return elements of storage from the first to the last of a view, both included; 0 for an empty one."""
    if not math.prod(shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _parts_of(name: str, entry: Any, owners: _Owners) -> Iterator[_Part]:
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
            raise Unsupported(
                f"{name} is a {type(entry).__name__} in sharded_state_dict(), not a sharded tensor"
            )


def _is_empty(data: Any) -> bool:
    if data is None:
        return True
    if isinstance(data, torch.Tensor):
        return not data.numel()
    if hasattr(data, "getbuffer"):
        return not bytes(data.getbuffer()[:1])
    return hasattr(data, "__len__") and len(data) == 0


def _parts_of_factory(factory: ShardedTensorFactory, owners: _Owners) -> Iterator[_Part]:
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
        yield from _parts_of_tensor(
            entry, factory.data if probe is not None else entry.data, owners, probe=probe
        )


def _parts_of_tensor(
    entry: ShardedTensor, data: torch.Tensor | None, owners: _Owners, probe: torch.Tensor | None
) -> Iterator[_Part]:
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
    yield _Part(
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


def _weight(part: _Part) -> Piece:
    start = (0,) * len(part.shape)
    return Piece(
        part.box("weight", part.owner.dtype, start, part.shape),
        part.accessor(lambda: part.owner, 0, start, part.shape),
    )


# --- optimizer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shard:
    """Elements ``[first, last)`` of a parameter, in C order, and what the optimizer keeps for them."""

    param: torch.Tensor
    first: int
    last: int
    main: Callable[[], torch.Tensor]
    """the tensor that the inner optimizer trains"""
    has_main: bool
    """whether that tensor has numbers of its own, or is the parameter itself"""
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]


def leaves(optimizer: Any) -> Iterator[Any]:
    """Yield the Megatron optimizers that wrap one torch optimizer each; empty ones are left out.

    Raises ``Unsupported`` for one whose state cannot be moved.
    """
    if isinstance(optimizer, ChainedOptimizer):
        for inner in optimizer.chained_optimizers:
            yield from leaves(inner)
        return
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if type(optimizer) not in (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer):
        raise Unsupported(f"optimizer {type(optimizer).__name__} is not one whose state can be moved yet")
    if not isinstance(optimizer.optimizer, torch.optim.Optimizer) or hasattr(
        optimizer.optimizer, "sub_optimizers"
    ):
        raise Unsupported(
            f"optimizer {type(optimizer.optimizer).__name__} is not one whose state can be moved yet"
        )
    yield optimizer


def _shards(optimizer: Any) -> Iterator[_Shard]:
    for leaf in leaves(optimizer):
        if isinstance(leaf, DistributedOptimizer):
            yield from _shards_of_distributed(leaf)
        elif isinstance(leaf, Float16OptimizerWithFloat16Params):
            yield from _shards_of_float16(leaf)
        else:
            for group in leaf.optimizer.param_groups:
                for param in group["params"]:
                    yield _whole(leaf, group, param, param)


def _whole(leaf: Any, group: dict[str, Any], param: torch.Tensor, main: torch.Tensor) -> _Shard:
    return _Shard(param, 0, param.numel(), lambda: main, main is not param, leaf.optimizer, group)


def _shards_of_float16(leaf: Any) -> Iterator[_Shard]:
    rows = zip(
        leaf.optimizer.param_groups,
        leaf.float16_groups,
        leaf.fp32_from_float16_groups,
        leaf.fp32_from_fp32_groups,
        strict=True,
    )
    for group, float16, main_of_float16, float32 in rows:
        for param, main in zip(float16, main_of_float16, strict=True):
            yield _whole(leaf, group, param, main)
        for param in float32:
            yield _whole(leaf, group, param, param)


def _shards_of_distributed(leaf: Any) -> Iterator[_Shard]:
    if any(
        getattr(leaf.config, name, False)
        for name in ("use_precision_aware_optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8")
    ):
        raise Unsupported("use_precision_aware_optimizer keeps main parameters inside the optimizer")
    rows = zip(leaf.optimizer.param_groups, leaf.model_fp32_groups, leaf.model_float16_groups, strict=True)
    for group, float32, float16 in rows:
        # the optimizer has fp32 parameters first; Megatron's own index map forgets it where a group has both
        for place, param in enumerate([*float32, *float16]):
            held = leaf._get_model_param_range_map(param)["param"]

            def main(group: dict[str, Any] = group, place: int = place) -> torch.Tensor:
                found: torch.Tensor = group["params"][place]
                return found

            if main().numel() != held.end - held.start:
                raise Unsupported(
                    f"the optimizer keeps {main().numel()} elements for a range of {held.end - held.start}"
                )
            has_main = _storage(main()) != _storage(param)
            yield _Shard(param, held.start, held.end, main, has_main, leaf.optimizer, group)


def _optimizer_pieces(part: _Part, shard: _Shard) -> Iterator[list[Piece]]:
    """Yield for each box of a part the pieces of all kinds."""
    if not shard.param.is_contiguous():
        raise Unsupported(f"{part.key} is trained but not contiguous")
    kinds = _kinds(part, shard)
    for start, shape in _boxes_in_range(part, shard.first, shard.last):
        yield [
            Piece(part.box(kind, dtype, start, shape), part.accessor(tensor, shard.first, start, shape))
            for kind, dtype, tensor in kinds
        ]


def _kinds(part: _Part, shard: _Shard) -> list[tuple[str, torch.dtype, Callable[[], torch.Tensor]]]:
    """Return name, type and accessor of everything the optimizer keeps for a shard."""
    kinds: list[tuple[str, torch.dtype, Callable[[], torch.Tensor]]] = []
    if shard.has_main:
        kinds.append(("main", shard.main().dtype, shard.main))
    return kinds + [(name, dtype, _state_accessor(part.key, shard, name)) for name, dtype in _states(shard)]


def _states(shard: _Shard) -> Iterator[tuple[str, torch.dtype]]:
    """Yield name and type of each state with the parameter's shape, also those the first step will make."""
    main = shard.main()
    state = shard.optimizer.state.get(main)
    if state:
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                if value.shape != main.shape:
                    raise Unsupported(
                        f"optimizer state {name} has shape {tuple(value.shape)}, not its parameter's"
                    )
                yield name, value.dtype
    elif isinstance(shard.optimizer, torch.optim.Adam):  # AdamW is one
        for name in _adam_states(shard.group):
            yield name, main.dtype


def _adam_states(group: Mapping[str, Any]) -> tuple[str, ...]:
    return (*ADAM_STATES, "max_exp_avg_sq") if group.get("amsgrad") else ADAM_STATES


def _state_accessor(key: str, shard: _Shard, name: str) -> Callable[[], torch.Tensor]:
    def tensor() -> torch.Tensor:
        main = shard.main()
        state = shard.optimizer.state.get(main)
        if not state or name not in state:
            raise RuntimeError(f"{name}/{key} does not exist yet; call materialize_optimizer_state() first")
        found: torch.Tensor = state[name]
        if not found.is_contiguous():
            raise RuntimeError(f"{name}/{key} is not contiguous")
        return found

    return tensor


def _boxes_in_range(part: _Part, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
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


def _fresh_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor, *, empty: bool
) -> dict[str, torch.Tensor]:
    """Follow ``torch.optim.Adam._init_group``."""
    if not _can_be_made(optimizer, group):
        raise Unsupported(f"{type(optimizer).__name__} has no state yet, and only Adam's can be made ahead")
    if isinstance(optimizer, torch.optim.SGD):
        return {}
    if group.get("capturable") or group.get("fused"):
        step = torch.zeros((), dtype=torch.float32, device=param.device)
    else:
        step = torch.tensor(
            0.0, dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        )
    make = torch.empty_like if empty else torch.zeros_like
    moments = {
        name: make(param.detach(), memory_format=torch.preserve_format) for name in _adam_states(group)
    }
    return {"step": step, **moments}


def _can_be_made(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Tell whether the optimizer's state can be made in a world that has not stepped."""
    plain = isinstance(optimizer, torch.optim.SGD) and not group["momentum"]
    return plain or isinstance(optimizer, torch.optim.Adam)  # AdamW is one


def _optimizer_state(optimizer: Any, parts_of: Mapping[int, Sequence[_Part]]) -> Iterator[Piece]:
    """Yield the pieces of every shard; those of one buffer together, described by how the buffer is cut."""
    buffer_of: dict[int, tuple[Any, Any]] = {}
    for leaf in leaves(optimizer):
        if isinstance(leaf, DistributedOptimizer):
            for buffer in leaf.buffers:
                buffer_of.update({id(param): (leaf, buffer) for param in buffer.params})
    by_buffer: dict[int, dict[int, _Shard]] = defaultdict(dict)
    for shard in _shards(optimizer):
        if id(shard.param) in buffer_of:
            by_buffer[id(buffer_of[id(shard.param)][1])][id(shard.param)] = shard
            continue
        for part in parts_of[id(shard.param)]:
            for pieces in _optimizer_pieces(part, shard):
                yield from pieces
    for leaf, buffer in {id(buffer): (leaf, buffer) for leaf, buffer in buffer_of.values()}.values():
        yield from _buffer_pieces(leaf, buffer, by_buffer[id(buffer)], parts_of)


def _buffer_pieces(
    leaf: Any, buffer: Any, shards: Mapping[int, _Shard], parts_of: Mapping[int, Sequence[_Part]]
) -> Iterator[Piece]:
    """Yield what this rank's ranges of a buffer hold, in the order of a ``Block``: box by box, kinds within.

    The block is what all ranks of the data parallel group have in common. A rank with no range of the buffer
    has no kinds to name, and so no piece and no block.
    """
    order = sorted(buffer.param_index_map.items(), key=lambda entry: entry[1][0])
    kinds: set[tuple[tuple[str, torch.dtype], ...]] = set()
    pieces: list[Piece] = []
    parts: list[_Part] = []
    places: list[tuple[int, int]] = []
    for param, (first, *_, bucket) in order:
        for part in parts_of.get(id(param), ()):
            parts.append(part)
            places.append((bucket, first - buffer.buckets[bucket].offset + part.base))
            shard = shards.get(id(param))
            if shard is not None:
                kinds.add(tuple((kind, dtype) for kind, dtype, _ in _kinds(part, shard)))
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


def _is_dense(part: _Part) -> bool:
    """Tell whether a part is one contiguous stretch of its parameter, in C order."""
    stride = 1
    for size, step in zip(reversed(part.shape), reversed(part.strides), strict=True):
        if size > 1 and step != stride:
            return False
        stride *= size
    return True


# --- common state ---------------------------------------------------------------------------------


def _group_name(group: Mapping[str, Any]) -> str:
    return json.dumps({name: _plain(group[name]) for name in sorted(set(GROUP_SETTINGS)) if name in group})


def with_expert_twins(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return parameter groups under both values of ``is_expert_parallel``; a name that is no JSON has no twin."""
    found = dict(groups)
    for name, fields in groups.items():
        try:
            settings = json.loads(name)
        except ValueError:
            continue
        if isinstance(settings, dict) and "is_expert_parallel" in settings:
            settings["is_expert_parallel"] = not settings["is_expert_parallel"]
            found.setdefault(json.dumps(settings), fields)
    return found


def _step_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float | None:
    states = (optimizer.state.get(param, {}) for param in group["params"])
    steps = {_plain(state["step"]) for state in states if "step" in state}
    if not steps and "step" in group and group["params"]:
        # fused Adam counts per group; with torch's Adam it is what a checkpoint load left there, and stale
        steps.add(_plain(group["step"]))
    if len(steps) > 1:
        raise Unsupported(f"parameters of group {_group_name(group)} are at different steps {sorted(steps)}")
    return steps.pop() if steps else None


def _plain(value: Any) -> Any:
    """Return a number in place of a tensor of one element."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _like(now: Any, value: Any) -> Any:
    """Return ``value`` as what ``now`` is: a tensor of one element, or a plain number."""
    return torch.full_like(now, value) if isinstance(now, torch.Tensor) else value


def _agreed(what: str, sides: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side in sides:
        for name, value in side.items():
            if value is None:
                found.setdefault(name, None)
            elif found.get(name) in (None, value):
                found[name] = value
            else:
                raise ValueError(f"{what}: {name} is {found[name]} on one rank and {value} on another")
    return found
