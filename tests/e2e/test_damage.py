"""State that is damaged on its way into another world is caught before the commit, and the old world trains on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .launch import Launched, read_lines
from .test_abort import STEPS
from .test_resize import DROPOUT, assert_bit_identical, losses, start_to_disturb

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

DAMAGES = {
    "flipped": "did not arrive from rank",
    "missing": "the plan does not write the elements at",
    "twice": "twice",
    "swapped": "did not arrive from rank",
}


@pytest.mark.parametrize(
    ("keep", "damages"),
    [
        ("always", list(DAMAGES)),
        # nothing can be swapped in the first layer, and after it there is no way back
        pytest.param("never", ["flipped", "missing", "twice"], marks=pytest.mark.long),
    ],
    ids=["always", "never"],
)
def test_damage_on_the_way_is_named_and_leaves_no_bit_of_the_old_world_changed(
    launch: Callable[..., Launched], train_arguments: Callable[..., list[str]], undisturbed: Callable[..., Path],
    tmp_path: Path, keep: str, damages: list[str],
) -> None:
    job, disturbed = start_to_disturb(
        launch, train_arguments, tmp_path, *DROPOUT, steps=STEPS, standbys=1, options=(f"--keep={keep}",),
        probe={"steps_per_change": 20, "damage": damages},
    )
    job.until_trains()
    for generation, what in enumerate(damages, 2):
        job.until_standbys(1)
        asked = job.resize("--replace=1")
        assert asked.returncode == 1, f"{what} was not caught: {asked.stderr}"
        (damage,) = [row for row in read_lines(disturbed / "damages.jsonl") if row["generation"] == generation]
        (aborted,) = [e for e in job.events() if (e["kind"], e["generation"]) == ("aborted", generation)]
        assert damage["what"] == what
        assert DAMAGES[what] in aborted["reason"]
        assert any(f"{key}: " in aborted["reason"] for key in damage["keys"]), (damage, aborted["reason"])
        assert all(key.startswith("weight/") for key in damage["keys"])
        assert aborted["reason"] in asked.stderr
    assert job.finish() == 0, job.output()
    assert_bit_identical(undisturbed(*DROPOUT, steps=STEPS), disturbed)
    assert {row["generation"] for row in losses(disturbed).values()} == {1}
