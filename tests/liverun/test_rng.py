"""Random streams: captured, restored, and of a size that does not change."""

from __future__ import annotations

import random

import numpy as np
import torch

from liverun import device, rng

device.install()


def draw() -> tuple[object, ...]:
    return (
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist(),  # noqa: NPY002
        torch.randn(5).tolist(),
    )


def test_restored_streams_go_on_as_they_would_have() -> None:
    rng.seed_everything(7)
    draw()
    random.gauss(0, 1)  # leaves a second value cached
    np.random.randn()  # noqa: NPY002
    captured = rng.capture()
    expected = [draw() for _ in range(3)]
    rng.seed_everything(99)
    draw()
    rng.restore(captured)
    assert [draw() for _ in range(3)] == expected


def test_sizes_do_not_depend_on_what_was_drawn() -> None:
    rng.seed_everything(1)
    first = {name: len(state) for name, state in rng.capture().items()}
    draw()
    random.gauss(0, 1)
    assert {name: len(state) for name, state in rng.capture().items()} == first
    assert all(state.dtype == torch.uint8 for state in rng.capture().values())


def test_a_seed_asked_for_beside_the_training_is_kept_and_not_used() -> None:
    before = torch.get_rng_state()
    kept = rng.Seeding()
    kept.ask(5)
    assert kept.seed == 5
    assert torch.equal(before, torch.get_rng_state())
    rng.Seeding(at_once=True).ask(5)
    assert not torch.equal(before, torch.get_rng_state())
