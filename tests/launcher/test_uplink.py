"""An agent's connection to its controller."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest

from launcher.orders import Enter
from launcher.store.auth import Token
from launcher.store.link import Identity, Place
from launcher.uplink import Uplink


@pytest.mark.parametrize(("lost_after_s", "longest_s"), [(0.0, 2.0), (3.0, 0.5), (60.0, 2.0)])
def test_an_agent_that_reaches_nobody_asks_less_and_less_often_and_never_in_step_with_others(
    lost_after_s: float, longest_s: float
) -> None:
    """Not so rarely that it would be given up as lost before it has asked twice."""

    async def waits(seed: int) -> list[float]:
        numbers = itertools.count(seed)
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 12:
                raise asyncio.CancelledError

        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            identity = Identity(
                token=Token(bytes(32)), job="job", node="a", role="agent",
                random=lambda size: (next(numbers) * 40503 % 65536).to_bytes(2, "big") * (size // 2),
            )  # fmt: skip
            uplink = Uplink(Place("127.0.0.1", nobody.getsockname()[1]), identity, term=1, sleep=sleep)
            uplink.lost_after_s = lost_after_s
            offer = Enter(host="127.0.0.1", nproc=1, standbys=0, pin=None)
            with pytest.raises(asyncio.CancelledError):
                await uplink.run(offer, lambda: None, lambda _: None)
        return slept

    one, two = asyncio.run(waits(1)), asyncio.run(waits(2))
    for number, wait_s in enumerate(one):
        bound_s = min(longest_s, 0.05 * 2**number)
        assert bound_s / 2 <= wait_s <= bound_s
    assert all(a != b for a, b in zip(one, two, strict=True))
