"""Building hollow: no memory, no random numbers, and nothing small goes wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from liverun.hollow import SMALL, Hollow, HollowBufferError
from liverun.memory import status_bytes

LARGE = (1024, 1024)


def test_large_factories_fills_and_copies_touch_no_memory() -> None:
    before = status_bytes("VmRSS")
    kept = []
    with Hollow():
        for _ in range(64):
            made = torch.zeros(LARGE)
            made.fill_(1.0)
            made.copy_(torch.ones(LARGE))
            nn.init.normal_(made)
            kept += [made, made.clone(), made.bfloat16()]
    assert sum(tensor.nbytes for tensor in kept) > 600e6
    assert status_bytes("VmRSS") - before < 64e6


def test_nothing_is_drawn_from_any_generator() -> None:
    out_of_range = torch.full((2048,), 9.0)  # as memory may be; and zeros are not in range either
    before = torch.get_rng_state()
    with Hollow():
        torch.randn(4)
        torch.rand(LARGE)
        torch.randperm(10)
        nn.init.xavier_uniform_(torch.empty(8, 8))
        nn.init.trunc_normal_(out_of_range, mean=5.0, a=4.0, b=6.0)
        nn.Linear(2048, 2)
        nn.Embedding(16, 4)
    assert torch.equal(before, torch.get_rng_state())


def test_the_mode_ends_with_its_block_and_stays_in_its_thread() -> None:
    with Hollow():
        pass
    assert torch.equal(torch.ones(LARGE), torch.full(LARGE, 1.0))


def test_small_constants_are_real() -> None:
    with Hollow():
        positions = 1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64))
        count = torch.zeros(())
        ones = torch.ones(SMALL - 1)
        flags = torch.zeros(3, dtype=torch.bool)
        named = torch.ones(4).type()
    assert torch.equal(positions, 1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64)))
    assert count == 0
    assert bool((ones == 1).all())
    assert not flags.any()
    assert named == "torch.FloatTensor" or named == "torch.cuda.FloatTensor"


def test_shapes_types_and_flags_are_those_of_the_real_thing() -> None:
    calls = [
        lambda: torch.zeros(2048, dtype=torch.bfloat16),
        lambda: torch.ones((64, 64), requires_grad=True),
        lambda: torch.full((64, 64), 3),
        lambda: torch.randn(64, 64),
        lambda: torch.zeros_like(torch.empty(64, 64, dtype=torch.float64)),
        lambda: torch.empty(64, 64).new_zeros(2048),
        lambda: torch.empty(64, 64).clone(),
        lambda: torch.empty(64, 64).to(torch.bfloat16),
        lambda: torch.empty(64, 64).half(),
        lambda: nn.Parameter(torch.empty(64, 64)).detach().clone().float(),
    ]
    for call in calls:
        real = call()
        with Hollow():
            hollow = call()
        assert (hollow.shape, hollow.dtype, hollow.device, hollow.requires_grad) == (
            real.shape, real.dtype, real.device, real.requires_grad
        )


def test_what_does_not_copy_in_torch_does_not_copy_here() -> None:
    with Hollow():
        made = torch.empty(64, 64)
        assert made.float() is made
        assert made.to(torch.float32) is made
        assert made.contiguous() is made
        assert made.clone().data_ptr() != made.data_ptr()


def test_a_large_constant_that_no_stream_fills_is_refused_by_name() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(64, 64).tril(), persistent=False)
            self.register_buffer("table", torch.ones(64, 64), persistent=False)

    hollow = Hollow()
    with hollow:
        module = Masked()
    with pytest.raises(HollowBufferError, match="table"):
        hollow.check_buffers([module], [])
    hollow.check_buffers([module], [module.table])
