"""What people read of a resize: whether the old state was kept, and what comparing took."""

from __future__ import annotations

import pytest
from test_decide import switching

from launcher.render import cost, print_status
from launcher.status import status_object
from liverun.messages import Switched

PLAIN = "pause 0.300 s, 6.0 MB moved, 3.0 MB local"


@pytest.mark.parametrize(
    ("verify", "kept", "said"),
    [
        ("full", False, f"{PLAIN}, old state given back layer by layer, checked in 0.250 s"),
        ("sample", True, f"{PLAIN}, old state kept, a sample checked in 0.250 s"),
        ("off", True, f"{PLAIN}, old state kept, not checked"),
    ],
)
def test_status_says_what_auto_chose_and_what_checking_took(
    verify: str, kept: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drive = switching()
    for seconds, worker in enumerate(drive.members(), 1):
        vote = Switched(
            generation=2, ok=True, step=12, pause_s=seconds / 10, bytes_moved=2_000_000, bytes_local=1_000_000, kept=kept,
            verify=verify, verify_s=seconds / 12,
        )
        drive.say(worker, vote)
    status = status_object(drive.state, job="job", now=1.0)
    assert status["last_resize"]["kept"] is kept
    print_status(status)
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_resize_that_came_to_nothing_and_one_of_an_older_run_folder_say_what_they_have() -> None:
    last = {"pause_s": 0.3, "bytes_moved": 6_000_000, "bytes_local": 3_000_000}
    assert cost(last) == cost({**last, "kept": True, "verify": {"mode": "", "seconds": 0.0}}) == PLAIN
