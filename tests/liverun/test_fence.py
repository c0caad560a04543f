"""Several worlds in one process: each thread sees its own, and nothing of a destroyed one is left."""

from __future__ import annotations

import pytest
from processes import run_ranks

PREAMBLE = """
import os, sys, threading, inspect
from datetime import timedelta
import torch, torch.distributed as dist
from liverun import device, fence, groups
from liverun.layout import Layout
fence.install()
fence.install()
cpu = device.install()
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
LIMIT = timedelta(seconds=30)
def in_thread(call):
    failed = []
    def run():
        try:
            call()
        except BaseException as error:
            failed.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]
"""


def run(code: str, num_ranks: int = 1) -> None:
    """Run ``code`` in fresh processes; every rank has ``rank``, ``size`` and a ``store``."""
    head = PREAMBLE + (
        "rank, size, port = map(int, sys.argv[1:])\n"
        "store = dist.TCPStore('127.0.0.1', port, is_master=False, timeout=LIMIT)\n"
        "def world(generation, layout):\n"
        "    there = fence.new_globals(generation)\n"
        "    groups.open_world(there, layout=layout, device=cpu, timeout=LIMIT,\n"
        "                      store=dist.PrefixStore(str(generation), store), rank=rank, size=size)\n"
        "    return there\n"
    )
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(("-c", head + code, rank, num_ranks, store.port) for rank in range(num_ranks))


@pytest.mark.e2e
def test_a_world_is_built_while_another_computes() -> None:
    run(
        """
first = world(1, Layout(tp=2))
fence.activate(first)
tensor_parallel.model_parallel_cuda_manual_seed(1)
prepared = []
def build():
    second = world(2, Layout(pp=2))
    with fence.seen_by_this_thread(second):
        assert parallel_state.get_tensor_model_parallel_world_size() == 1
        assert parallel_state.get_pipeline_model_parallel_world_size() == 2
        assert dist.get_world_size(parallel_state.get_pipeline_model_parallel_group()) == 2
    assert parallel_state.get_tensor_model_parallel_world_size() == 2
    prepared.append(second)
thread = threading.Thread(target=build)
thread.start()
for step in range(200):
    ones = torch.full((4,), float(step))
    dist.all_reduce(ones, group=parallel_state.get_tensor_model_parallel_group())
    assert torch.equal(ones, torch.full((4,), 2.0 * step))
thread.join()
second = prepared[0]
assert parallel_state.get_tensor_model_parallel_world_size() == 2
fence.activate(second)
assert parallel_state.get_tensor_model_parallel_world_size() == 1
assert parallel_state.get_pipeline_model_parallel_rank() == rank
dist.barrier()
fence.destroy(first.groups)
ones = torch.ones(1)
dist.all_reduce(ones, group=parallel_state.get_pipeline_model_parallel_group())
assert ones == 2
assert set(fence.registered_groups()) == set(second.groups)
dist.barrier()
""",
        num_ranks=2,
    )


def test_what_a_preparing_thread_does_is_seen_by_nobody_else() -> None:
    run("""
hook = __import__("sys").excepthook
first = world(1, Layout())
fence.activate(first)
tensor_parallel.model_parallel_cuda_manual_seed(1)
tracker, state = get_cuda_rng_tracker(), torch.get_rng_state()
kept = {name: value.clone() for name, value in tracker.get_states().items()}
default = dist.group.WORLD
def prepare():
    second = world(2, Layout())
    with fence.seen_by_this_thread(second):
        assert dist.group.WORLD is second.default_pg is not default
        tensor_parallel.model_parallel_cuda_manual_seed(99)
        with get_cuda_rng_tracker().fork():
            pass
        parallel_state.set_tensor_model_parallel_rank(7)
        assert parallel_state.get_tensor_model_parallel_rank() == 7
    assert second.seed == (99, {})
    assert dist.group.WORLD is default
    assert not {group.group_name for group in second.groups} & {group.group_name for group in first.groups}
    fence.destroy(second.groups)
in_thread(prepare)
assert dist.group.WORLD is default
assert parallel_state.get_tensor_model_parallel_rank() == 0
assert get_cuda_rng_tracker() is tracker
assert torch.equal(state, torch.get_rng_state())
assert all(torch.equal(kept[name], value) for name, value in tracker.get_states().items())
assert __import__("sys").excepthook is hook
assert set(fence.registered_groups()) == set(first.groups)
""")


def test_a_preparation_that_is_given_up_ends_its_own_groups_only() -> None:
    """The next one may be making its groups meanwhile."""
    run("""
given_up, is_in, may_end = fence.new_globals(2), threading.Event(), threading.Event()
def give_up():
    with fence.seen_by_this_thread(given_up):
        is_in.set()
        assert may_end.wait(30)
thread = threading.Thread(target=give_up)
thread.start()
assert is_in.wait(30)
following = []
in_thread(lambda: following.append(world(3, Layout())))
may_end.set()
thread.join()
assert given_up.groups == []
fence.destroy(given_up.groups)
assert set(fence.registered_groups()) == set(following[0].groups) != set()
""")


def test_routed_functions_keep_their_signature() -> None:
    run("""
names = inspect.signature(parallel_state.initialize_model_parallel).parameters
assert "tensor_model_parallel_size" in names and names["tensor_model_parallel_size"].default == 1
assert parallel_state.get_data_parallel_group.__name__ == "get_data_parallel_group"
""")


def test_destroyed_groups_give_their_threads_and_descriptors_back() -> None:
    run("""
import gc
from pathlib import Path
count = lambda: tuple(len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd"))
seen = []
for generation in range(1, 6):
    there = world(generation, Layout())
    fence.activate(there)
    fence.destroy(there.groups)
    fence.activate(fence.new_globals(100 + generation))
    del there
    gc.collect()
    seen.append(count())
assert len(set(seen)) == 1, seen
""")
