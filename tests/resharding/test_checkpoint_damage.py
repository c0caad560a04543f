"""A checkpoint is there in whole or not at all: crashes at every point of a save, full disks, damage of every kind."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resharding.boxes import Box, Holding, Piece
from resharding.checkpoint import folder, reader, writer
from resharding.checkpoint.format import VERSION, BadCheckpoint, Meta, decode_index
from resharding.checkpoint.fused import query_key_value
from resharding.checkpoint.opened import Checkpoint
from resharding.listing import listing_of

QKV = "layers.0.linear_qkv.weight"
FUSED = {QKV: query_key_value(QKV, heads=4, groups=2, head_dim=3)}
SHAPES = {
    f"weight/{QKV}": (24, 5), "weight/embedding": (11, 7), f"exp_avg/{QKV}": (24, 5), "exp_avg/embedding": (11, 7),
    "rng/0/torch": (33,), "weight/scalar": (),
}  # fmt: skip


def state(value: int) -> dict[str, torch.Tensor]:
    """Numbers that tell every element, tensor and checkpoint from every other."""
    found = {}
    for number, (key, shape) in enumerate(SHAPES.items()):
        dtype = torch.uint8 if key.startswith("rng/") else torch.float32
        flat = torch.arange(int(np.prod(shape, dtype=int)), dtype=torch.float32) * 3 + 100 * number + value
        found[key] = (flat % 251).to(dtype).reshape(shape)
    return found


def holdings(tensors: dict[str, torch.Tensor]) -> list[Holding]:
    """Cut a state over two ranks: rows, columns, or one rank's alone."""
    ranks: list[list[Piece]] = [[], []]
    for key, tensor in tensors.items():
        name, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        cuts = {"exp_avg/embedding": [(1, 0, 4), (1, 4, 7)], f"weight/{QKV}": [(0, 0, 11), (0, 11, 24)]}.get(key)
        for rank in range(2) if cuts else [key == "weight/scalar"]:
            offset, size, view = [0] * len(shape), list(shape), tensor
            if cuts:
                axis, first, last = cuts[rank]
                offset[axis], size[axis], view = first, last - first, tensor.narrow(axis, first, last - first)
            box = Box(key, name, shape, tuple(offset), tuple(size))
            ranks[rank].append(Piece(box, lambda view=view: view))
    return [Holding.of(pieces) for pieces in ranks]


def save(
    root: Path, step: int, *, keep_last: int | None = None, value: int | None = None,
    beside: Callable[[Path], object] = lambda _: None,
) -> Path:  # fmt: skip
    """Save the numbers of ``state(value)``, by default ``state(step)``.

    ``beside`` is called with the temporary folder once all shares are written.
    """
    there = {at for at, _ in folder.complete_in(root)}
    held = holdings(state(step if value is None else value))
    listings = [listing_of(each) for each in held]
    whole = writer.tensors_in(listings)
    plan = writer.design(whole, FUSED)
    temporary = root / folder.temporary_name(step, folder.fresh_nonce())
    for rank, each in enumerate(held):
        parts = writer.snapshot(writer.share_of(rank, listings, ["a", "b"], whole), each)
        writer.write_share(temporary, plan, rank, parts, None)
    beside(temporary)
    return writer.commit(
        root, temporary, plan, num_ranks=2, timeout_s=0.0, keep_last=keep_last, there=there,
        meta_of=lambda _: Meta(step=step, consumed_samples=0),
    )  # fmt: skip


def load(path: Path) -> dict[str, torch.Tensor]:
    """Read a whole state as two ranks, and check every digest."""
    found = {key: torch.full_like(tensor, 77) for key, tensor in state(0).items()}
    held = holdings(found)
    listings = [listing_of(each) for each in held]
    with Checkpoint.open(path) as checkpoint:
        for each in held:
            reader.read_into(checkpoint, each)
        sums = [reader.sums_here(checkpoint, rank, listings, ["a", "a"], each) for rank, each in enumerate(held)]
        reader.check_sums(checkpoint, sums)
    return found


def holds(path: Path, value: int) -> bool:
    return all(torch.equal(tensor, state(value)[key]) for key, tensor in load(path).items())


