"""Files by which the ranks of a host publish the addresses of their metrics: one file per rank.

Owns :class:`RankFile`, its location and its format. The directory is ``pyhvd`` in $XDG_RUNTIME_DIR, else
``pyhvd-<uid>`` in the directory for temporary files. pyhvd uses the directory only if it belongs to this
user and has mode 0700, so that no other user can write such files.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import msgspec


class RankFile(msgspec.Struct, frozen=True):
    """The job and the process of one rank, and where the rank serves its metrics."""

    job: str
    rank: int
    size: int
    pid: int
    address: str
    port: int


def write_file(file: RankFile) -> Path:
    """Write a rank's file; return its path.

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
    path = folder / f"{file.job}.{file.rank}.json"
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_bytes(msgspec.json.encode(file))
    hidden.replace(path)  # a reader sees the whole file or none
    return path


def read_files() -> list[RankFile]:
    """Return the files of running ranks, by job and rank; remove those of ended ranks."""
    found: dict[tuple[str, int], RankFile] = {}
    for folder in filter(_is_private, _candidates()):
        for path in folder.glob("*.json"):
            try:
                file = msgspec.json.decode(path.read_bytes(), type=RankFile)
            except (OSError, msgspec.DecodeError):
                continue
            if _runs(file.pid):
                found[file.job, file.rank] = file
            else:
                path.unlink(missing_ok=True)
    return [found[key] for key in sorted(found)]


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


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # gone, or the id now belongs to another user's process
        return False
    return True
