"""The CPU device layer. Each check runs in a process of its own: the layer is for good once installed."""

import subprocess
import sys
import textwrap

import pytest


def run(code):
    """Run ``code`` in a fresh interpreter; what it prints comes back."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


needs_no_cuda = pytest.mark.skipif(
    run("import torch; print(torch.cuda.is_available())").strip() == "True",
    reason="a CUDA device is here, so the CPU layer is never installed",
)


def test_nothing_is_replaced_where_cuda_exists():
    run("""
        import torch
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 4
        import os
        os.environ["LIVERUN_SLOT"] = "6"
        before = {name: id(value) for name, value in vars(torch.cuda).items()}
        zeros, to, type_ = torch.zeros, torch.Tensor.to, torch.Tensor.type
        from liverun.device import backend, install
        device = install()
        assert device == torch.device("cuda", 2), "a worker's device follows from its slot, not from its rank"
        assert {name: id(value) for name, value in vars(torch.cuda).items()} == before
        assert (torch.zeros, torch.Tensor.to, torch.Tensor.type) == (zeros, to, type_)
        assert not torch.cuda._initialized
        assert backend(device) == "cpu:gloo,cuda:nccl"
    """)


@needs_no_cuda
def test_installing_again_changes_nothing():
    run("""
        import torch
        from liverun.device import backend, install
        device = install()
        assert device == torch.device("cpu") and backend(device) == "gloo"
        first = (torch.zeros, torch.Tensor.to, torch.Tensor.type, torch.cuda.Stream)
        assert install() == device
        assert (torch.zeros, torch.Tensor.to, torch.Tensor.type, torch.cuda.Stream) == first
    """)


@needs_no_cuda
def test_every_way_to_name_the_cuda_device_means_the_cpu():
    run("""
        import torch
        from liverun.device import install
        install()
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        x = torch.ones(2)
        for device in ("cuda", "cuda:0", 0, torch.device("cuda", 0), torch.cuda.current_device()):
            made = [torch.zeros(2, device=device), torch.empty_like(x, device=device), x.new_zeros(2, device=device),
                    torch.tensor([1], device=device, pin_memory=True), x.to(device), x.to(device=device)]
            assert all(tensor.device.type == "cpu" for tensor in made)
        assert x.cuda() is x and x.to(torch.float64).dtype == torch.float64
        assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert x.type("torch.cuda.HalfTensor").dtype == torch.float16
        assert torch.nn.Linear(2, 2, device="cuda").cuda()(x).shape == (2,)
        assert torch.zeros(1, device="meta").device.type == "meta"
        stream, start = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream), torch.cuda.device(0):
            start.record()
            stream.wait_stream(torch.cuda.current_stream())
        assert start.elapsed_time(stream.record_event()) >= 0
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == 0
    """)


@needs_no_cuda
def test_a_function_mode_sees_torchs_own_functions():
    run("""
        import inspect, torch
        from torch.overrides import TorchFunctionMode
        from liverun.device import install
        install()
        class Mode(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append((func, dict(kwargs or {})))
                return func(*args, **(kwargs or {}))
        seen = []
        with Mode():
            torch.zeros(3, device="cuda")
        assert seen == [(inspect.unwrap(torch.zeros), {"device": torch.device("cpu")})]
    """)


@needs_no_cuda
@pytest.mark.parametrize("order", ["before", "after"])
def test_dropout_draws_from_the_rng_tracker(order):
    """A fork draws its own stream, leaves the default one alone and goes on where it left off."""
    said = run(f"""
        import logging, sys
        logging.basicConfig(level=logging.WARNING)
        import torch
        from liverun.device import install
        if "{order}" == "before":
            install()
        from megatron.core.tensor_parallel import random
        install()
        random.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
        tracker = random.get_cuda_rng_tracker()
        default = torch.get_rng_state()
        with tracker.fork():
            first = torch.nn.functional.dropout(torch.ones(64), 0.5)
        assert torch.equal(default, torch.get_rng_state())
        torch.rand(10)
        with tracker.fork():
            second = torch.nn.functional.dropout(torch.ones(64), 0.5)
        expected = torch.Generator().manual_seed(7 + 2718)
        torch.set_rng_state(expected.get_state())
        assert torch.equal(first, torch.nn.functional.dropout(torch.ones(64), 0.5))
        assert torch.equal(second, torch.nn.functional.dropout(torch.ones(64), 0.5))
        assert torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())
        assert len(torch.cuda.get_rng_state_all()) == 1
        logging.getLogger("megatron.core.tensor_parallel.random").warning("another warning")
    """)
    assert "another warning" in said
    assert "RNG state changed" not in said


@needs_no_cuda
def test_seeding_cuda_seeds_the_stream_dropout_uses():
    run("""
        import torch
        from liverun.device import install
        install()
        for seed in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.manual_seed):
            seed(3)
            first = torch.rand(4)
            seed(3)
            assert torch.equal(first, torch.rand(4))
        state = torch.cuda.get_rng_state()
        first = torch.rand(4)
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(4))
    """)


@needs_no_cuda
def test_a_fork_of_a_process_that_looked_for_a_device_is_no_harm():
    """A torch built with CUDA calls every such fork bad, and would refuse to seed in it."""
    run("""
        import torch
        torch.cuda._is_in_bad_fork = lambda: True
        from liverun.device import install
        install()
        torch.cuda.manual_seed(3)
        assert torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())
    """)


@needs_no_cuda
def test_the_layer_survives_a_fork():
    run("""
        import os, torch
        from liverun.device import install
        install()
        pid = os.fork()
        if pid == 0:
            ok = install() == torch.device("cpu") and torch.zeros(1, device="cuda").cuda().device.type == "cpu"
            torch.cuda.manual_seed(1)
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
    """)
