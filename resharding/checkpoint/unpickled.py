"""Reading others' pickles without running them: only plain values, tensors, and a few classes that are known.

Megatron's and DeepSpeed's checkpoints are pickles, and a pickle may name any function to be called. Here every name
that is not known stands for an object that remembers nothing.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch

from resharding.checkpoint.format import BadCheckpoint


def _rebuilt(function: Any, _kind: Any, args: Any, _state: Any) -> Any:
    """Follow ``torch._tensor._rebuild_from_type_v2``, without the class and the attributes it would restore."""
    return function(*args)


_TORCH_MODULES = ("torch", "torch._utils", "torch.storage", "torch.serialization", "torch.nn.parameter")
_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("builtins", "set"): set,
    ("builtins", "slice"): slice,
    ("builtins", "complex"): complex,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "tuple"): tuple,
    ("argparse", "Namespace"): argparse.Namespace,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuilt,
    ("torch", "Tensor"): torch.Tensor,
}
_TORCH_NAMES = {
    "_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_parameter", "_rebuild_parameter_with_state", "Size", "device",
    "UntypedStorage", "TypedStorage",
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
    "FloatStorage", "HalfStorage", "BFloat16Storage", "DoubleStorage", "LongStorage", "IntStorage", "ShortStorage",
    "CharStorage", "ByteStorage", "BoolStorage", "Parameter", "_get_layout", "contiguous_format", "strided",
}  # fmt: skip


class Opaque:
    """Stands for an object of a class that is not known."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Make one of anything."""
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __setstate__(self, _state: Any) -> None: ...

    def __setitem__(self, _key: Any, _value: Any) -> None: ...

    def append(self, _value: Any) -> None:
        """Take part in being unpickled."""

    def extend(self, _values: Any) -> None:
        """Take part in being unpickled."""


class Unpickler(pickle.Unpickler):
    """Knows plain values and tensors, and makes ``Opaque`` of everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function that is known to be harmless."""
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module in _TORCH_MODULES and name in _TORCH_NAMES:
            return super().find_class(module, name)
        if module == _METADATA or (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        return Opaque


_module = ModuleType("restricted_pickle")
vars(_module).update(
    Unpickler=Unpickler, load=lambda file, **_: Unpickler(file).load(), loads=lambda data, **_: _loads(data)
)


def _loads(data: bytes) -> Any:
    return Unpickler(io.BytesIO(data)).load()


def read_pickle(path: Path) -> Any:
    """Read a plain pickle. Raises ``BadCheckpoint``."""
    try:
        return _loads(path.read_bytes())
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}") from None


def load_torch(file: Any, name: str, *, mapped: bool = False) -> Any:
    """Read what ``torch.save`` wrote, from a path or file, onto the CPU. ``mapped``: numbers are read when used.

    Raises ``BadCheckpoint``.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=False, pickle_module=_module, mmap=mapped or None)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, TypeError, KeyError) as error:
        raise BadCheckpoint(f"{name} cannot be read: {str(error).splitlines()[0]}") from None
