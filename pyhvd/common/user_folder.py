"""The folder in which processes of one user on one host find each other.

It is ``pyhvd`` in $XDG_RUNTIME_DIR, else ``pyhvd-<uid>`` in the directory for temporary files. It is used
only if it belongs to this user and has mode 0700. So no other user can put files there, read them, or connect
to sockets in it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def make_folder() -> Path:
    """Return the folder, which is made if it does not exist.

    Raises
    ------
    OSError
        No private directory of this user is available.
    """
    folder = _candidates()[0]
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not a private directory of this user (owner, mode 0700)")
    return folder


def find_folders() -> list[Path]:
    """Return the folders that exist: processes of one user may see different variables."""
    return [folder for folder in _candidates() if _is_private(folder)]


def _candidates() -> list[Path]:
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    shared = Path(tempfile.gettempdir()) / f"pyhvd-{os.getuid()}"
    return [Path(own) / "pyhvd", shared] if own and Path(own).is_dir() else [shared]


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
