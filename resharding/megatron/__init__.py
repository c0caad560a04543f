"""What a Megatron model and its optimizer hold, as boxes; the one package here that imports Megatron.

Names and places come from Megatron's own ``sharded_state_dict()``, so that every model it can checkpoint
works and no table of parameter names exists here. Where a parameter is kept in parts with places of their own
(the gate and up halves of SwiGLU), the parts are built as views of the parameter, and storage offset and
strides tell which elements they are. The optimizer's tensors are flat ranges of parameters, and follow their
parameters' parts.
"""

from resharding.megatron.common import (
    GROUP_SETTINGS,
    SCHEDULED_FIELDS,
    common_state,
    group_name,
    group_names,
    group_settings,
    load_common_state,
    merge_common_state,
    with_expert_twins,
)
from resharding.megatron.fit import misfit_of, misfit_of_optimizer
from resharding.megatron.holding import holding_of
from resharding.megatron.model import gradient_buffers, let_go, settle
from resharding.megatron.parts import Part, Unsupported, boxes_in_range, placed_parts, unwrapped
from resharding.megatron.shards import ADAM_STATES, leaves, materialize_optimizer_state

__all__ = [
    "ADAM_STATES",
    "GROUP_SETTINGS",
    "SCHEDULED_FIELDS",
    "Part",
    "Unsupported",
    "boxes_in_range",
    "common_state",
    "gradient_buffers",
    "group_name",
    "group_names",
    "group_settings",
    "holding_of",
    "leaves",
    "let_go",
    "load_common_state",
    "materialize_optimizer_state",
    "merge_common_state",
    "misfit_of",
    "misfit_of_optimizer",
    "placed_parts",
    "settle",
    "unwrapped",
    "with_expert_twins",
]