class Crash(BaseException):
    """The process dies here: nothing that handles errors sees it."""


CALLS = ("open", "pwrite", "fsync", "rename", "replace", "unlink", "posix_fallocate", "mkdir", "rmdir")


Point = tuple[str, int]
"""a call, and the how manieth of its name: how often a file is synced is not the same every time"""


def crash_at(patch: pytest.MonkeyPatch, point: Point | None, counted: list[Point]) -> None:
    """Die before a call that changes a disk, and before all after it."""
    times: Counter[str] = Counter()
    dead = threading.Event()

    def counting(name, real):
        def call(*args, **kwargs):
            counted.append((name, times[name]))
            times[name] += 1
            if counted[-1] == point:
                dead.set()
            if dead.is_set():
                raise Crash
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        patch.setattr(os, name, counting(name, getattr(os, name)))
    opened = io.open
    creating = counting("io.open", opened)

    def open_(file, mode="r", *rest, **more):
        return (creating if mode[0] != "r" else opened)(file, mode, *rest, **more)

    patch.setattr(io, "open", open_)


def points_after(first: Path, root: Path, *args: Any, **more: Any) -> list[Point]:
    """Return every point that a save into a copy of ``first`` passes."""
    counted: list[Point] = []
    shutil.copytree(first, root)
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, None, counted)
        save(root, *args, **more)
    return counted


def crashes(point: Point, root: Path, *args: Any, **more: Any) -> bool:
    """Save, and die at a point; false if there was none: a file may be synced once or twice."""
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, point, [])
        try:
            save(root, *args, **more)
        except Crash:
            return True
    assert point[0] == "fsync"
    return False


def test_a_crash_at_any_point_of_a_save_leaves_the_one_before_or_the_new_one(tmp_path: Path) -> None:
    """At every call that opens, syncs, renames or removes, and at every seventh of those that write numbers."""
    save(tmp_path / "first", 1)
    seen: set[Any] = set()
    counted = points_after(tmp_path / "first", tmp_path / "none", 2, keep_last=1)
    assert {"pwrite", "fsync", "rename", "replace", "io.open"} <= {name for name, _ in counted}  # and what ranks say
    points = [(name, times) for name, times in counted if name != "pwrite" or times % 7 == 0]
    assert len(points) > 30
    crashed = 0
    for number, point in enumerate(points):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", root)
        crashed += crashes(point, root, 2, keep_last=1)
        best = folder.candidates(root)[0]
        step = 2 if best.name.endswith("2") else 1
        seen.add(step)
        assert holds(best, step)
        assert all(holds(path, found) for found, path in folder.complete_in(root))
        assert folder.latest_of(root) in [path for _, path in folder.complete_in(root)]
        if number % 5 == 0:  # the next save is none the worse for it
            save(root, 3, keep_last=1)
            assert holds(root, 3)
        shutil.rmtree(root)
    assert seen == {1, 2}
    assert crashed > 30


def test_a_crash_at_any_point_of_saving_a_step_once_more_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """A job that came back to the step before saves a step that is there, perhaps as the only one."""
    save(tmp_path / "first", 2)
    seen: set[Any] = set()
    counted = points_after(tmp_path / "first", tmp_path / "none", 2, value=5)
    last = max(i for i, (name, _) in enumerate(counted) if name == "pwrite")
    crashed = 0
    for number, point in enumerate(counted[last:]):  # before that, nothing that was there is touched
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", root)
        crashed += crashes(point, root, 2, value=5)
        (best,) = folder.candidates(root)
        value = next(each for each in (2, 5) if holds(best, each))
        seen.add((value, best.name))
        assert folder.resolve(root) == best
        folder.clear_unfinished(root)
        assert folder.candidates(root) == [best]
        save(root, 2, value=7)  # the next save is none the worse for it
        assert holds(root, 7)
        folder.clear_unfinished(root)
        assert [path.name for path in root.iterdir() if "step-" in path.name] == ["step-00000002"]
    assert crashed > 5
    assert seen == {(2, "step-00000002"), (2, ".step-00000002.replaced"), (5, "step-00000002")}


