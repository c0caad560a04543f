"""Names and order in a folder of checkpoints: what is complete, what is newest, what goes.

::

    root/
        latest                        the name of the newest complete one; moves last
        step-00000100/                complete: a folder gets this name only when all of it is on disk
            index.json
            weight-00001.safetensors  …
        .step-00000200.3f9c.tmp/      being written, or left by a job that died; never chosen
        .step-00000200.convert3f.tmp/ a conversion, running or interrupted; never chosen, and no job removes it
        .step-00000100.replaced/      the one before of a step that is saved once more, until that has its name

Needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from resharding.checkpoint.format import INDEX_NAME, BadCheckpoint

LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.(step-\d{8,})\.replaced")
_TEMPORARY = re.compile(r"\.step-(\d{8,})\.([0-9a-z]+)\.tmp")
_CONVERSION = "convert"


def folder_name(step: int) -> str:
    """Return the name of a complete checkpoint's folder."""
    return f"step-{step:08d}"


def temporary_name(step: int, nonce: str) -> str:
    """Return the name of a folder in which a checkpoint is being written; ``nonce`` is the job's own."""
    return f".{folder_name(step)}.{nonce}.tmp"


def conversion_name(step: int, mark: str) -> str:
    """Return the name of a folder that a conversion is written in; ``mark``, of digits and a to z, says from what."""
    return temporary_name(step, _CONVERSION + mark)


def fresh_nonce() -> str:
    """Return a word that no other attempt has."""
    return secrets.token_hex(4)


