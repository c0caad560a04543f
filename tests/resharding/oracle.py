"""An independent gather of a job's canonical state, to compare bit for bit before and after a change of world.

It shares nothing with the engine it judges: no ``sharded_state_dict()``, no boxes. It knows Megatron by itself: which
axis tensor parallelism cuts (``partition_dim``), that SwiGLU keeps gate and up halves side by side on every rank, which
layer of the whole model a module is (``layer_number``), which expert of all a local one is, which sections Mamba's
projections have, where each data parallel rank's range of the flat buffers lies (``gbuf_ranges``), and which shard
belongs to which parameter.

Every rank calls ``dump_rank``; then ``merge`` of all files gives ``{canonical name: whole tensor}``. Names are
``weight/…``, ``main/…``, ``exp_avg/…``, ``exp_avg_sq/…`` and ``step/…``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch


def dump_rank(model_chunks: list[Any], optimizer: Any, path: str | Path, ranks: dict[str, int]) -> None:
    """Write this rank's raw parts; ``ranks`` names its place: ``tp``, ``pp``, and for experts ``ep`` and ``etp``."""
    torch.save({"ranks": dict(ranks), "entries": list(_entries(model_chunks, optimizer, ranks))}, path)


def merge(paths: Iterable[str | Path]) -> dict[str, torch.Tensor]:
    """Put the files of all ranks of one world together. Raises ``AssertionError`` for replicas that differ, or gaps."""
    return merge_dumps(torch.load(path, weights_only=True) for path in paths)


