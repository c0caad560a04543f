"""Random number streams of a worker: seeding them, and moving them with the role.

Every stream is a one-dimensional ``uint8`` tensor of a size that does not change, so that it is one more box for the
planner: key ``rng/<rank>/<stream>``.
"""

from __future__ import annotations

import importlib
import random
import struct
from typing import Any

import numpy as np
import torch

from liverun import fence

_PYTHON = struct.Struct("<625I?d")  # Mersenne twister words with the index, and the cached gauss
_NUMPY = struct.Struct("<624Iq?d")


class Seeding:
    """A seed asked for while building: applied at once, or kept until the world is activated."""

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self.seed: int | None = None

    def ask(self, seed: int) -> None:
        """Seed now, or remember it."""
        self.seed = seed
        if self._at_once:
            seed_everything(seed)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and, once model parallelism is initialised, Megatron's trackers."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - scripts use the global generator
    torch.manual_seed(seed)
    if fence.has_megatron():
        from megatron.core import parallel_state, tensor_parallel

        if parallel_state.model_parallel_is_initialized():
            tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _tracker_states() -> dict[str, torch.Tensor]:
    if not fence.has_megatron():
        return {}
    tracker: Any = importlib.import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()
    return dict(tracker.get_states()) if tracker.is_initialized() else {}


def capture() -> dict[str, torch.Tensor]:
    """Return every stream's state by name as ``uint8`` CPU tensors; copies, not views."""
    version, words, gauss = random.getstate()
    assert version == 3
    state: Any = np.random.get_state()  # noqa: NPY002
    kind, keys, position, has_gauss, cached = state
    assert kind == "MT19937"
    streams = {
        "python": _bytes_tensor(_PYTHON.pack(*words, gauss is not None, gauss or 0.0)),
        "numpy": _bytes_tensor(_NUMPY.pack(*keys.tolist(), position, bool(has_gauss), cached)),
        "torch": torch.get_rng_state().clone(),
    }
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state().clone()
    for name, state in _tracker_states().items():
        streams[f"megatron/{name}"] = state.clone()
    return streams


def restore(streams: dict[str, torch.Tensor]) -> None:
    """Set every stream to what ``capture`` returned, here or in another process."""
    *words, has_gauss, gauss = _PYTHON.unpack(bytes(streams["python"].numpy()))
    random.setstate((3, tuple(words), gauss if has_gauss else None))
    *keys, position, has_cached, cached = _NUMPY.unpack(bytes(streams["numpy"].numpy()))
    np.random.set_state(  # noqa: NPY002
        ("MT19937", np.array(keys, dtype=np.uint32), position, int(has_cached), cached)
    )
    torch.set_rng_state(streams["torch"])
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state(streams["cuda"])
    trackers = {
        name.removeprefix("megatron/"): state for name, state in streams.items() if name.startswith("megatron/")
    }
    if trackers:
        random_module = importlib.import_module("megatron.core.tensor_parallel.random")
        random_module.get_cuda_rng_tracker().set_states({name: state.clone() for name, state in trackers.items()})


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
