"""How members of a change agree on the way their state moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from liverun.changes import Choice, Room, agree
from liverun.memory import available_bytes

GIB = 1 << 30
MIB = 1 << 20


def room(host: str = "a", needed: int = GIB, available: int = 10 * GIB, frees: bool = True) -> Room:
    return Room(host=host, needed_bytes=needed, available_bytes=available, frees=frees)


@pytest.mark.parametrize(
    ("rooms", "keeps"),
    [
        ([room()], True),
        ([room()] * 4, True),  # 4 of 10, and staging
        ([room()] * 5, False),  # together they need more than half of what their host has
        ([room("a"), room("a"), room("b", available=2 * GIB)], False),  # one host is short: nobody keeps
        ([room("a", available=9 * GIB), room("a", needed=5 * GIB, available=20 * GIB)], False),  # the least said counts
        ([room(available=0)], False),
        ([room(available=0), room(frees=False)], True),  # it could not free anyway
        ([room(needed=0, available=0), room("b")], False),
    ],
)
def test_auto_keeps_the_old_state_where_every_host_has_room_for_both(rooms: list[Room], keeps: bool) -> None:
    choice = agree([Choice(staging_bytes=64 * MIB)] * len(rooms), rooms)
    assert choice.keeps == keeps


def test_the_first_members_word_counts_and_the_smallest_staging() -> None:
    wishes = [Choice(verify="sample", keep="never", staging_bytes=2 * MIB), Choice(staging_bytes=MIB)]
    assert agree(wishes, [room()] * 2) == Choice(verify="sample", keep="never", staging_bytes=MIB)
    assert agree(wishes[::-1], [room()] * 2) == Choice(keep="always", staging_bytes=MIB)


def test_what_is_given_back_is_not_deferred() -> None:
    wishes = [Choice(defer="optimizer", staging_bytes=MIB)] * 2
    assert agree(wishes, [room()] * 2).defer == "optimizer"
    assert agree(wishes, [room(), room("b", available=0)]).defer == "nothing"


def test_never_is_refused_where_memory_cannot_be_given_back() -> None:
    with pytest.raises(ValueError, match=r"--keep never: a worker on b cannot give .* --keep auto or --keep always"):
        agree([Choice(keep="never")] * 2, [room(), room("b", frees=False)])


def test_a_word_that_is_no_choice_is_named() -> None:
    assert Choice.of_environment({}) == Choice()
    with pytest.raises(ValueError, match="LIVERUN_KEEP_MODE='maybe' is none of auto, always, never"):
        Choice.of_environment({"LIVERUN_KEEP_MODE": "maybe"})


def test_what_a_container_may_still_take_counts(tmp_path: Path) -> None:
    whole = available_bytes(tmp_path)
    assert whole > 0
    (tmp_path / "memory.current").write_text(f"{40 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {10 * MIB}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == pytest.approx(whole, rel=0.3)
    (tmp_path / "memory.max").write_text(f"{50 * MIB}\n")
    assert available_bytes(tmp_path) == 20 * MIB
