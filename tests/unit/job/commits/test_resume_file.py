"""The resume file: what one run of a job leaves for the next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyhvd.job.commits.resume_file import ResumeError, ResumeFile


def test_a_later_run_knows_the_job_and_the_last_generation(tmp_path: Path) -> None:
    path = tmp_path / "resume"
    first = ResumeFile(str(path))
    assert first.first == 0
    assert not path.exists()
    first.note(0)
    first.note(1)
    assert path.stat().st_mode & 0o777 == 0o600
    later = ResumeFile(str(path))
    assert (later.job, later.key, later.first) == (first.job, first.key, 2)
    assert ResumeFile(str(tmp_path / "other")).key != first.key
    later.remove()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        ('{"job": "a", "key": "", "generation": 1}', 0o640, "is not yours alone: chmod 600"),
        ("weights", 0o600, "is no resume file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, mode: int, told: str) -> None:
    path = tmp_path / "resume"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ResumeError, match=told):
        ResumeFile(str(path))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"cannot write the resume file .*: No such file"):
        ResumeFile(str(tmp_path / "none/resume")).note(0)
