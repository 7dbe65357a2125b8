"""Files by which the ranks of a host publish the addresses of their metrics: one file per rank.

Owns :class:`RankFile` and its format. The files are in the user's folder: :mod:`pyhvd.common.user_folder`.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from pyhvd.common.user_folder import find_folders, make_folder


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
    path = make_folder() / f"{file.job}.{file.rank}.json"
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_bytes(msgspec.json.encode(file))
    hidden.replace(path)  # a reader sees the whole file or none
    return path


def read_files() -> list[RankFile]:
    """Return the files of running ranks, by job and rank; remove those of ended ranks."""
    found: dict[tuple[str, int], RankFile] = {}
    for folder in find_folders():
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


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # gone, or the id now belongs to another user's process
        return False
    return True