def complete_in(root: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every complete checkpoint, oldest first.

    Of a step that was being saved once more when the job died, it is the folder that was moved aside for it.
    """
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(root.iterdir(), reverse=True):  # those aside come last
            aside = _REPLACED.fullmatch(path.name)
            match = _NAME.fullmatch(aside[1] if aside else path.name)
            if match is not None and (path / INDEX_NAME).is_file():
                found.setdefault(int(match[1]), path)
    return sorted(found.items())


def unfinished_in(root: Path) -> list[Path]:
    """Return the folders with the name of a complete checkpoint that are none, newest first."""
    if not root.is_dir():
        return []
    named = (path for path in root.iterdir() if _NAME.fullmatch(path.name) and not (path / INDEX_NAME).is_file())
    return sorted(named, reverse=True)


def candidates(root: Path) -> list[Path]:
    """Return the complete checkpoints to try, best first: what ``latest`` names, then the others, newest first."""
    found = complete_in(root)[::-1]
    found.sort(key=lambda row: root / folder_name(row[0]) != latest_of(root))
    return [path for _, path in found]


def latest_of(root: Path) -> Path | None:
    """Return the folder that ``latest`` names, whether or not it is there."""
    try:
        name = (root / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return root / name if _NAME.fullmatch(name) else None


def resolve(path: Path) -> Path:
    """Return the folder of one checkpoint: ``path`` itself, or the newest in it.

    Raises ``BadCheckpoint`` for anything else, saying what it seems to be.
    """
    if (path / INDEX_NAME).is_file():
        return path
    found = candidates(path)
    if found:
        return found[0]
    if not path.exists():
        raise BadCheckpoint(f"{path} does not exist; point at the folder of a checkpoint")
    kind = kind_of(path)
    if kind is not None:
        raise BadCheckpoint(f"{path} is {_DESCRIBED[kind]}; turn it into one with 'liverun checkpoint convert'")
    if any(path.glob(".step-*.tmp")):
        raise BadCheckpoint(f"{path} holds no checkpoint that was finished; the job died while it wrote its first")
    raise BadCheckpoint(f"{path} is no checkpoint, it has no {INDEX_NAME}; point at a folder that has one")


def kind_of(path: Path) -> str | None:
    """Tell whose checkpoint a folder is, if it is not ours: ``megatron``, ``dcp``, ``universal`` or ``deepspeed``.

    A folder of several, with a file that names the newest, is of the kind of that one.
    """
    inner = newest_of_others(path)
    return next((kind for name, kind in _FOREIGN.items() if any(inner.glob(name))), None)


def newest_of_others(path: Path) -> Path:
    """Return the folder that DeepSpeed's ``latest`` or Megatron's file names, where there is one, or ``path``."""
    for pointer, form in ((LATEST, "{}"), ("latest_checkpointed_iteration.txt", "iter_{:0>7}")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            name = (path / pointer).read_text().strip()
            inner = path / form.format(name)
            if name and inner.parent == path and inner.is_dir():
                return inner
    return path


def misuse_of(root: Path) -> str | None:
    """Say in a sentence why no job can keep checkpoints of ours in ``root``, or ``None``."""
    if (root / INDEX_NAME).is_file():
        return f"{root} is itself a checkpoint; name the folder in which it lies, {root.absolute().parent}"
    kind = kind_of(root)
    if kind is None or (kind == "megatron" and not (newest_of_others(root) / ".metadata").exists()):
        return None
    return f"{root} is {_DESCRIBED[kind]}; convert it with 'liverun checkpoint convert' and name the folder it gives"


_FOREIGN = {
    "metadata.json": "megatron", ".metadata": "dcp", "zero/*/fp32.pt": "universal",
    "*mp_rank_*_model_states.pt": "deepspeed", "zero_pp_rank_*_model_states.pt": "deepspeed",
    "*_optim_states.pt": "deepspeed",
}  # fmt: skip
_DESCRIBED = {
    "megatron": "a Megatron checkpoint of the torch_dist format",
    "dcp": "a checkpoint of torch.distributed.checkpoint",
    "universal": "a DeepSpeed universal checkpoint", "deepspeed": "a DeepSpeed checkpoint",
}  # fmt: skip


def publish(root: Path, temporary: Path, step: int, *, is_latest: bool = True) -> Path:
    """Give a folder that is whole and on disk its name, then point ``latest`` at it. Raises ``OSError``.

    Without ``is_latest`` the pointer stays where it is. Both names go to disk together. Where a crash of the machine
    leaves only the second one, ``latest`` names what is not there, and the newest that is there is taken. One of the
    same step is moved aside first, where it is found as long as this one has not its name, and goes when it has.
    """
    path = root / folder_name(step)
    pointer = _write_beside(root / LATEST, f"{path.name}\n".encode()) if is_latest else None
    aside = root / f".{path.name}.replaced"
    try:
        sync_folder(temporary)
        if path.exists():
            if aside.exists():
                _discard(aside if (path / INDEX_NAME).is_file() else path)
            if path.exists():
                path.rename(aside)
        temporary.rename(path)
        if pointer is not None:
            pointer.replace(root / LATEST)
    except OSError:
        if pointer is not None:
            pointer.unlink(missing_ok=True)
        if aside.exists() and not path.exists():
            aside.rename(path)
        raise
    sync_folder(root)
    if aside.exists():
        _discard(aside)
    return path


def prune(root: Path, keep_last: int) -> list[Path]:
    """Remove all complete checkpoints but the ``keep_last`` newest; what ``latest`` names stays. Returns them."""
    old = complete_in(root)[: -keep_last or None]
    gone = [path for step, path in old if root / folder_name(step) != latest_of(root)]
    for path in gone:
        _discard(path)
    return gone


def clear_own(root: Path, nonce: str, step: int) -> None:
    """Remove what saves of one world, named by ``nonce``, have left half-written up to ``step``.

    Those of other worlds stay: beside this one, the world before it or after it may be writing.
    """
    for path in root.glob(f".step-*.{nonce}.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match is not None and int(match[1]) <= step:
            shutil.rmtree(path, ignore_errors=True)


def clear_unfinished(root: Path) -> None:
    """Remove what jobs that died have left half-written; conversions stay. For a job that has not saved yet."""
    for path in root.glob(".step-*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or not match[2].startswith(_CONVERSION):  # that may be running, or be taken up again
            shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".step-*.replaced"):
        named = _REPLACED.fullmatch(path.name)
        if named is not None and (root / named[1] / INDEX_NAME).is_file():
            _discard(path)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that nobody sees before it is whole; a crash of the machine may lose it. Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.{fresh_nonce()}.new")
    temporary.write_bytes(data)
    temporary.replace(path)


def write_synced(path: Path, data: bytes, *, with_name: bool = True) -> None:
    """Replace a file as a whole: after a crash it is the old one or the new one. Raises ``OSError``.

    Without ``with_name`` its name is on disk only once the folder is synced.
    """
    temporary = _write_beside(path, data)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if with_name:
        sync_folder(path.parent)


def _write_beside(path: Path, data: bytes) -> Path:
    """Write and sync a file under another name in the same folder, and return that. Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.{fresh_nonce()}.new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def sync_folder(path: Path) -> None:
    """Wait until the disk has a folder's names."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def own_disk(path: Path) -> str | None:
    """Return what names the file system of ``path``, which need not exist, if it is of this machine alone.

    ``None`` for one over a network, and for one that is not known. Containers of one machine get the same name.
    """
    there = next(each for each in (path, *path.parents) if each.exists())
    device = there.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    kinds = {line.partition(" - ")[2].split(" ")[0] for line in mounts if line.split(" ")[2] == number}
    return f"{boot}/{number}" if kinds and kinds <= _OWN_KINDS else None


_OWN_KINDS = {"ext2", "ext3", "ext4", "xfs", "f2fs", "btrfs", "tmpfs", "overlay"}
"""of file systems that one machine has to itself"""


def _discard(path: Path) -> None:
    """Remove a complete checkpoint: it loses its name first, so that no half of it is ever taken for a whole."""
    gone = path.with_name(f".{path.name.removeprefix('.')}.{fresh_nonce()}.old.tmp")
    with contextlib.suppress(FileNotFoundError):  # the save of another world has removed it
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
