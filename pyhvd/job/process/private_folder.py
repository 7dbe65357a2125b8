"""Private folders of a job's processes: a killed owner leaves its folder, and the next owner removes it.

A folder holds a file that its owner has locked. The kernel ends the lock with the owner, however that dies.

Invariants
----------
1. The file has its name only after it was locked. So a folder with an unlocked one has no living owner.
2. Only folders of this user and of this host are looked at: some shared file systems have locks that other
   hosts do not see. So the file has the host's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile

_PREFIX = "pyhvd-"


class PrivateFolder:
    """A new folder that only this user may enter; close it after use.

    Parameters
    ----------
    parent : str
        Where it is made; folders there without a living owner are removed.

    Attributes
    ----------
    path : str
        The folder.

    Raises
    ------
    OSError
        It cannot be made.
    """

    def __init__(self, parent: str) -> None:
        for name in os.listdir(parent):
            if name.startswith(_PREFIX):
                remove_abandoned(os.path.join(parent, name))
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        unlocked = os.path.join(self.path, "new")
        self._lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(unlocked, _lock_of(self.path))

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(folder: str) -> None:
    """Remove a private folder whose owner is dead; leave any other folder."""
    with contextlib.suppress(OSError):
        if os.lstat(folder).st_uid != os.getuid():
            return
        lock = os.open(_lock_of(folder), os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _lock_of(folder: str) -> str:
    return os.path.join(folder, f"owned-on-{socket.gethostname()}")
