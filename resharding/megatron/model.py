"""What a change of world asks of a model besides its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


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