def test_a_step_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 2)
    real = os.rename

    def rename(source, target, **kwargs):
        if str(source).endswith(".tmp") and Path(target) == path:
            raise OSError(5, "Input/output error")
        return real(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, 2, value=5)
    assert folder.candidates(tmp_path) == [path]
    assert holds(path, 2)


def test_worlds_that_save_at_the_same_time_leave_each_other_alone(tmp_path: Path) -> None:
    """A world does not wait for the last save of the one before it: that may end later, and never undoes its own."""
    save(tmp_path, 3)
    left = tmp_path / folder.temporary_name(1, "0123")

    def newer(older: Path) -> None:
        left.mkdir()
        save(tmp_path, 6)
        folder.clear_own(tmp_path, "4567", 6)
        assert older.is_dir()
        folder.clear_own(tmp_path, "0123", 0)
        assert left.is_dir()

    assert holds(save(tmp_path, 5, beside=newer), 5)
    assert folder.resolve(tmp_path).name == "step-00000006"
    assert [step for step, _ in folder.complete_in(tmp_path)] == [3, 5, 6]
    save(tmp_path, 4)  # a job that came back to the step before: the later ones are another history
    assert folder.resolve(tmp_path).name == "step-00000004"
    folder.clear_own(tmp_path, "0123", 1)
    assert not left.exists()


