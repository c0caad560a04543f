"""Build a whole model, DDP and optimizer stack without touching its memory or anybody's random numbers.

The next world's stack is built beside the running one. Its values arrive by stream, so what the constructors write
is wasted work and, worse, wasted memory: pages that are never written cost nothing. Under ``Hollow`` large tensors
come out of their factories unwritten, large copies and fills are dropped, and nothing draws from a generator.
Small tensors (below ``SMALL`` elements) are real: position tables, scalars, counters.

A mode is local to its thread, as torch's function modes are; the training thread notices nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

SMALL = 1024
"""elements; a tensor below this is built as usual"""

_FACTORIES = frozenset({"zeros", "ones", "full", "randn", "rand", "normal", "randint", "randperm"})
_FACTORIES_LIKE = frozenset({"zeros_like", "ones_like", "full_like", "randn_like", "rand_like", "randint_like"})
_NEW_METHODS = frozenset({"new_zeros", "new_ones", "new_full"})
_RANDOM = frozenset({"randn", "rand", "normal", "randint", "randperm", "randn_like", "rand_like", "randint_like"})
_FILLS = frozenset({"copy_", "zero_", "fill_", "constant_"})
_RANDOM_FILLS = frozenset(
    {"normal_", "uniform_", "trunc_normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
     "geometric_", "kaiming_uniform_", "kaiming_normal_", "_no_grad_normal_", "_no_grad_uniform_",
     "_no_grad_trunc_normal_"}
)
_COPIES = frozenset({"clone", "float", "half", "bfloat16", "double", "to", "type", "contiguous"})


class HollowBufferError(RuntimeError):
    """A module buffer was built hollow, and no stream will fill it."""


class Hollow(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed
    """Function mode under which a stack is built hollow. See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        _install()
        self._hollow_storages: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _FACTORIES or name in _FACTORIES_LIKE or name in _NEW_METHODS:
            return self._make(func, name, args, kwargs)
        if name in _RANDOM_FILLS or name in _FILLS:
            target = args[0] if args else kwargs["tensor"]
            if name in _RANDOM_FILLS or _is_large(target):
                return self._fill(name, target)
        if name in _COPIES and isinstance(args[0], torch.Tensor) and _is_large(args[0]):
            return self._copy(func, args, kwargs)
        return func(*args, **kwargs)

    def _make(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape_of = {**kwargs, "device": "meta"}
        shape_of.pop("generator", None)
        device = kwargs.get("device")
        of = args
        if name in _FACTORIES_LIKE or name in _NEW_METHODS:
            device = args[0].device if device is None else device
            of = (args[0].detach().to("meta"), *args[1:])
        shape = func(*of, **shape_of)
        if shape.numel() < SMALL and name not in _RANDOM:
            return func(*args, **kwargs)
        made = torch.empty(shape.shape, dtype=shape.dtype, device=device, requires_grad=shape.requires_grad)
        if made.numel() < SMALL:
            with torch.no_grad():
                made.zero_()
        else:
            self._remember(made)
        return made

    def _fill(self, name: str, target: torch.Tensor) -> torch.Tensor:
        if name in _RANDOM_FILLS and not _is_large(target):
            with torch.no_grad():
                target.zero_()
        return target

    def _copy(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        shape = func(source.detach().to("meta"), *_onto_meta(args[1:]), **_onto_meta_kwargs(kwargs))
        if not isinstance(shape, torch.Tensor):
            return func(*args, **kwargs)  # Tensor.type() without a dtype answers with a name
        is_copy = func.__name__ == "clone" or shape.dtype != source.dtype or kwargs.get("copy", False)
        if not is_copy and func.__name__ == "contiguous":
            is_copy = not source.is_contiguous()
        if not is_copy:
            return func(*args, **kwargs)
        if source.requires_grad and torch.is_grad_enabled():
            # a copy inside autograd's sight keeps being one: hooks are hung on such graphs
            return func(*args, **kwargs)
        made = torch.empty_like(source, dtype=shape.dtype)
        self._remember(made)
        return made

    def _remember(self, made: torch.Tensor) -> None:
        self._hollow_storages.add(made.untyped_storage().data_ptr())

    def check_buffers(self, modules: Iterable[nn.Module], filled: Iterable[torch.Tensor]) -> None:
        """Raise ``HollowBufferError`` naming a module buffer that is hollow and is not among ``filled``."""
        pointers = {tensor.untyped_storage().data_ptr() for tensor in filled}
        for module in modules:
            for name, buffer in module.named_buffers():
                pointer = buffer.untyped_storage().data_ptr()
                if buffer.numel() and pointer in self._hollow_storages and pointer not in pointers:
                    raise HollowBufferError(
                        f"buffer {name} of shape {tuple(buffer.shape)} holds constants that are not part of the "
                        f"model's state and could not be carried over; register it as persistent"
                    )


@functools.cache
def _install() -> None:
    """Let ``trunc_normal_`` draw nothing either: it draws until all is in range, which what nobody fills never is."""
    draw = nn.init._no_grad_trunc_normal_

    @functools.wraps(draw)
    def unless_hollow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for mode in _get_current_function_mode_stack():  # of this thread
            if isinstance(mode, Hollow):
                return mode._fill(draw.__name__, tensor)
        return draw(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = unless_hollow


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() >= SMALL


def _onto_meta(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.device("meta") if _is_device(arg) else arg for arg in args)


def _onto_meta_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.device("meta") if name == "device" else value for name, value in kwargs.items()}


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (
        isinstance(value, str) and value.split(":")[0] in {"cpu", "cuda", "meta"}
    )
