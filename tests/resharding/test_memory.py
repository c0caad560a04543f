"""What a change of layout takes of memory, as the operating system sees it: 416 MB of state, staging of 16 MiB."""

from __future__ import annotations

import itertools
import json
import mmap
import random
from pathlib import Path

import memory
import pytest
import torch
from memory_rank import CASES
from processes import run_ranks

from resharding.assign import layer_of
from resharding.boxes import Box, Holding, Piece
from resharding.listing import Listing
from resharding.order import order_of_layers
from resharding.pages import PageReturner, is_disjoint
from resharding.plan import plan_all, plan_for
from resharding.stream import execute
from resharding.verify import Damaged

SLACK = 16 << 20
PAGES = 16 * mmap.PAGESIZE
"""that a layer shares with its neighbours, and so go back later than it"""


def _run(case: str, folder: Path, mode: str) -> list[dict]:
    script = Path(__file__).with_name("memory_rank.py")
    found = [json.loads(out) for out in run_ranks((script, rank, case, folder, mode) for rank in range(2))]
    print(json.dumps({case: found}))
    return found


def _bound(rank: dict) -> int:
    return max(rank["source"], rank["target"]) + rank["staging"] + rank["layer"] + SLACK


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES)
def test_layer_by_layer_no_second_copy_ever_exists(case: str, tmp_path: Path) -> None:
    for rank in _run(case, tmp_path, "free"):
        assert rank["wrong"] == []
        assert rank["peak"] <= _bound(rank)
        assert rank["live"] <= _bound(rank) - SLACK + PAGES, "bytes of tensors"
        assert rank["given_back"] >= 0.99 * rank["source"]


@pytest.mark.e2e
def test_keeping_the_old_world_takes_both(tmp_path: Path) -> None:
    """The measurement itself: without giving back it is beyond the bound."""
    for rank in _run("moving", tmp_path, "keep"):
        assert rank["wrong"] == []
        assert rank["peak"] > _bound(rank)
        assert rank["live"] > _bound(rank)


def _stages(*layers: range) -> list[list[Box]]:
    return [[Box(f"weight/layers.{i}.w", "float32", (9,), (0,), (9,)) for i in share] for share in layers]


def _beyond(old: list[list[Box]], new: list[list[Box]]) -> int:
    """Layers that some rank holds more than the larger of its states, at worst."""
    turns = order_of_layers([Listing.explicit(side) for side in old], [Listing.explicit(side) for side in new])
    assert sorted(turns.values()) == list(range(len(turns)))
    worst = 0
    for before, after in zip(old, new, strict=True):
        had, needs = ({layer_of(box.key) for box in side} for side in (before, after))
        held = len(had)
        for layer in sorted(turns, key=lambda layer: turns[layer]):
            worst = max(worst, held + (layer in needs) - max(len(had), len(needs)))
            held += (layer in needs) - (layer in had)
    return worst


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((range(20), range(20, 40)), (range(20, 40), range(20))),
        ((range(40), range(0)), (range(20), range(20, 40))),
        ((range(20), range(20, 40)), (range(0), range(40))),
        ((range(10), range(10, 20), range(20, 30), range(30, 40)), (range(30, 40), range(10), range(10, 20), range(20, 30))),
        ((range(10), range(10, 20), range(20, 30), range(30, 40)), (range(27, 40), range(0), range(14), range(14, 27))),
        ((range(0, 40, 2), range(1, 40, 2)), (range(20, 40), range(20))),
    ],
    ids=str,
)  # fmt: skip
def test_no_rank_holds_more_than_one_layer_beyond_its_states(old, new) -> None:
    assert _beyond(_stages(*old), _stages(*new)) <= 1


@pytest.mark.parametrize("seed", range(40))
def test_stages_cut_anew_and_given_to_any_ranks_stay_within_one_layer(seed: int) -> None:
    dice = random.Random(seed)

    def world() -> list[range]:
        cuts = sorted(dice.sample(range(1, 40), dice.randint(0, 7)))
        stages = [range(a, b) for a, b in itertools.pairwise([0, *cuts, 40])]
        ranks = stages * dice.randint(1, 2) + [range(0)] * dice.randint(0, 3)
        dice.shuffle(ranks)
        return ranks

    old, new = world(), world()
    size = max(len(old), len(new))
    old += [range(0)] * (size - len(old))
    new += [range(0)] * (size - len(new))
    assert _beyond(_stages(*old), _stages(*new)) <= 1


def test_layers_are_claimed_and_released_one_by_one_on_all_ranks_alike() -> None:
    old, new = _stages(range(3), range(3, 6)), _stages(range(3, 6), range(3))
    sources, targets = (
        [Holding.of([_numbered(box, i) for i, box in enumerate(side)]) for side in world]
        for world in (old, new)
    )
    plans = plan_all(old, new, ["a", "a"])
    events: list[tuple[str, int]] = []
    bodies = [
        lambda rank=rank: stream_one(plans[rank], sources[rank], targets[rank], network, rank, events if rank == 0 else [])
        for rank in range(2)
    ]
    network = memory.Network()
    memory.run_together(bodies)
    assert sorted(events) == [("claim", i) for i in range(3)] + [("release", i) for i in range(3)]
    held = 3
    for kind, _ in events:
        held += 1 if kind == "claim" else -1
        assert held <= 4
    for holding in targets:
        assert [piece.view()[0].item() for piece in holding.pieces] == [0, 1, 2]


def _numbered(box: Box, number: int) -> Piece:
    live = torch.full(box.shape, float(number))
    return Piece(box, lambda: live)


