"""Optimizer state that moves after the commit, while the new world computes its first gradients.

Only weights are needed to run forward and backward; moments and fp32 main parameters are not read or written before
the optimizer steps. With ``--defer optimizer``:

1. PREPARING builds a second bridge and a plan of its own for the optimizer's state.
2. The switch moves, checks and votes on everything else, and that vote is the commit.
3. From then on every member, leavers included, streams the optimizer's state over the second bridge in a thread of
   its own, digests and all, and votes once more, on that.
4. Whoever uses the optimizer waits until that vote: its methods do on the first call, a hook of the script after the
   change, and the next change. The old world's state is kept until then.
5. A unanimous yes: methods are what they were. Anything else, a member that died included: no rank steps, each ends
   and says why. Weights of one world and moments of another are never trained with.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from liverun import fence, groups
from liverun.changes import Choice
from liverun.reasons import in_short
from resharding import boxes, megatron, stream
from resharding.plan import RankPlan
from resharding.transport import ProcessGroupTransport

GUARDED = (
    "step", "step_with_ready_grads", "prepare_grads", "state_dict", "load_state_dict", "sharded_state_dict",
    "sharded_param_state_fully_reshardable", "sharded_param_state_dp_zero", "get_parameter_state_dp_zero",
    "get_parameter_state_fs_bucket_space", "get_parameter_state_dp_reshardable", "save_parameter_state",
    "load_parameter_state", "reload_model_params", "get_main_params_for_param",
)  # fmt: skip
"""methods of Megatron's and torch's optimizers that read or write its state"""


class NotWhole(RuntimeError):  # noqa: N818 - reads as what it is
    """The optimizer's state did not arrive; the message says why."""


def split(holding: boxes.Holding) -> tuple[boxes.Holding, boxes.Holding]:
    """Return what the first forward needs, and the optimizer's state."""
    early: list[boxes.Piece] = []
    late: list[boxes.Piece] = []
    for piece in holding.pieces:
        (early if piece.box.key.startswith(("weight/", "rng/")) else late).append(piece)
    return boxes.Holding.of(early), boxes.Holding.of(late)


@dataclass(kw_only=True)
class LateState:
    """One member's part in it. Made in PREPARING, started at the commit."""

    bridge: fence.Globals
    plan: RankPlan
    source: boxes.Holding
    target: boxes.Holding
    choice: Choice
    device: torch.device
    generation: int

    def __post_init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._guarded: list[tuple[Any, str]] = []
        self._failure = ""

    def give_up(self) -> None:
        """Close the second bridge, so that nobody waits for this member any longer."""
        fence.destroy(self.bridge.groups)
        self.bridge.default_pg = None

    def start(self, optimizer: Any, on_failure: Callable[[NotWhole], object]) -> None:
        """Begin to stream; ``optimizer``, if this member has one, waits when it is used. Does not block.

        ``on_failure`` is called in the thread that has waited in vain; if it returns, ``NotWhole`` is raised there.
        """
        for part in _parts(optimizer):
            for name in GUARDED:
                if hasattr(part, name):
                    setattr(part, name, self._guard(getattr(part, name), on_failure))
                    self._guarded.append((part, name))
        self._thread = threading.Thread(target=self._run, name=f"liverun-late-{self.generation}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until nothing of it runs any more, whatever came of it, and close the second bridge."""
        self._join()
        # nobody closes the bridge while somebody still reads its vote
        if self.bridge.default_pg is not None:
            with contextlib.suppress(RuntimeError):
                self.bridge.default_pg.barrier().wait()
        self.give_up()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until the state is whole on every member. Raises ``NotWhole``, also when called again."""
        self._join()
        if self._failure:
            raise NotWhole(self._failure)
        for part, name in self._guarded:
            vars(part).pop(name, None)
        self._guarded.clear()

    def _guard(self, method: Callable[..., Any], on_failure: Callable[[NotWhole], object]) -> Callable[..., Any]:
        @functools.wraps(method)
        def waits(*args: Any, **kwargs: Any) -> Any:
            try:
                self.wait()
            except NotWhole as failure:
                on_failure(failure)
                raise
            return method(*args, **kwargs)

        return waits

    def _run(self) -> None:
        try:
            group = self.bridge.default_pg
            stream.execute(
                self.plan, self.source, self.target, ProcessGroupTransport(group, self.device),
                self.choice.staging_bytes, verify=self.choice.verify,
            )  # fmt: skip
            if not groups.vote(group, yes=True, device=self.device):
                self._failure = "another member voted no"
        except Exception as error:  # noqa: BLE001 - whatever failed, nobody may step
            self._failure = in_short(error)
            self.give_up()  # without it there can be no unanimous yes, and nobody waits
        self.source = self.target = boxes.Holding.of([])  # or the old world would live as long as this


def _parts(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, those it is a chain of, and torch's in them."""
    if optimizer is not None:
        yield optimizer
        for leaf in megatron.leaves(optimizer):
            if leaf is not optimizer:
                yield leaf
            yield leaf.optimizer
