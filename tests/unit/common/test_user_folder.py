"""The folder of one user: another user's is skipped, with a word."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from pathlib import Path

import pytest

from pyhvd.common.user_folder import find_folders, make_folder


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The candidate in the directory for temporary files; the other is in $XDG_RUNTIME_DIR."""
    own, temporary = tmp_path / "own", tmp_path / "tmp"
    own.mkdir(mode=0o700)
    temporary.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary / f"pyhvd-{os.getuid()}"


def _spoil(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a folder unusable; return the word about it."""
    if how == "a file":
        folder.write_text("")
        return f"{folder} is no directory"
    folder.mkdir(mode=0o700)
    if how == "open":
        folder.chmod(0o755)
        return f"{folder} is open to other users: chmod 700 {folder}"
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = real(path)
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]]) if path == folder else found

    monkeypatch.setattr(Path, "lstat", lstat)
    return f"{folder} belongs to user {os.getuid() + 1}, not to this one ({os.getuid()})"


@pytest.mark.parametrize("how", ["a file", "open", "another user's"])
def test_a_folder_that_cannot_be_used_is_skipped_with_a_word(
    how: str, shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = Path(os.environ["XDG_RUNTIME_DIR"]) / "pyhvd"
    why = _spoil(first, how, monkeypatch)
    with caplog.at_level(logging.WARNING, "pyhvd"):
        assert make_folder() == shared
        assert find_folders() == [shared]
    assert caplog.messages == [f"{why}: using {shared} instead", f"skipped: {why}"]


def test_without_any_folder_each_one_is_named(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Path(os.environ["XDG_RUNTIME_DIR"]) / "pyhvd"
    whys = [_spoil(first, "open", monkeypatch), _spoil(shared, "another user's", monkeypatch)]
    with pytest.raises(PermissionError, match=re.escape("; ".join(whys))):
        make_folder()
    assert find_folders() == []


def test_the_first_folder_is_made_and_found(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Path(os.environ["XDG_RUNTIME_DIR"]) / "pyhvd"
    assert find_folders() == []
    assert make_folder() == first
    assert first.stat().st_mode & 0o777 == 0o700
    assert find_folders() == [first]
    assert not shared.exists()
    assert not caplog.messages