def merge_dumps(dumps: Iterable[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """``merge`` of what the files contain."""
    shards: dict[str, dict[tuple[int, int, int], list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for dump in dumps:
        ranks = dump["ranks"]
        for entry in dump["entries"]:
            place = (ranks["ep"], ranks["etp"]) if entry["expert"] else (0, ranks["tp"])
            shards[entry["name"]][ranks["pp"], *place].append(entry)
    return {name: _whole(name, places) for name, places in shards.items()}


def _whole(name: str, places: dict[tuple[int, int, int], list[dict[str, Any]]]) -> torch.Tensor:
    entry = next(iter(places.values()))[0]
    stages: list[torch.Tensor] = []
    for stage in sorted({pp for pp, _, _ in places}):
        groups = sorted({ep for pp, ep, _ in places if pp == stage})
        joined = []
        for group in groups:
            ranks = [_local(name, places[place]) for place in sorted(places) if place[:2] == (stage, group)]
            joined.append(_joined(name, ranks, entry))
        stages.append(torch.cat(joined) if entry["stacked"] else joined[0])
    for other in stages[1:]:  # tied embeddings
        assert torch.equal(stages[0], other), f"{name}: stages hold different numbers"
    return stages[0]


def _local(name: str, entries: list[dict[str, Any]]) -> torch.Tensor:
    """Put the flat ranges of the data parallel ranks together."""
    shape = entries[0]["shape"]
    flat = torch.zeros(shape, dtype=entries[0]["data"].dtype).flatten()
    seen = torch.zeros(flat.shape, dtype=torch.bool)
    for entry in entries:
        here = slice(entry["start"], entry["start"] + entry["data"].numel())
        again = seen[here]
        assert torch.equal(flat[here][again], entry["data"].flatten()[again]), f"{name}: replicas differ"
        flat[here] = entry["data"].flatten()
        seen[here] = True
    assert bool(seen.all()), f"{name}: {int((~seen).sum())} elements are on no rank"
    return flat.view(shape)


def _joined(name: str, ranks: list[torch.Tensor], entry: dict[str, Any]) -> torch.Tensor:
    dim, sections = entry["dim"], entry["sections"]
    if dim < 0:
        for other in ranks[1:]:
            assert torch.equal(ranks[0], other), f"{name}: tensor parallel replicas differ"
        return ranks[0]
    if entry["view"]:
        ranks = [rank.view(entry["view"]) for rank in ranks]
    parts = [rank.split(sections, dim=dim) if sections else [rank] for rank in ranks]
    return torch.cat([part for section in zip(*parts, strict=True) for part in section], dim=dim)


ONE_NUMBER = {"shape": [1], "dim": -1, "sections": [], "view": [], "stacked": False}


def _entries(model_chunks: list[Any], optimizer: Any, ranks: dict[str, int]) -> Iterator[dict[str, Any]]:
    about: dict[int, dict[str, Any]] = {}
    for chunk in model_chunks:
        module = chunk
        while hasattr(module, "module"):
            module = module.module
        numbers = {
            name: child.layer_number - 1 for name, child in module.named_modules() if hasattr(child, "layer_number")
        }
        modules = dict(module.named_modules())
        persistent = module.state_dict().keys()
        buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in persistent]
        for name, param in [*module.named_parameters(), *buffers]:
            owner = modules[name.rpartition(".")[0]]
            about[id(param)] = {
                "param": _canonical(name, numbers, modules, ranks),
                "shape": list(param.shape),
                "expert": ".experts." in name,
                **_cut(name, param, owner, modules, module.config),
            }
            yield _entry("weight", about[id(param)], 0, param)
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        if leaf is not None and getattr(leaf, "optimizer", None) is not None:
            for param, start, trained, is_main in _trained(leaf):
                if is_main:
                    yield _entry("main", about[id(param)], start, trained)
                for kind, value in leaf.optimizer.state[trained].items():
                    if kind == "step":
                        yield _entry("step", {**about[id(param)], **ONE_NUMBER}, 0, value)
                    else:
                        yield _entry(kind, about[id(param)], start, value)


def _cut(name: str, param: Any, owner: Any, modules: dict[str, Any], config: Any) -> dict[str, Any]:
    """How tensor parallelism cuts a parameter: the axis, and sections along it that are cut one by one."""
    cut = bool(getattr(param, "tensor_model_parallel", False))
    found: dict[str, Any] = {
        "dim": int(getattr(param, "partition_dim", 0)) if cut else -1, "sections": [], "view": [], "stacked": False,
    }  # fmt: skip
    gated = bool(config.gated_linear_unit)
    mixer = next((modules[at] for at in _above(name) if hasattr(modules[at], "d_inner_local_tp")), None)
    if mixer is not None and not name.endswith("out_proj.weight") and cut:
        inner, state = mixer.d_inner_local_tp, mixer.ngroups_local_tp * mixer.d_state
        found["dim"] = 0
        if "in_proj" in name:
            found["sections"] = [inner, inner, state, state, mixer.nheads_local_tp]
        elif "conv1d" in name:
            found["sections"] = [inner, state, state]
    elif name.endswith((".weight1", ".weight2")):  # experts of a rank side by side
        first = name.endswith("1")
        size = param.numel() // owner.num_local_experts // config.hidden_size
        found |= {
            "dim": 2 if first else 1, "stacked": True, "sections": [size // 2] * 2 if first and gated else [],
            "view": [owner.num_local_experts, *((config.hidden_size, size) if first else (size, config.hidden_size))],
        }  # fmt: skip
    elif "linear_fc1" in name and gated and cut:
        found["sections"] = [param.shape[0] // 2] * 2
    return found


def _above(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _entry(kind: str, about: dict[str, Any], start: int, value: torch.Tensor) -> dict[str, Any]:
    data = value.detach().cpu().clone().reshape(-1)
    return {"name": f"{kind}/{about['param']}", "start": start, "data": data, **about}


def _canonical(name: str, numbers: dict[str, int], modules: dict[str, Any], ranks: dict[str, int]) -> str:
    if name == "output_layer.weight" and getattr(modules[""], "share_embeddings_and_output_weights", False):
        return "embedding.word_embeddings.weight"
    match = re.match(r"(.*\.experts)\.local_experts\.(\d+)(\..*)", name)
    if match is not None:
        number = ranks["ep"] * modules[match[1]].num_local_experts + int(match[2])
        name = f"{match[1]}.{number}{match[3]}"
    match = re.match(r"((?:.*\.)?layers\.)\d+(\..*)", name)
    if match is None:
        return name
    layer = name[: len(name) - len(match[2])]
    return f"{match[1]}{numbers[layer]}{match[2]}"


def _trained(leaf: Any) -> Iterator[tuple[Any, int, Any, bool]]:
    """Yield (model parameter, first element, tensor the inner optimizer trains, whether it is an fp32 copy)."""
    if hasattr(leaf, "gbuf_ranges"):
        starts: dict[int, int] = {}
        for buffer, by_dtype in zip(leaf.buffers, leaf.gbuf_ranges, strict=True):
            for buckets in by_dtype.values():
                for bucket in buckets:
                    for param, ranges in bucket["param_map"].items():
                        starts[id(param)] = ranges["gbuf_world"].start - buffer.param_index_map[param][0]
        for models, shards, is_main in (
            (leaf.model_float16_groups, leaf.shard_fp32_from_float16_groups, True),
            (leaf.model_fp32_groups, leaf.shard_fp32_groups, False),
        ):
            for group, shard_group in zip(models, shards, strict=True):
                for param, shard in zip(group, shard_group, strict=True):
                    yield param, starts[id(param)], shard, is_main
        return
    if hasattr(leaf, "float16_groups"):
        for group, mains in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
            for param, main in zip(group, mains, strict=True):
                yield param, 0, main, True
        for group in leaf.fp32_from_fp32_groups:
            for param in group:
                yield param, 0, param, False
        return
    for group in leaf.optimizer.param_groups:
        for param in group["params"]:
            yield param, 0, param, False
