"""The run folder: where a job keeps its record, socket, events, journal and logs, and how it is found.

``<root>/<job>/`` (mode 0700) holds ``job.json`` (the record), ``agent.lock`` (held while the agent lives),
``agent.sock``, ``events.jsonl``, ``status.json`` (the last status, once the job has ended), ``store.db`` and
``logs/<worker>/{stdout,stderr}.log``. A record whose lock is free belongs to an agent that is gone.

The folders of jobs that have ended stay until later jobs push them out: a job that starts keeps the latest few
(``--keep-runs``) and removes the rest. ``<root>/.lock`` is held while a folder is made, renamed or taken away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOCKET_PATH_LIMIT_BYTES = 107
"""what ``sun_path`` holds on Linux, without its final zero"""
DOOMED_PREFIX = ".gone-"
ENDED_STATES = ("finished", "failed", "stopped", "lost")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What ``job.json`` says."""

    id: str
    pid: int
    uid: int
    state: str
    """``starting``, ``running``, ``stopping``, or one of ``ENDED_STATES``"""
    started: str
    """RFC 3339, UTC"""
    command: list[str]
    socket: str
    ended: str | None = None
    exit_code: int | None = None
    schema_version: int = 1

    @property
    def ended_already(self) -> bool:
        """Whether no agent serves this job any more."""
        return self.state in ENDED_STATES


class JobError(Exception):
    """A job that cannot be talked to: one sentence for the user, and the exit code that goes with it."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def default_root(environ: Mapping[str, str], uid: int) -> Path:
    """Where jobs are kept when nothing is said: the runtime folder, the state folder, else one under tmp."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "liverun"
    state = environ.get("XDG_STATE_HOME") or (
        environ["HOME"] + "/.local/state" if environ.get("HOME") else ""
    )
    if state:
        with contextlib.suppress(OSError):
            Path(state).mkdir(parents=True, exist_ok=True)
            if os.access(state, os.W_OK):
                return Path(state) / "liverun"
    return Path(tempfile.gettempdir()) / f"liverun-{uid}"


def resolve_root(run_dir: str | None, environ: Mapping[str, str], uid: int) -> Path:
    """Return the folder of all jobs.

    A job's own folder, which workers get as ``LIVERUN_RUN_DIR``, stands for its parent.
    """
    if not run_dir:
        return default_root(environ, uid)
    path = Path(run_dir).absolute()
    return path.parent if (path / "job.json").exists() else path


def private_folder(path: Path, uid: int) -> None:
    """Make a folder that only we can enter, or accept one that only we can change.

    Its parents are not judged: a sticky ``/tmp`` keeps a folder of ours as it is. Raises ``JobError`` for a link, for
    what is no folder, and for a folder of someone else or that someone else can write to.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    elsewhere = "choose another folder with --run-dir"
    if stat.S_ISLNK(found.st_mode):
        raise JobError(f"{path} is a symbolic link; give the folder it leads to with --run-dir", 77)
    if not stat.S_ISDIR(found.st_mode):
        raise JobError(f"{path} is no folder; {elsewhere}", 77)
    if found.st_uid != uid:
        raise JobError(f"{path} belongs to uid {found.st_uid}, not to {uid}; {elsewhere}", 77)
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        raise JobError(f"{path} has mode {mode:04o}, so others can write to it; make it 0700, or {elsewhere}", 77)


class JobFolder:
    """The run folder of the job that this agent runs; it holds the lock until :meth:`close`."""

    def __init__(self, path: Path, lock_fd: int, socket_path: Path, socket_folder: Path | None) -> None:
        self.path = path
        self.socket_path = socket_path
        self._lock_fd = lock_fd
        self._socket_folder = socket_folder

    @classmethod
    def create(
        cls, root: Path, job: str, uid: int, *, keep: int | None = None, shared: bool = False
    ) -> JobFolder:
        """Make the folder of a new job, and remove those of all but the ``keep`` latest that have ended.

        Raises ``JobError`` if a job of that id runs already. ``shared``: agents of several nodes may keep their
        folders of one job side by side here (a home folder that the nodes share, or several agents on one host); the
        later ones are called ``<job>@2`` and so on.
        """
        private_folder(root, uid)
        with root_lock(root):
            made = cls._make(root, job, shared=shared)
            doomed = [] if keep is None else set_aside(root, keep)
        for path in doomed:  # beside the lock: logs may be large
            shutil.rmtree(path, ignore_errors=True)
        return made

    @classmethod
    def _make(cls, root: Path, job: str, *, shared: bool) -> JobFolder:
        path = root / job
        if shared:
            names = (job, *(f"{job}@{number}" for number in range(2, 10_000)))
            path = next(root / name for name in names if not _lock_is_held(root / name / "agent.lock"))
        if path.exists():
            record = read_record(path)
            if record is not None and not record.ended_already:
                raise JobError(
                    f"a job {job} is running (pid {record.pid}); stop it, or give this one another --job", 2
                )
            earlier = next(n for n in range(1, 1_000_000) if not (root / f"{path.name}.{n}").exists())
            path.rename(root / f"{path.name}.{earlier}")
        path.mkdir(mode=0o700)
        try:
            (path / "logs").mkdir(mode=0o700)
            lock_fd = os.open(path / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        socket_path, socket_folder = path / "agent.sock", None
        if len(os.fsencode(socket_path)) > SOCKET_PATH_LIMIT_BYTES:
            socket_folder = Path(tempfile.mkdtemp(prefix="liverun-", dir="/tmp"))  # short on purpose
            socket_path = socket_folder / "agent.sock"
        return cls(path, lock_fd, socket_path, socket_folder)

    def write_record(self, record: JobRecord) -> None:
        """Replace ``job.json`` in one step."""
        write_json(self.path / "job.json", dataclasses.asdict(record))

    def log_folder(self, worker: str) -> Path:
        """Return the folder of one worker's logs, made if need be."""
        folder = self.path / "logs" / worker
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def close(self) -> None:
        """Remove the socket and give the lock back; record, events and logs stay."""
        self.socket_path.unlink(missing_ok=True)
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
        os.close(self._lock_fd)


