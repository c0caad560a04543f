"""Whether a plan writes every element of a rank's target exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from resharding.boxes import Box, Shape, overlap, subtract
from resharding.plan import Cut, RankPlan
from resharding.ranges import Ints, add_up, measure


class NotCovered(RuntimeError):  # noqa: N818 - reads as what it is
    """A plan leaves elements of the new world unwritten or writes some twice; the message names the tensor."""


def check_coverage(plan: RankPlan, boxes: Sequence[Box]) -> None:
    """Raise ``NotCovered`` unless the copies, receives and fills of ``plan`` tile each of the target's ``boxes``."""
    cuts = [
        *(copy.target for copy in plan.copies),
        *(recv.cut for recv in plan.recvs),
        *(fill.target for fill in plan.fills),
    ]
    width = max((len(box.shape) for box in boxes), default=0) or 1
    for cut in cuts:
        if not 0 <= cut.piece < len(boxes) or len(cut.shape) != len(boxes[cut.piece].shape):
            raise NotCovered(f"the plan writes to piece {cut.piece}, and there are {len(boxes)}")
    pieces: Ints = np.array([cut.piece for cut in cuts], dtype=np.int64)
    written = add_up(
        pieces, measure(pieces, *_columns([(cut.start, cut.shape) for cut in cuts], width)), len(boxes)
    )
    whole = [((0,) * len(box.shape), box.shape) for box in boxes]
    wanted = measure(np.arange(len(boxes)), *_columns(whole, width))
    for piece in np.flatnonzero(written != wanted).tolist():
        fault = _fault(boxes[piece], [cut for cut in cuts if cut.piece == piece])
        raise NotCovered(f"{boxes[piece].key}: {fault}")


def _columns(boxes: Sequence[tuple[Shape, Shape]], width: int) -> tuple[Ints, Ints]:
    offset = np.array([(*o, *(0,) * (width - len(o))) for o, _ in boxes], dtype=np.int64)
    size = np.array([(*n, *(1,) * (width - len(n))) for _, n in boxes], dtype=np.int64)
    return offset.reshape(-1, width), size.reshape(-1, width)


def _fault(box: Box, cuts: Sequence[Cut]) -> str:
    missing = [((0,) * len(box.shape), box.shape)]
    for cut in cuts:
        rest = []
        written = math.prod(cut.shape)
        for part in missing:
            hole = overlap(*part, cut.start, cut.shape)
            if hole is None:
                rest.append(part)
                continue
            written -= math.prod(hole[1])
            rest.extend(subtract(*part, *hole))
        if written:
            return f"the plan writes elements at {_at(box, cut.start)} of shape {cut.shape} twice, or out of the box"
        missing = rest
    return f"the plan does not write the elements at {_at(box, missing[0][0])} of shape {missing[0][1]}"


def _at(box: Box, start: Shape) -> Shape:
    return tuple(o + s for o, s in zip(box.offset, start, strict=True))
