"""Which layouts a model can be split into, from the numbers in its configuration alone."""

from __future__ import annotations

from typing import Any


def misfit(
    config: Any,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    vocab_size: int | None = None,
    is_mamba: bool = False,
) -> str | None:
    """Say in one sentence why a model cannot be split so, or ``None`` if it can.

    ``config`` is a Megatron ``TransformerConfig`` or anything with its fields; fields it lacks are not
    checked. The rules are those of megatron-core 0.16 to 0.19, which raises or asserts while it builds the
    model. ``vocab_size`` is the padded size the embedding is built with; leave it out where the script pads
    for every tp anew. ``is_mamba`` is for Mamba and hybrid stacks, whose sizes a configuration has in any case.
    """
    for name, parts in (
        ("num_attention_heads", tp),
        ("ffn_hidden_size", tp),
        ("moe_ffn_hidden_size", etp),
        ("moe_shared_expert_intermediate_size", tp),
        ("num_moe_experts", ep),
        ("linear_num_key_heads", tp),
        ("linear_num_value_heads", tp),
    ):
        value = getattr(config, name, None)
        if value is not None and value % parts:
            return f"{name}={value} cannot be split over {_axis(name)}={parts}; it has to be a multiple"
    heads = getattr(config, "num_attention_heads", None)
    if heads is not None and getattr(config, "cp_comm_type", None) == "a2a" and heads % (tp * cp):
        return f"num_attention_heads={heads} cannot be split over tp={tp},cp={cp} with cp_comm_type=a2a"
    if ep > 1 and getattr(config, "num_moe_experts", None) is None:
        return f"ep={ep} needs experts, and the model has none"
    groups = getattr(config, "num_query_groups", None)
    if groups is not None and groups % tp and tp % groups:
        return f"num_query_groups={groups} is neither a multiple nor a divisor of tp={tp}"
    if getattr(config, "mtp_num_layers", None) and config.hidden_size % tp:
        return f"hidden_size={config.hidden_size} cannot be split over tp={tp}; mtp_num_layers needs a multiple"
    if is_mamba and (reason := _mamba_misfit(config, tp, cp, vpp)) is not None:
        return reason
    if vocab_size is not None and vocab_size % tp:
        return f"vocab_size={vocab_size} cannot be split over tp={tp}; pad it to a multiple"
    return _layers_misfit(config, pp, vpp)


def _axis(name: str) -> str:
    return {"num_moe_experts": "ep", "moe_ffn_hidden_size": "etp"}.get(name, "tp")


def _mamba_misfit(config: Any, tp: int, cp: int, vpp: int) -> str | None:
    """Follow Megatron's ``MambaMixer``, its context parallelism and ``MambaStack``."""
    if vpp > 1:
        return f"vpp={vpp} cannot be had: Megatron's Mamba stacks know no interleaved stages"
    groups, heads = config.mamba_num_groups, config.mamba_num_heads
    name = "mamba_num_heads"
    if heads is None:
        heads, name = 2 * config.hidden_size // config.mamba_head_dim, "2*hidden_size/mamba_head_dim"
    for what, count in ((name, heads), ("mamba_num_groups", groups)):
        if count % tp:
            return f"{what}={count} cannot be split over tp={tp}; it has to be a multiple"
    if heads // tp % cp:
        return f"{name}={heads} cannot be split over tp={tp},cp={cp}; it has to be a multiple of {tp * cp}"
    if groups // tp % cp and cp % (groups // tp):
        return f"mamba_num_groups={groups} over tp={tp} is neither a multiple nor a divisor of cp={cp}"
    return None


def _layers_misfit(config: Any, pp: int, vpp: int) -> str | None:
    """Follow Megatron's ``get_num_layers_to_build``."""
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is not None:
        built_pp = getattr(config, "pipeline_model_parallel_size", pp)
        built_vpp = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
        if (pp, vpp) != (built_pp, built_vpp):
            return (
                f"pipeline_model_parallel_layout is written for pp={built_pp},vpp={built_vpp}, "
                f"not pp={pp},vpp={vpp}"
            )
        return None
    layers = getattr(config, "num_layers", None)
    if layers is None:
        return None
    if pp == 1:
        return None if vpp == 1 else f"vpp={vpp} needs pp of at least 2"
    first = getattr(config, "num_layers_in_first_pipeline_stage", None)
    last = getattr(config, "num_layers_in_last_pipeline_stage", None)
    if first is not None or last is not None:
        between = layers - (first or 0) - (last or 0)
        stages = pp - (first is not None) - (last is not None)
        if between < 0 or (between % stages if stages else between):
            return (
                f"num_layers={layers} with {first or 0} in the first and {last or 0} in the last stage "
                f"leaves {between} layers, which do not spread over {stages} further stages of pp={pp}"
            )
        sizes = {"first": first, "last": last, "middle": between // stages if stages else None}
        for name, size in sizes.items():
            if size is not None and size % vpp:
                return f"the {name} pipeline stage has {size} layers, not a multiple of vpp={vpp}"
        return None
    extra = sum(
        bool(getattr(config, name, False))
        for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    )
    if (layers + extra) % (pp * vpp):
        counted = f" (and {extra} for embedding and loss)" if extra else ""
        return (
            f"num_layers={layers}{counted} cannot be split over pp={pp},vpp={vpp}; "
            f"it has to be a multiple of {pp * vpp}"
        )
    return None
