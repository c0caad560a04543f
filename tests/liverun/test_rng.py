"""Random streams: captured, restored, and of a size that does not change."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from test_fence import run

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


@pytest.mark.e2e
def test_after_a_change_of_layout_every_stream_is_that_of_a_job_which_begins_in_the_new_one() -> None:
    """Two ranks; trackers too, which Megatron seeds by tp and by ep. The seed is the world's, or Megatron's own."""
    run(
        """
import random
from types import SimpleNamespace
from liverun import rng
from liverun.job import Job
def same(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if torch.equal(one[name], other[name])]
generation = iter(range(1, 100))
def begin(layout):
    there = world(next(generation), layout)
    fence.activate(there)
    rng.seed_everything(7)
    return rng.capture()
def change(layout, wanted):
    for seeds_world in (True, False):
        random.random(), torch.rand(3)
        for name in get_cuda_rng_tracker().get_states():
            with get_cuda_rng_tracker().fork(name):
                torch.rand(3)
        there, seeding = world(next(generation), layout), rng.Seeding()
        with fence.seen_by_this_thread(there):
            seeding.ask(7) if seeds_world else tensor_parallel.model_parallel_cuda_manual_seed(7)
        fence.activate(there)
        standing = SimpleNamespace(world=SimpleNamespace(streams=seeding), globals=there)
        Job._set_streams(None, SimpleNamespace(incoming={}), standing)
        streams = rng.capture()
        names = set(same(streams, wanted))
        assert names >= {name for name in wanted if name.startswith("megatron/")}
        assert names == set(wanted) or not seeds_world, names
first = begin(Layout())
cut = begin(Layout(tp=2))
experts = begin(Layout(ep=2))
if rank:
    assert "megatron/model-parallel-rng" not in same(first, cut)
    assert "megatron/expert-parallel-rng" not in same(first, experts)
change(Layout(tp=2), cut)
change(Layout(ep=2), experts)
change(Layout(), first)
dist.barrier()
""",
        num_ranks=2,
    )
