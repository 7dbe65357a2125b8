"""Folders in the temporary directory: the next owner removes those of owners that were killed."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pyhvd.job.process.private_folder import PrivateFolder, remove_abandoned

_OWNER = """
import sys
from pathlib import Path
from pyhvd.job.process.private_folder import PrivateFolder
path = PrivateFolder(sys.argv[1]).path
(Path(path) / "session").mkdir()
print(path, flush=True)
sys.stdin.read()
"""


def start_owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", _OWNER, str(parent)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_a_folder_outlives_its_killed_owner_until_the_next_one(tmp_path: Path) -> None:
    first, left = start_owner(tmp_path)
    second, kept = start_owner(tmp_path)
    try:
        first.kill()
        first.wait()
        assert left.exists()
        own = PrivateFolder(str(tmp_path))
        assert sorted(tmp_path.iterdir()) == sorted([kept, Path(own.path)])
        assert Path(own.path).stat().st_mode & 0o777 == 0o700
        own.close()
        own.close()
        assert list(tmp_path.iterdir()) == [kept]
    finally:
        for owner in (first, second):
            owner.kill()
            owner.communicate()
    remove_abandoned(str(kept))
    assert list(tmp_path.iterdir()) == []


def test_the_folders_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyhvd-results").mkdir()  # a user's
    (tmp_path / "pyhvd-file").touch()
    first, left = start_owner(tmp_path)
    first.kill()
    first.communicate()
    for name, value in (("os.getuid", 12345), ("socket.gethostname", "other")):
        with monkeypatch.context() as patch:
            patch.setattr(name, lambda value=value: value)
            PrivateFolder(str(tmp_path)).close()
        assert left.exists()
    PrivateFolder(str(tmp_path)).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pyhvd-file", "pyhvd-results"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first = PrivateFolder(str(tmp_path))
    second = PrivateFolder(str(tmp_path))
    assert Path(first.path).exists()
    for folder in (first, second):
        folder.close()
    assert list(tmp_path.iterdir()) == []
