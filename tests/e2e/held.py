"""What a process holds that changes of world must not leave behind."""

import gc
import itertools
import threading
from collections import Counter
from pathlib import Path

import torch

from liverun import fence


def resources():
    """Count groups, threads, descriptors and tensors of this process."""
    gc.collect()
    return {
        "groups": len(fence.registered_groups()),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "python_threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "tensors": num_tensors(),
    }


def num_tensors():
    """Count the tensors that the garbage collector knows.

    In one call that no other thread comes in between: ``gc.get_objects()`` also gives out a tuple that another thread
    is just building, and that thread's ``tuple()`` fails with a ``SystemError`` if somebody else has it (Python 3.11).
    """
    objects = itertools.chain.from_iterable(map(gc.get_objects, (None,)))
    kinds = Counter(map(type, objects))
    return sum(count for kind, count in kinds.items() if issubclass(kind, torch.Tensor))
