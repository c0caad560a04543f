"""One rank of ``test_gloo_carries_every_plan``: RANK SIZE STORE_FILE."""

from __future__ import annotations

import random
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from test_stream import _side, _tensors, _wrong

from resharding.plan import plan_for
from resharding.stream import execute
from resharding.transport import ProcessGroupTransport

rank, size = int(sys.argv[1]), int(sys.argv[2])
group = dist.ProcessGroupGloo(dist.FileStore(sys.argv[3], size), rank, size, timedelta(seconds=30))
transport = ProcessGroupTransport(group, "cpu", tag=7)
for seed in range(20):
    dice = random.Random(seed)
    tensors = _tensors(dice)
    tensors["weight/large"] = torch.arange(200_000.0).view(500, 400)
    old = _side(tensors, dice.sample(range(size), dice.randint(1, size)), size, dice, filled=True)
    new = _side(tensors, dice.sample(range(size), dice.randint(1, size)), size, dice, filled=False)
    plan = plan_for(rank, [side.boxes for side in old], [side.boxes for side in new], ["a"] * size)
    report = execute(plan, old[rank], new[rank], transport, staging_bytes=dice.choice([64 << 10, 1 << 20]))
    wrong = _wrong(tensors, [new[rank]])
    assert not wrong, wrong
    assert report.bytes_moved == plan.bytes_received
done = torch.zeros(1)
group.allreduce([done]).wait()
del transport, group  # its threads end here: while the interpreter is torn down they would abort the process
