"""The ring that slices pass through."""

from __future__ import annotations

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from resharding.staging import ALIGN_BYTES, Staging

CPU = torch.device("cpu")


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=60))
def test_parts_never_overlap_and_room_that_was_given_back_is_found_again(units: int, steps: list[tuple[bool, int]]) -> None:
    staging = Staging(units * 2 * ALIGN_BYTES, CPU)
    base = staging.take(1).data_ptr()
    staging.give_back()
    taken: deque[tuple[int, int]] = deque()
    for gives, size in steps:
        if gives and taken:
            staging.give_back()
            taken.popleft()
            continue
        num_bytes = 1 + size % (units * ALIGN_BYTES)  # as in the stream: at most half of it
        part = staging.take(num_bytes)
        if part is None:
            assert len(taken) > 1 or taken[0][1] - taken[0][0] + num_bytes > (units - 1) * ALIGN_BYTES
            continue
        start = part.data_ptr() - base
        assert start % ALIGN_BYTES == 0
        assert part.numel() == num_bytes
        assert start + num_bytes <= staging.num_bytes
        assert all(start >= end or start + num_bytes <= begin for begin, end in taken)
        taken.append((start, start + num_bytes))
    while taken:
        staging.give_back()
        taken.popleft()
    assert staging.take(staging.num_bytes) is not None


def test_two_of_the_largest_find_room_at_once_however_they_come() -> None:
    staging = Staging(4 * ALIGN_BYTES, CPU)
    for _ in range(5):
        assert staging.take(2 * ALIGN_BYTES) is not None
        assert staging.take(2 * ALIGN_BYTES) is not None
        assert staging.take(1) is None
        staging.give_back()
        staging.give_back()