def test_the_newest_is_kept_and_the_oldest_goes(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep_last=2)
    assert [step for step, _ in folder.complete_in(tmp_path)] == [15, 20]
    assert folder.latest_of(tmp_path) == tmp_path / "step-00000020"
    assert holds(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000015", "step-00000020"]
    save(tmp_path, 20, keep_last=2)  # a job that came back to the step before saves it once more
    assert holds(tmp_path, 20)
    (tmp_path / "latest").write_text("step-00000099\n")  # the machine died, and only this name was on disk
    assert holds(tmp_path, 20)


def test_a_full_disk_fails_the_save_and_the_one_before_loads(tmp_path: Path) -> None:
    """A file system of 1 MiB, made for this test."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=1m tmpfs {disk} 2>/dev/null"):
        pytest.skip("not to be had here: a small disk; only root can mount one, and not everywhere")
    try:
        save(disk, 1)
        (disk / "filler").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize - 8192))
        with pytest.raises(OSError, match="No space left"):
            save(disk, 2)
        assert holds(disk, 1)
        assert folder.resolve(disk).name == "step-00000001"
        (disk / "filler").unlink()
        folder.clear_unfinished(disk)
        save(disk, 3)
        assert holds(disk, 3)
    finally:
        os.system(f"umount {disk}")


def _data_file(path: Path, kind: str = "weight") -> Path:
    return path / f"{kind}-00001.safetensors"


@pytest.mark.parametrize("kind", ["weight", "exp_avg", "rng"])
def test_any_flipped_byte_is_found_and_the_tensor_named(kind: str, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    file = _data_file(path, kind)
    whole = file.read_bytes()
    with Checkpoint.open(path) as checkpoint:
        entries = [entry for entry in checkpoint.index.entries if entry.file == file.name]
    for at in range(min(entry.begin for entry in entries), len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        hit = next(entry for entry in entries if entry.begin <= at < entry.begin + entry.nbytes)
        with Checkpoint.open(path) as checkpoint:
            bad = [entry.key for entry in checkpoint.index.entries if checkpoint.damage(entry)]
            assert bad == [hit.key]
        with pytest.raises(BadCheckpoint, match=rf"^{hit.key} in .*{file.name} is damaged, its digest does not match"):
            load(path)


def test_a_flipped_byte_of_the_index_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    whole = (path / "index.json").read_bytes()
    for at in range(0, len(whole) - 1, 11):
        (path / "index.json").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(BadCheckpoint, match=r"index\.json"):
            Checkpoint.open(path)


def test_damage_is_said_in_one_sentence_with_what_to_do(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    file = _data_file(path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(BadCheckpoint, match=rf"weight-00001.safetensors is cut short, it has {len(whole) - 1} bytes in"):
        Checkpoint.open(path)
    file.write_bytes(whole + b"x")
    with pytest.raises(BadCheckpoint, match=r"weight-00001\.safetensors is too long"):
        Checkpoint.open(path)
    file.unlink()
    with pytest.raises(BadCheckpoint, match=r"weight-00001\.safetensors is missing; use another checkpoint"):
        Checkpoint.open(path)
    file.write_bytes(whole)
    message = json.loads((path / "index.json").read_text())
    message["index"]["version"] = VERSION + 1
    (path / "index.json").write_text(json.dumps(message))
    with pytest.raises(BadCheckpoint, match=f"format version {VERSION + 1}, and this liverun reads versions up to"):
        Checkpoint.open(path)
    (path / "index.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="not the index of a liverun checkpoint"):
        Checkpoint.open(path)


def test_a_file_that_is_cut_while_it_is_read_is_said(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with Checkpoint.open(path) as checkpoint:
        os.truncate(_data_file(path), 300)
        out = np.empty(SHAPES[f"weight/{QKV}"], dtype=np.uint32)
        with pytest.raises(BadCheckpoint, match="is cut short within weight/"):
            checkpoint.read(f"weight/{QKV}", (0, 0), out)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("metadata.json", "a Megatron checkpoint of the torch_dist format; .*checkpoint convert"),
        (".metadata", r"a checkpoint of torch\.distributed\.checkpoint"),
        ("mp_rank_00_model_states.pt", "a DeepSpeed checkpoint"),
        ("notes.txt", "is no checkpoint, it has no index.json"),
        (".step-00000007.0a0b.tmp", "no checkpoint that was finished"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_said_to_be_what_it_is(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(BadCheckpoint, match=words):
        Checkpoint.open(tmp_path)
    with pytest.raises(BadCheckpoint, match="does not exist; point at the folder of a checkpoint"):
        Checkpoint.open(tmp_path / "nothing")


def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    import hashlib

    body = json.loads((save(tmp_path, 1) / "index.json").read_text())["index"]
    body["files"][0][0] = "../secret"
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    with pytest.raises(BadCheckpoint, match=r"'\.\./secret' is not the name of a file in the folder"):
        decode_index(json.dumps({"index": body, "digest": digest}).encode(), "x")


def test_a_rank_that_never_writes_is_named_and_one_that_cannot_is_heard(tmp_path: Path) -> None:
    held = holdings(state(1))
    listings = [listing_of(each) for each in held]
    whole = writer.tensors_in(listings)
    plan = writer.design(whole, FUSED)
    temporary = tmp_path / folder.temporary_name(1, "n")
    parts = writer.snapshot(writer.share_of(0, listings, ["a", "b"], whole), held[0])
    writer.write_share(temporary, plan, 0, parts, None)
    options = {"num_ranks": 2, "meta_of": lambda _: Meta(step=1, consumed_samples=0), "timeout_s": 0.1}
    with pytest.raises(TimeoutError, match=r"rank 1 has not written its share to .*; is that folder the same on every node"):
        writer.commit(tmp_path, temporary, plan, **options)
    writer.say_failed(temporary, 1, "No space left on device")
    with pytest.raises(BadCheckpoint, match="rank 1 could not write its share: No space left"):
        writer.commit(tmp_path, temporary, plan, **options)
    with pytest.raises(BadCheckpoint, match="no checkpoint that was finished"):
        folder.resolve(tmp_path)
    writer.write_share(temporary, plan, 1, [], None)  # says it wrote, and did not
    with pytest.raises(BadCheckpoint, match=r"exp_avg/embedding has 308 bytes, and the ranks wrote 176"):
        writer.commit(tmp_path, temporary, plan, **options)


def test_headers_are_as_the_safetensors_library_writes_them(tmp_path: Path) -> None:
    file = _data_file(save(tmp_path, 1)).read_bytes()
    (length,) = struct.unpack("<Q", file[:8])
    assert (8 + length) % 8 == 0
    table = json.loads(file[8 : 8 + length])
    ends = sorted(row["data_offsets"] for row in table.values())
    assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]]
    assert 8 + length + ends[-1][1] == len(file)
