"""A script that has never heard of liverun runs as under torchrun."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .launch import Launched, torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PLAIN = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(20):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss)
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
         "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
with open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w") as file:
    json.dump({"loss": loss.item(), "argv": sys.argv[2:], **{name: os.environ[name] for name in names}}, file)
dist.destroy_process_group()
"""


def test_a_plain_script_runs_as_under_torchrun(launch: Callable[..., Launched], tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    answers = []
    arguments = ["--odd", "two words", "--", "-m"]
    for name in ("liverun", "torchrun"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "liverun":
            job = launch(str(script), str(folder), *arguments, name="plain", nproc=2)
            assert job.finish() == 0, job.output()
        else:
            done = torchrun(str(script), str(folder), *arguments, nproc=2)
            # torch 2.13 aborts, now and then, an interpreter that ends while a thread of gloo drops the last tensors;
            # see liverun/ending.py, which this one has not
            assert done.returncode == 0 or "(SIGABRT)" in done.stdout, done.stdout
        answers.append([json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)])
    assert answers[0] == answers[1]


def test_a_plain_script_is_not_resized_and_says_why(launch: Callable[..., Launched], tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import pathlib, sys\nopen(sys.argv[1], 'w').close()\nwhile True: __import__('time').sleep(1)\n")
    ready = tmp_path / "ready"
    job = launch(str(script), str(ready), nproc=1)
    job.until("the script", ready.exists)
    done = job.resize("--workers=1")
    assert done.returncode != 0
    assert "liverun.join()" in done.stderr
    assert job.cli("stop", job.job).returncode == 0


def test_the_same_example_runs_under_torchrun(
    train_arguments: Callable[..., list[str]], tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    """The losses of the example are the same to the last bit, whoever launched it."""
    from .conftest import TRAIN

    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    done = torchrun(TRAIN, *train_arguments(one, steps=10), nproc=2)
    assert done.returncode == 0, done.stdout
    job = launch(TRAIN, *train_arguments(two, steps=10), nproc=2)
    assert job.finish() == 0, job.output()
    rows = [[json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()] for folder in (one, two)]
    keep = ("step", "loss", "grad_norm", "world_size", "layout", "consumed_samples")
    assert [[row[name] for name in keep] for row in rows[0]] == [[row[name] for name in keep] for row in rows[1]]
