"""What a change of world is refused for before anything is prepared, and before anything moves."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "resharding"))
import bed
from bed import Model, Split

from liverun.layout import Layout
from liverun.limits import Limits
from liverun.prepare import check_names, names_of
from liverun.small_state import to_json
from liverun.world import Training


class Part:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture(scope="module")
def experts() -> Training:
    with bed.rank_of(Split(), 0):
        chunks, optimizer = bed.build(Model(layers=2, experts=4, expert_ffn=25), Split())
        return Training(model=chunks, optimizer=optimizer)


def refusal(training: Training, layout: Layout, **changes: Any) -> str | None:
    asked = Training(**{**vars(training), **changes})
    return Limits().refusal(layout, layout.model_size * layout.ep * layout.etp, SimpleNamespace(training=asked))


def test_experts_are_split_over_tp_where_neither_of_their_axes_is_named(experts: Training) -> None:
    assert "moe_ffn_hidden_size=25 cannot be split over etp=2" in str(refusal(experts, Layout(tp=2)))
    assert refusal(experts, Layout(tp=2, ep=2)) is None


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"lr": 0.5, "ids": [1, (2, None)], "mask": torch.zeros(2), "deep": {"name": "x"}}, None),
        ({"seen": {3}}, "['seen'] is a set and cannot move; use numbers"),
        ({"deep": [{"a": 1}, {"a": b"x"}]}, "['deep'][1]['a'] is a bytes and cannot move"),
        ({"by rank": {0: 1}}, "['by rank'] has 0 as a key and cannot move; use text"),
        (RuntimeError("in the middle of a step"), None),
    ],
)
def test_small_state_that_cannot_travel_is_named_by_its_place(experts: Training, state: Any, reason: str | None) -> None:
    for name, changes in (("scheduler", {"scheduler": Part(state)}), ("extra['mine']", {"extra": {"mine": Part(state)}})):
        said = refusal(experts, Layout(), **changes)
        assert said is None if reason is None else (said or "").startswith(f"{name}{reason}")
    if not isinstance(state, Exception):
        with contextlib.nullcontext() if reason is None else pytest.raises(TypeError, match=re.escape(reason)):
            to_json("x", state)


def test_what_cannot_be_saved_and_loaded_is_refused(experts: Training) -> None:
    said = refusal(experts, Layout(), extra={"sampler": object()})
    assert said == "extra['sampler'] is a object without state_dict() and load_state_dict(), and cannot move"


def test_small_state_is_found_by_the_same_names_in_both_worlds(experts: Training) -> None:
    split = Split(tp=2, dp=2, ep=2, etp=1)
    with bed.rank_of(split, 0):
        chunks, optimizer = bed.build(Model(layers=2, experts=4), split)
    old = names_of(experts)
    new = names_of(Training(model=chunks, optimizer=optimizer))
    check_names([old, None], [new, new])  # experts have groups of their own in one of them
    more = names_of(Training(model=[], optimizer=experts.optimizer, scheduler=Part({}), extra={"mine": Part({})}))
    for olds, news in (([old, more], [None, None]), ([old, None], [more, more]), ([more, more], [old, None])):
        with pytest.raises(ValueError, match=r"extra\['mine'\], scheduler is there on some ranks or in one of the worlds"):
            check_names(olds, news)
    other = {**new, "groups": ['{"wd_mult": 3}']}
    with pytest.raises(ValueError, match=r'no state for parameter group {"wd_mult": 3}; the old world has'):
        check_names([old], [other])
