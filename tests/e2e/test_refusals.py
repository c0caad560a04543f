"""What cannot be done is refused in a sentence, and the run does not notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import PROBE
from .launch import Launched
from .test_resize import losses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

REFUSED = [
    (("--layout=tp=3",), "tp=3", "multiple of 3"),
    (("--workers=3", "--layout=tp=3"), "num_attention_heads=4", "tp=3"),
    (("--workers=3", "--layout=pp=3"), "num_layers=4", "pp=3"),
    (("--workers=3",), "global batch size 8", "dp 3"),
    (("--workers=99",), "99", "4"),
    (("--workers=0",), "0", "at least 1"),
    (("--workers=-2",), "-2", ""),
    (("--workers=many",), "many", ""),
    (("--layout=tp=0",), "tp=0", ""),
    (("--layout=qp=2",), "qp=2", "tp"),
    (("--layout=tp",), "tp", ""),
    (("--layout=tp=2,tp=2",), "twice", ""),
    (("--workers=4", "--timeout=-1"), "-1", ""),
    (("--workers=4", "--timeout=soon"), "soon", ""),
]


def test_refusals_name_the_value_and_leave_the_run_alone(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Known complaint 42: the global batch changes with the number of replicas. Here it cannot."""
    out = tmp_path / "out"
    out.mkdir()
    job = launch(
        PROBE, str(out), *train_arguments(out, steps=400), nproc=2, standbys=2,
        probe={"steps_per_change": 1, "forget_scheduler": True},
    )
    job.until_trains()
    job.until_standbys(2)
    for words, *named in REFUSED:
        done = job.resize(*words)
        assert done.returncode != 0, f"{words} was not refused"
        last = done.stderr.strip().splitlines()[-1]
        assert all(name in done.stderr for name in named), f"{words}: {done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        assert len(last) < 300, last

    assert job.kinds().count("preparing") == 1, "what the numbers say already was found out later"
    names = job.resize("--layout=tp=2")
    assert names.returncode == 1, names.stderr
    assert "scheduler is there on some ranks or in one of the worlds only" in names.stderr
    assert (job.kinds().count("preparing"), job.kinds().count("switching")) == (2, 1), "found out when state moved"

    same = job.resize("--workers=2")
    assert same.returncode == 0, same.stderr
    assert "already" in same.stdout + same.stderr

    unknown = job.cli("resize", "no-such-job", "--workers=2")
    assert unknown.returncode == 2, unknown.stderr
    assert "no-such-job" in unknown.stderr

    assert job.status()["world"] == {
        "size": 2, "layout": {"tp": 1, "pp": 1, "dp": 2, "vpp": 1, "cp": 1, "ep": 1, "etp": 1}
    }
    assert {row["generation"] for row in losses(out).values()} == {1}

    stopped = job.cli("stop", job.job)
    assert stopped.returncode == 0, stopped.stderr
    assert job.finish() == 0, job.output()
    ended = job.cli("resize", job.job, "--workers=2")
    assert ended.returncode == 69, ended.stderr
    assert "ended" in ended.stderr or "stopped" in ended.stderr


def test_a_resize_while_one_is_under_way_is_queued_and_said(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    announced = tmp_path / "joiner.pid"
    job = launch(
        PROBE, str(out), *train_arguments(out, steps=400), nproc=2, standbys=2,
        probe={"steps_per_change": 1, "hang_in_build": 2, "announce": str(announced)},
    )
    job.until_trains()
    job.until_standbys(2)
    first = job.cli("resize", job.job, "--no-wait", "--timeout=6", "--workers=4")
    assert first.returncode == 0, first.stderr
    job.until("a joiner that hangs", announced.exists)
    second = job.resize("--layout=tp=2")
    assert second.returncode == 0, second.stderr
    assert "waits until" in second.stderr
    kinds = job.kinds()
    assert kinds.index("queued") < kinds.index("aborted") < len(kinds) - 1 - kinds[::-1].index("active")
    assert job.status()["world"]["layout"]["tp"] == 2
