"""Megatron's Mamba model where nothing of its GPU kernels is there: for its shapes, which need none of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


def mamba_model(config: Any, **options: Any) -> Any:
    """Build Megatron's ``MambaModel`` of its own layers: Mamba, attention, MLP. ``options`` are the model's."""
    if importlib.util.find_spec("triton") is None:
        kernels = {name: mock.MagicMock() for name in ("triton", *(f"triton.{part}" for part in _PARTS_OF_TRITON))}
    else:
        kernels = {}
    with mock.patch.dict(sys.modules, kernels):
        from megatron.core.models.mamba import MambaModel
        from megatron.core.ssm import mamba_block, mamba_context_parallel, mamba_layer, mamba_mixer
        from megatron.core.ssm.mlp_layer import MLPLayer

    linear = mamba_mixer.MambaMixerSubmodules(
        in_proj=tensor_parallel.ColumnParallelLinear, out_proj=tensor_parallel.RowParallelLinear
    )
    parts = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm).submodules
    parts.self_attention.submodules.core_attention = IdentityOp  # it has no state
    spec = ModuleSpec(
        module=mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=mamba_layer.MambaLayer,
                submodules=mamba_layer.MambaLayerSubmodules(
                    norm=parts.input_layernorm,
                    mixer=ModuleSpec(module=mamba_mixer.MambaMixer, submodules=linear),
                    mamba_bda=get_bias_dropout_add,
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=parts.input_layernorm, self_attention=parts.self_attention,
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=get_bias_dropout_add
                ),
            ),
        ),
    )  # fmt: skip
    with _without_kernels(mamba_mixer, mamba_context_parallel, mamba_block):
        return MambaModel(config, spec, **options)


_PARTS_OF_TRITON = ("language", "runtime", "runtime.cache")


@contextmanager
def _without_kernels(mixer: Any, context_parallel: Any, block: Any) -> Iterator[None]:
    """Let modules be built that name what only their forward pass calls, and a norm that only has a parameter."""
    with ExitStack() as stack:
        for module, name, value in (
            (mixer, "HAVE_MAMBA_SSM", True), (mixer, "HAVE_EINOPS", True), (context_parallel, "HAVE_EINOPS", True),
            (mixer, "ExtendedRMSNorm", _GatedNorm), (block, "TENorm", WrappedTorchNorm),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class _GatedNorm(torch.nn.Module):  # type: ignore[misc]  # torch is not typed
    """The parameter of the norm that Mamba takes from a package of kernels."""

    def __init__(self, size: int, *, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Say where the parameter lies, as Megatron's ``ExtendedRMSNorm`` does."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(), dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
