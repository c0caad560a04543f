"""Small state that travels as JSON."""

from __future__ import annotations

import json

import pytest
import torch

from liverun.small_state import from_json, to_json


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [1.5, None, "x", True], "c": {"d": torch.arange(6, dtype=torch.int64).reshape(2, 3)}},
        {"empty": torch.empty(0), "half": torch.randn(4).bfloat16(), "scalar": torch.tensor(3.25)},
        {"flag": torch.tensor([True, False])},
    ],
    ids=["nested", "types", "bool"],
)
def test_state_comes_back_as_it_was(value: dict[str, object]) -> None:
    back = from_json(json.loads(json.dumps(to_json("x", value))))
    assert same(value, back)


def same(one: object, two: object) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(two, torch.Tensor) and one.dtype == two.dtype and one.shape == two.shape
            and torch.equal(one, two)
        )
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return isinstance(two, list) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return one == two


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, {"a": {1, 2}}, {"a": b"bytes"}])
def test_state_that_cannot_travel_is_refused(value: dict[object, object]) -> None:
    with pytest.raises(TypeError, match=r"cannot move|text as the keys"):
        to_json("x", value)


def test_floats_are_exact() -> None:
    values = torch.randn(1000, dtype=torch.float64).tolist()
    assert from_json(json.loads(json.dumps(to_json("x", {"v": values})))) == {"v": values}
