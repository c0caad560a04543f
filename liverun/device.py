"""Where tensors live, and the layer that lets Megatron train where no CUDA device exists.

Megatron calls ``torch.cuda`` unconditionally. On a machine without a CUDA device, ``install()`` puts plain
CPU counterparts behind those names, so that an unmodified script trains on CPU over gloo:

=========================================  ===============================================================
replaced                                   why, and by what
=========================================  ===============================================================
``current_device, set_device, device, …``  Megatron places every buffer by them: device 0, meaning the CPU
``Stream, Event, stream, synchronize, …``  there is one queue, always drained: no-ops (an Event has a time)
``default_generators, cuda.random``        one device whose generator is the CPU's: dropout draws from
                                           Megatron's RNG tracker exactly as on a GPU
``_initialized, _is_in_bad_fork``          ``_lazy_call`` runs at once, not when a device is first used, and
                                           a fork after a build with CUDA has looked for one is no harm
``memory_allocated, empty_cache, …``       nothing is allocated on a device: 0
``nvtx.*``                                 no profiler to tell: no-ops
``torch.zeros, …``, ``Tensor.new_*``       ``device='cuda'`` or ``0`` means the CPU; no ``pin_memory``
``Tensor.to, cuda, pin_memory, …``         the tensor itself: it is where it should be (a GPU would copy)
``Tensor.type``                            the optimizer sorts parameters by ``torch.cuda.FloatTensor``, …
``moe_utils.te_general_gemm``              megatron-core 0.16 leaves it undefined without Transformer
                                           Engine: ``None``
one log line of the RNG tracker            "CPU RNG state changed" must happen here: dropped, no other is
=========================================  ===============================================================

``torch.cuda.is_available()`` stays false and ``device_count()`` 0: code with a CPU path of its own takes it.
A ``TorchFunctionMode`` sees torch's own functions, not these: compare with ``inspect.unwrap(torch.zeros)``.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

CPU = torch.device("cpu")

_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
    "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_COUNTERS = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "utilization",
    "temperature", "power_draw", "clock_rate",
)  # fmt: skip
_NOTHINGS = (
    "synchronize", "set_device", "set_stream", "empty_cache", "ipc_collect", "reset_peak_memory_stats",
    "reset_max_memory_allocated",
)  # fmt: skip
_RNG_LOGGER = "megatron.core.tensor_parallel.random"
_RNG_MESSAGE = "CPU RNG state changed within GPU RNG context"


def install() -> torch.device:
    """Return the device this process trains on, with the CPU layer behind ``torch.cuda`` if it is the CPU.

    Where a CUDA device exists nothing is changed and CUDA is not initialised. May be called any number of
    times, before or after Megatron is imported; only a call after it adds what Megatron forgot to define.
    """
    if torch.cuda.is_available():
        # a worker keeps its device for life, whatever its rank becomes
        place = int(os.environ.get("LIVERUN_SLOT") or os.environ.get("LOCAL_RANK") or 0)
        return torch.device("cuda", place % torch.cuda.device_count())
    _replace()
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    return CPU


def backend(device: torch.device) -> str:
    """Return the process-group backend for ``device``; with CUDA, CPU tensors still travel over gloo."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


class Stream:
    """A queue that is always drained."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def wait_stream(self, _stream: Any) -> None:
        """Return: everything is done already."""

    def wait_event(self, _event: Any) -> None:
        """Return: everything is done already."""

    def synchronize(self) -> None:
        """Return: everything is done already."""

    def query(self) -> bool:
        """Return: everything is done already."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Mark this moment in ``event``, or in a new one."""
        event = event or Event()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest priority: there is one."""
        return (0, 0)


class Event:
    """A moment in a queue that is always drained."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.recorded_s = 0.0

    def record(self, _stream: Any = None) -> None:
        """Remember now."""
        self.recorded_s = time.perf_counter()

    def wait(self, _stream: Any = None) -> None:
        """Return: it has happened."""

    def synchronize(self) -> None:
        """Return: it has happened."""

    def query(self) -> bool:
        """Return: it has happened."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``, as in torch."""
        return (end.recorded_s - self.recorded_s) * 1000


class _DeviceContext:
    """``with torch.cuda.device(0):`` changes nothing."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0
        self.device = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exc: object) -> None:
        pass


_STREAM = Stream()


@contextmanager
def _stream_context(_stream: Any) -> Iterator[None]:
    yield


@contextmanager
def _nvtx_range(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def _returns(value: Any) -> Callable[..., Any]:
    """Make a function that takes anything and returns ``value``."""
    return lambda *_args, **_kwargs: value


def _means_cuda(device: Any) -> bool:
    """Tell whether ``device`` names a CUDA device in one of the ways torch accepts."""
    if isinstance(device, int):
        return not isinstance(device, bool)
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function with a ``device`` keyword so that every CUDA device means the CPU."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _means_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_cpu


def _same_tensor(tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
    return tensor


def _wrap_to(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def to_on_cpu(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _means_cuda(args[0]):
            args = (CPU, *args[1:])
        elif kwargs and _means_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(tensor, *args, **kwargs)

    return to_on_cpu


def _wrap_type(type_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_)
    def type_as_on_cuda(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return "torch.cuda." + str(type_(tensor)).rpartition(".")[2]
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return type_(tensor, dtype, *args, **kwargs)

    return type_as_on_cuda


def _is_not_rng_warning(record: logging.LogRecord) -> bool:
    return record.msg != _RNG_MESSAGE


@functools.cache  # once in a process, and so once for every process forked from it
def _replace() -> None:
    cuda: Any = torch.cuda
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in _METHODS:
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    tensor.to = _wrap_to(tensor.to)
    tensor.type = _wrap_type(tensor.type)
    tensor.cuda = _same_tensor
    tensor.pin_memory = _same_tensor
    tensor.record_stream = _returns(None)

    for name in _COUNTERS:
        setattr(cuda, name, _returns(0))
    for name in _NOTHINGS:
        setattr(cuda, name, _returns(None))
    cuda.memory_stats = lambda *_args, **_kwargs: {}
    cuda.current_device = _returns(0)
    cuda.get_device_capability = _returns((0, 0))
    cuda.get_device_name = _returns("cpu")
    cuda.is_current_stream_capturing = _returns(False)
    cuda.device = _DeviceContext
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.stream = _stream_context
    cuda.current_stream = _returns(_STREAM)
    cuda.default_stream = _returns(_STREAM)
    cuda.nvtx.range_push = _returns(0)
    cuda.nvtx.range_pop = _returns(0)
    cuda.nvtx.mark = _returns(None)
    cuda.nvtx.range = _nvtx_range

    cuda.random.current_device = _returns(0)
    cuda.random.device_count = _returns(1)
    cuda.default_generators = (torch.default_generator,)
    cuda._initialized = True
    cuda._is_in_bad_fork = _returns(False)
    logging.getLogger(_RNG_LOGGER).addFilter(_is_not_rng_warning)