@contextlib.contextmanager
def root_lock(root: Path) -> Iterator[None]:
    """Hold the lock of a folder of jobs; on a file system without locks, nothing is held."""
    fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def set_aside(root: Path, keep: int) -> list[Path]:
    """Rename what is to be removed: all but the ``keep`` latest jobs that have ended. The new, hidden names.

    What an interrupted removal left is among them. A folder without a record is nobody's that we know, and stays.
    """
    ended = [record for record in list_jobs(root) if record.ended_already]
    doomed = list(root.glob(f"{DOOMED_PREFIX}*"))
    for record in ended[: max(0, len(ended) - keep)]:
        new = root / f"{DOOMED_PREFIX}{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            (root / record.id).rename(new)
            doomed.append(new)
    return doomed


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is read whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    new.replace(path)


def fresh_job_id() -> str:
    """Return an id that no other launch has."""
    return f"j{secrets.token_hex(4)}"


def read_record(folder: Path) -> JobRecord | None:
    """Read what a job's folder says; ``None`` if unreadable. State ``lost``: its agent is gone."""
    try:
        values = json.loads((folder / "job.json").read_text())
        names = {field.name for field in dataclasses.fields(JobRecord)}
        record = JobRecord(**{name: value for name, value in values.items() if name in names})
    except (OSError, ValueError, TypeError):
        return None
    record = dataclasses.replace(record, id=folder.name)
    if record.ended_already or _lock_is_held(folder / "agent.lock"):
        return record
    return dataclasses.replace(record, state="lost")


def _lock_is_held(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def list_jobs(root: Path) -> list[JobRecord]:
    """Every job that left a record here, oldest first."""
    if not root.is_dir():
        return []
    records = [read_record(folder) for folder in root.iterdir() if folder.name[0] != "." and folder.is_dir()]
    return sorted((record for record in records if record is not None), key=lambda record: record.started)


def find_job(root: Path, job: str | None, uid: int, *, ended_too: bool) -> tuple[Path, JobRecord]:
    """Folder and record of the job that is meant. Raises ``JobError`` with what to do."""
    if job is None:
        records = list_jobs(root)
        running = [record for record in records if not record.ended_already]
        if not running and ended_too and records:
            return root / records[-1].id, records[-1]
        if not running:
            raise JobError(f"no job is running here (looked in {root}); start one with 'liverun run'", 69)
        if len({record.id.partition("@")[0] for record in running}) > 1:
            ids = ", ".join(record.id for record in running)
            raise JobError(f"{len(running)} jobs are running here: {ids}; say which one", 2)
        job = running[0].id
    folder = root / job
    if "/" in job or job in ("", ".", "..") or not folder.is_dir():
        ids = ", ".join(record.id for record in list_jobs(root)) or "none"
        raise JobError(f"there is no job {job} in {root}; known here: {ids}", 2)
    owner = folder.stat().st_uid
    if uid not in (owner, 0):
        raise JobError(f"job {job} belongs to uid {owner}; only its owner may talk to it", 77)
    record = read_record(folder)
    if record is None:
        raise JobError(f"job {job} has no readable record in {folder}", 69)
    if record.ended_already and not ended_too:
        if record.state == "lost":
            raise JobError(
                f"the agent of job {job} (pid {record.pid}) is gone without a word; the job is lost", 69
            )
        raise JobError(f"job {job} has ended ({record.state}, exit code {record.exit_code})", 69)
    return folder, record
