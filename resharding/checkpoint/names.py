r"""Another framework's names as Megatron's: what a specification (``--patterns``) says besides patterns.

::

    {"rename": [
        {"match": "model.embed_tokens.weight", "to": "embedding.word_embeddings.weight"},
        {"match": "model.layers.(\\d+).self_attn.([qkv])_proj.weight",
         "to": "decoder.layers.\\1.self_attention.linear_qkv.\\2.weight"}
     ],
     "groups": [{"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": false}, ...]}

``rename``  regular expressions of whole names, and what a name becomes; the first that matches counts, and a name
            that none matches stays. Patterns go by the names before.
``groups``  of each parameter group, in order, the settings by which Megatron knows it: a job that does not find its
            own says which it asks for.

A part of a fused tensor is named as it lies in a checkpoint of ours (``linear_qkv.q.weight``,
``linear_fc1.up.weight``); parts that make up a tensor of Megatron's are put together. Needs no Megatron.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from resharding.checkpoint.convert import Source
from resharding.checkpoint.format import BadCheckpoint, Meta, tensors_of
from resharding.checkpoint.fused import Fused
from resharding.checkpoint.megatron_dist import PADDED, fused_by_config
from resharding.checkpoint.parts import Part
from resharding.listing import Tensor

_PART = re.compile(r"(.*\.linear_qkv|.*\.linear_fc1)\.(q|k|v|gate|up)\.(weight|bias)")


class Renamed:
    """A source under Megatron's names."""

    def __init__(
        self, source: Source, *, spec: Mapping[str, Any], model: Mapping[str, Any], nbytes: int
    ) -> None:
        """``model`` has fields of the configuration, to put q, k and v together. Raises ``BadCheckpoint``."""
        self._source = source
        self.nbytes = nbytes
        self.mark = source.mark
        """the specification is in it"""
        rules = _rules(spec.get("rename", []))
        self._theirs = {_renamed(tensor.key, rules): tensor.key for tensor in source.tensors}
        if len(self._theirs) < len(source.tensors):
            named = [_renamed(tensor.key, rules) for tensor in source.tensors]
            clash = next(key for key in named if named.count(key) > 1)
            raise BadCheckpoint(f"two tensors would be called {clash}; correct 'rename' in --patterns")
        tensors = [
            replace(tensor, key=key, padded=tensor.padded or key.partition("/")[2] in PADDED)
            for tensor in source.tensors
            for key in [_renamed(tensor.key, rules)]
        ]
        self._parts: dict[str, list[str]] = {}
        """of a tensor that is put together: keys of its parts, as we call them"""
        self.tensors: Sequence[Tensor] = self._put_together(tensors)
        is_gated = any(".linear_fc1" in key for key in self._parts)
        config = {**model, "gated_linear_unit": is_gated or bool(model.get("gated_linear_unit"))}
        self.fused: Mapping[str, Fused] = fused_by_config(self.tensors, config)
        self._check_parts({tensor.key: tensor for tensor in tensors})
        self.meta = _regrouped(source.meta, spec.get("groups"), rules)

    def _put_together(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as Megatron has them, in which parts lie."""
        found: dict[str, Tensor] = {}
        for tensor in tensors:
            match = _PART.fullmatch(tensor.key)
            if match is None:
                found[tensor.key] = tensor
                continue
            key = f"{match[1]}.{match[3]}"
            self._parts.setdefault(key, []).append(tensor.key)
            rows, *others = tensor.global_shape
            rows += found[key].global_shape[0] if key in found else 0
            found[key] = replace(tensor, key=key, global_shape=(rows, *others))
        return list(found.values())

    def _check_parts(self, named: Mapping[str, Tensor]) -> None:
        """Raise ``BadCheckpoint`` where parts do not make up their tensor."""
        by_key = {tensor.key: tensor for tensor in self.tensors}
        for key, parts in self._parts.items():
            try:
                wanted = {(row[0], row[2]) for row in tensors_of([by_key[key]], self.fused)}
            except ValueError:
                wanted = set()
            if wanted != {(part, named[part].global_shape) for part in parts}:
                raise BadCheckpoint(
                    f"{', '.join(parts)} do not make up {key}; pass num_attention_heads, num_query_groups and "
                    "hidden_size or kv_channels with --model-config, and name all parts"
                )

    def parts(self, key: str) -> Iterator[Part]:
        """Yield a tensor's numbers, those of each part under the part's own key. Raises ``BadCheckpoint``."""
        for ours in self._parts.get(key, [key]):
            for part in self._source.parts(self._theirs[ours]):
                yield replace(part, key=ours)

    def complaint(self) -> str | None:
        """Say in one sentence why what was read must not be used, or ``None``."""
        return self._source.complaint()


def _rules(rows: Any) -> list[tuple[re.Pattern[str], str]]:
    found = []
    for row in rows:
        try:
            rule = re.compile(row["match"]), str(row["to"])
            rule[0].sub(rule[1], "")
        except (KeyError, TypeError, IndexError, re.error):
            raise BadCheckpoint(f"'rename' rule {row!r} is none; it needs 'match', and a template 'to'") from None
        found.append(rule)
    return found


def _renamed(key: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    kind, slash, name = key.partition("/")
    for match, template in rules:
        if (found := match.fullmatch(name)) is not None:
            return f"{kind}{slash}{found.expand(template)}"
    return key


def _regrouped(meta: Meta, groups: Any, rules: Sequence[tuple[re.Pattern[str], str]]) -> Meta:
    """Return what a source says of itself with its parameter groups under the names that Megatron's have."""
    settings = {
        label: {
            **fields, "parameters": [_renamed(f"/{name}", rules)[1:] for name in fields.get("parameters", [])],
        }
        for label, fields in meta.optimizer.get("settings", {}).items()
    }  # fmt: skip
    said = meta.optimizer["groups"]
    if groups is None:
        return replace(meta, optimizer={**meta.optimizer, "settings": settings})
    if not isinstance(groups, list) or len(groups) != len(said) or not all(isinstance(row, dict) for row in groups):
        raise BadCheckpoint(f"'groups' in --patterns has to be a list of {len(said)} objects, one for each group")
    found: dict[str, Any] = {}
    described: dict[str, Any] = {}
    for (label, fields), row in zip(said.items(), groups, strict=True):
        name = json.dumps({key: row[key] for key in sorted(row)})
        if found.setdefault(name, fields) != fields:
            raise BadCheckpoint(f"{label} has {fields}, and another of the same settings in 'groups' {found[name]}")
        described.setdefault(name, {**settings.get(label, {}), **row})
    return replace(meta, optimizer={**meta.optimizer, "groups": found, "settings": described})