def stream_one(plan, source, target, network, rank, events):
    return execute(
        plan, source, target, memory.MemoryTransport(network, rank), 1024, keep=False,
        claim=lambda piece: events.append(("claim", piece)), release=lambda piece: events.append(("release", piece)),
    )  # fmt: skip


class Damaging(memory.Network):
    """Flips one bit of the first message of a layer's size."""

    damaged = False

    def deliver(self, sent, received):
        super().deliver(sent, received)
        if received.numel() == 36 and not self.damaged:
            self.damaged = True
            received[0] ^= 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_before_the_first_release_all_are_asked_and_until_then_every_source_is_whole(is_damaged: bool) -> None:
    """The third rank has no state before, none after, and is asked as well."""
    old, new = [*_stages(range(3), range(3, 6)), []], [*_stages(range(3, 6), range(3)), []]
    sources = [Holding.of([_numbered(box, i) for i, box in enumerate(side)]) for side in old]
    targets = [Holding.of([_numbered(box, -1) for box in side]) for side in new]
    plans = plan_all(old, new, ["a"] * 3)
    released: list[int] = []
    network = Damaging() if is_damaged else memory.Network()
    said: list[str] = [""] * 3

    def body(rank: int) -> None:
        def ask() -> None:
            raise ConnectionError("asked")

        try:
            execute(
                plans[rank], sources[rank], targets[rank], memory.MemoryTransport(network, rank), 4096, keep=False,
                before_release=ask, release=released.append,
            )
        except (Damaged, ConnectionError) as error:
            said[rank] = str(error)

    memory.run_together([lambda rank=rank: body(rank) for rank in range(3)])
    if is_damaged:
        assert sum("did not arrive" in words for words in said) == 1
        assert said.count("asked") == 2
    else:
        assert said == ["asked"] * 3
    assert released == []
    for holding in sources[:2]:
        assert [piece.view()[0].item() for piece in holding.pieces] == [0, 1, 2]


def test_pieces_that_share_elements_are_found() -> None:
    live = torch.zeros(10, 4)
    box = Box("weight/w", "float32", (10, 4), (0, 0), (10, 4))

    def holding(*views: torch.Tensor) -> Holding:
        return Holding.of([Piece(box, lambda view=view: view) for view in views])

    assert is_disjoint(holding(live[:5], live[5:]))
    assert is_disjoint(holding(live[:, :2], live[:, 2:])), "interleaved, but no element twice"
    assert not is_disjoint(holding(live[:6], live[5:]))
    assert not is_disjoint(holding(live[5:], live[:, :2]))


def test_layers_of_a_rank_stand_by_piece() -> None:
    old, new = _stages(range(3), range(3, 6)), _stages(range(3, 6), range(3))
    plans = [plan_for(rank, old, new, ["a", "a"]) for rank in range(2)]
    assert plans[0].source_layers == plans[1].target_layers
    assert sorted((*plans[0].source_layers, *plans[0].target_layers)) == list(range(6))


@pytest.mark.parametrize("with_streams", [False, True], ids=["another size", "the same size"])
def test_the_first_layer_that_moves_is_one_of_the_model(with_streams: bool) -> None:
    """From its check on there is no way back; a random stream moves only where layout and size stay, or is empty."""
    old = _stages(range(3))[0]
    streams = [Box(f"rng/0/{name}", "uint8", (9,), (0,), (9,)) for name in ("a", "torch")]
    (plan,) = plan_all([[*streams, *old]], [[*streams * with_streams, *old]], ["a"])
    assert plan.source_layers == (3, 4, 0, 1, 2)


def test_pages_go_back_once_all_on_them_is_released() -> None:
    page = mmap.PAGESIZE // 4
    buffer = torch.ones(64 * page)
    shift = -(buffer.data_ptr() // 4) % page
    parts = buffer[shift : shift + 8 * page].split(page // 2)
    returner = PageReturner(Holding.of([]))
    first, second = [*parts[:8:2], *parts[9::2]], [*parts[1:8:2], *parts[8::2]]  # halves of pages, either one first
    for part in first:
        returner.tensor(part)
    assert returner.num_bytes == 0
    assert bool((buffer == 1).all())
    for count, part in enumerate(second, 1):
        returner.tensor(part)
        assert returner.num_bytes == count * mmap.PAGESIZE
    assert not buffer[shift : shift + 8 * page].any()
    assert bool((buffer[:shift] == 1).all())
    assert bool((buffer[shift + 8 * page :] == 1).all())


@pytest.mark.parametrize("missing", [False, True])
def test_pieces_that_lie_interleaved_go_back_with_the_last_of_them(missing: bool) -> None:
    """Columns of one tensor, as the experts of a rank are kept; not if there is something between them that is none."""
    page = mmap.PAGESIZE // 4
    buffer = torch.ones(12 * page)
    shift = -(buffer.data_ptr() // 4) % page
    columns = list(buffer[shift : shift + 8 * page].view(16, page // 2).split(page // 8, dim=1))
    box = Box("weight/w", "float32", (16, page // 8), (0, 0), (16, page // 8))
    rest = buffer[shift + 8 * page : shift + 9 * page].view(16, page // 16)
    views = [*columns[: 3 if missing else 4], rest]
    returner = PageReturner(Holding.of([Piece(box, lambda view=view: view) for view in views]))
    for index in range(len(views) - 1):
        assert returner.num_bytes == 0
        assert bool((buffer == 1).all())
        returner.piece(index)
    assert returner.num_bytes == (0 if missing else 8 * mmap.PAGESIZE)
    assert bool((buffer[:shift] == 1).all())
    assert bool((buffer[shift + 8 * page :] == 1).all())
    returner.piece(len(views) - 1)
    assert returner.num_bytes == (1 if missing else 9) * mmap.PAGESIZE
