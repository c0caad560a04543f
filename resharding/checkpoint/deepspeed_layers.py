"""Weights that DeepSpeed keeps in files of their own: a file for each layer of a pipeline, and for each expert.

::

    layer_03-model_states.pt                    a pipeline's layer 3; layer_03-model_00-… with tensor parallel ranks
    layer_0_expert_5_mp_rank_00_model_states.pt expert 5 of the first layer that has experts
    mp_rank_01_model_states.pt                  names of parameters: of stage 1 // tp, tensor parallel rank 1 % tp

A layer's file has names within the layer, and parameters are called ``3.weight`` elsewhere; of layers that stages
share (``TiedLayerSpec``) they are called ``tied_modules.KEY.weight``, and no file says which layer that is: the one
whose numbers are the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from resharding.checkpoint.format import BadCheckpoint
from resharding.checkpoint.unpickled import load_torch

_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.*)")
Named = dict[str, torch.Tensor]
Readers = Mapping[str, Callable[[], torch.Tensor]]
"""of trained parameters: what reads main values"""


def tensor_parallel_size(model: Mapping[str, Any], folder: Path) -> int:
    """Return how many tensor parallel ranks a stage has; a number of no effect where there is one stage."""
    said = model.get("checkpoint_parallel_dimensions")
    if isinstance(said, Mapping) and isinstance(size := said.get("tp_degree"), int) and size > 0:
        return size
    layers = [_LAYER.fullmatch(path.name) for path in folder.glob("layer_*-model_states.pt")]
    return len({match[2] for match in layers if match}) or 2**31


def layer_weights(folder: Path, tensor_rank: int) -> Named:
    """Return what is in the layers' files of a tensor parallel rank, as ``LAYER.name``. Raises ``BadCheckpoint``."""
    found: Named = {}
    for path in sorted(folder.glob("layer_*-model_states.pt")):
        match = _LAYER.fullmatch(path.name)
        if match is not None and int(match[2] or 0) == tensor_rank:
            found.update(
                {f"{int(match[1])}.{name}": value for name, value in load_torch(path, str(path), mapped=True).items()}
            )
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def expert_weights(folder: Path, model_rank: int) -> Named:
    """Return what is in the experts' files of a model parallel rank. Raises ``BadCheckpoint``."""
    found: Named = {}
    for path in sorted(folder.glob(f"layer_*_expert_*_mp_rank_{model_rank:02d}_model_states.pt")):
        found.update(load_torch(path, str(path), mapped=True))
    return found


def is_expert(name: str) -> bool:
    """Tell whether a parameter belongs to one expert."""
    return _EXPERT.fullmatch(name) is not None


def expert_names(name: str, named: Iterable[str], peers: int, where: str) -> list[str]:
    """Return what a parameter that rank 0 has is called on each of the ``peers`` that experts are spread over.

    A rank counts its own experts from 0, and has as many as the others. Raises ``BadCheckpoint``.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        raise BadCheckpoint(f"{where} has {name} on {peers} expert parallel ranks, and it is none of DeepSpeed's MoE")
    matches = [_EXPERT.fullmatch(other) for other in named]
    local = {each[2] for each in matches if each is not None and each[1] == match[1]}
    return [f"{match[1]}{peer * len(local) + int(match[2])}{match[3]}" for peer in range(peers)]


def name_tied_layers(weights: Named, readers: Readers) -> None:
    """Rename, among ``weights`` of layers, those of a layer that stages share to what ``readers`` call it."""
    tied: dict[str, dict[str, str]] = defaultdict(dict)
    for name in readers:
        if match := _TIED.fullmatch(name):
            tied[match[1]][match[2]] = name
    layers: dict[str, list[str]] = defaultdict(list)
    for name in weights:
        layers[name.partition(".")[0]].append(name)
    for key, inner in tied.items():
        layer = next((layer for layer in layers if _is_same(layer, inner, weights, readers)), None)
        for name in layers.pop(layer, []) if layer is not None else []:
            weights[f"tied_modules.{key}.{name.partition('.')[2]}"] = weights.pop(name)


def _is_same(layer: str, inner: Mapping[str, str], weights: Named, readers: Readers) -> bool:
    for name, full in inner.items():
        weight = weights.get(f"{layer}.{name}")
        if weight is None:
            return False
        main = readers[full]()
        if main.shape != weight.shape or not torch.equal(main.to(weight.dtype), weight):
            return False
    return True
