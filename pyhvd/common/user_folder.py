"""The folder in which processes of one user on one host find each other.

It is ``pyhvd`` in $XDG_RUNTIME_DIR, else ``pyhvd-<uid>`` in the directory for temporary files. It is used
only if it belongs to this user and has mode 0700. So no other user can put files there, read them, or connect
to sockets in it. If the first one is another user's, the second one is used.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

_log = logging.getLogger("pyhvd")


def make_folder() -> Path:
    """Return the folder, which is made if it does not exist.

    A folder that cannot be used is skipped, with a warning.

    Raises
    ------
    OSError
        No private directory of this user is available.
    """
    skipped: list[str] = []
    for folder in _candidates():
        with contextlib.suppress(OSError):  # the check below says why
            folder.mkdir(mode=0o700)
        if not (why := _why_not(folder)):
            for text in skipped:
                _log.warning("%s: using %s instead", text, folder)
            return folder
        skipped.append(why)
    raise PermissionError("; ".join(skipped))


def find_folders() -> list[Path]:
    """Return the folders that exist: processes of one user may see different variables.

    A folder of another user is skipped, with a warning, once.
    """
    found = []
    for folder in _candidates():
        if not (why := _why_not(folder)):
            found.append(folder)
        elif os.path.lexists(folder):
            _say_skipped(why)
    return found


@functools.cache
def _say_skipped(why: str) -> None:
    _log.warning("skipped: %s", why)


def _candidates() -> list[Path]:
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    shared = Path(tempfile.gettempdir()) / f"pyhvd-{os.getuid()}"
    return [Path(own) / "pyhvd", shared] if own and Path(own).is_dir() else [shared]


def _why_not(folder: Path) -> str:
    """Return why a folder cannot be used; empty if it can."""
    try:
        found = folder.lstat()
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no directory"
    if found.st_uid != os.getuid():
        return f"{folder} belongs to user {found.st_uid}, not to this one ({os.getuid()})"
    return f"{folder} is open to other users: chmod 700 {folder}" if found.st_mode & 0o077 else ""
