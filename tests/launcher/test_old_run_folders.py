"""Run folders: whose they have to be; of jobs that have ended the latest few stay, and nothing else is taken away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launcher_bed import Bed

from launcher.rundir import JobError, JobFolder, JobRecord, list_jobs, set_aside

UID = os.geteuid()


def ended(root: Path, job: str, started: str, state: str = "finished", keep: int | None = None) -> JobFolder:
    folder = JobFolder.create(root, job, UID, keep=keep)
    folder.write_record(
        JobRecord(id=job, pid=1, uid=UID, state=state, started=started, command=[], socket="s", exit_code=0)
    )
    (folder.path / "logs" / "big").write_text("x")
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_the_latest_stay_and_what_runs_or_is_unknown_is_not_touched(tmp_path: Path) -> None:
    running = ended(tmp_path, "a-running", "2000", "running")
    for number, state in enumerate(("finished", "failed", "stopped", "running")):
        ended(tmp_path, f"z{9 - number}", f"200{number}", state).close()  # the last one is lost: its lock is free
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / ".gone-ff00").mkdir()  # a removal that was interrupted
    new = JobFolder.create(tmp_path, "new", UID, keep=2)
    assert names(tmp_path) == ["a-running", "new", "notes", "z6", "z7"]
    assert [job.id for job in list_jobs(tmp_path)] == ["a-running", "z7", "z6"]
    assert (tmp_path / "notes" / "mine.txt").exists()
    assert (running.path / "logs" / "big").exists()
    new.close()
    running.close()


def test_a_folder_that_is_being_taken_away_is_no_job(tmp_path: Path) -> None:
    for number in range(3):
        ended(tmp_path, f"j{number}", f"200{number}").close()
    (gone,) = set_aside(tmp_path, 2)
    assert (gone / "job.json").exists()
    assert [job.id for job in list_jobs(tmp_path)] == ["j1", "j2"]


def test_a_job_removes_what_earlier_ones_left_and_keeps_its_own(bed: Bed) -> None:
    script = bed.script("ok.py", "")
    for number in range(4):
        agent = bed.launch("--job", f"j{number}", "--keep-runs", "2", script)
        assert agent.wait() == 0
    assert names(bed.root) == ["j1", "j2", "j3"]
    again = bed.launch("--job", "j3", script, LIVERUN_KEEP_RUNS="0")
    assert again.wait() == 0
    assert names(bed.root) == ["j3"]
    wrong = bed.cli("--keep-runs", "-1", script)
    assert (wrong.returncode, wrong.stderr) == (2, "liverun: --keep-runs -1 is below 0\n")


def test_a_folder_of_jobs_that_is_a_link_or_that_others_can_change_is_refused(tmp_path: Path) -> None:
    def refused(root: Path, match: str) -> None:
        with pytest.raises(JobError, match=match) as error:
            JobFolder.create(root, "j", UID)
        assert error.value.exit_code == 77
        assert not (mine / "j").exists()

    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(mine)
    refused(tmp_path / "link", "link is a symbolic link; give the folder it leads to with --run-dir")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "dangling", "is a symbolic link")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "file is no folder")
    for mode in (0o777, 0o1777, 0o770, 0o702):
        mine.chmod(mode)
        refused(mine, f"has mode {mode:04o}, so others can write to it; make it 0700")
    mine.chmod(0o755)  # others may see that there is a job
    if UID == 0:
        os.chown(mine, 12345, -1)
        refused(mine, "belongs to uid 12345, not to 0")
        os.chown(mine, 0, -1)
    tmp_path.chmod(0o1777)  # a parent such as /tmp
    JobFolder.create(mine, "j", UID).close()
    JobFolder.create(tmp_path / "new" / "deep", "j", UID).close()
    assert (tmp_path / "new" / "deep").stat().st_mode & 0o777 == 0o700
    tmp_path.chmod(0o700)
