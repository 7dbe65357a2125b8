"""Files by which ranks publish the addresses of their metrics: one file per rank and reader.

1. For ``python -m pyhvd top``: a :class:`RankFile` in the user's folder, :mod:`pyhvd.common.user_folder`.
2. For Prometheus: a file of its service discovery ``file_sd`` in a folder that the user names. The folder may
   be on a file system of many hosts, and other programs may write there.

A reader sees a whole file or none. A rank removes its files at its end. The next reader, or writer to the
folder, removes those of a rank that was killed.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
from pathlib import Path

import msgspec

from pyhvd.common.processes import here
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
    _write(path, msgspec.json.encode(file))
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


class TargetGroup(msgspec.Struct, frozen=True):
    """A list of targets in a file of ``file_sd``, and their labels."""

    targets: list[str]
    labels: dict[str, str]


def make_targets_folder(folder: Path) -> None:
    """Make the folder for Prometheus if it does not exist; raise OSError if this rank cannot write there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write_targets(folder: Path, file: RankFile) -> Path:
    """Write a rank's address for Prometheus; return the path. Remove what this user's ended ranks have left.

    The name has host and process id, so no rank removes the file of its successor in an elastic job.

    Raises
    ------
    OSError
        The folder is not there, or this rank cannot write there.
    """
    place = here()
    node = {"__meta_pyhvd_host": place.host, "__meta_pyhvd_node": place.node}
    for path in folder.glob(f"*.{glob.escape(place.host)}.*.json"):
        if _is_left_over(path, node):
            path.unlink(missing_ok=True)
    host = place.host if file.address in ("0.0.0.0", "::") else file.address
    target = f"[{host}]:{file.port}" if ":" in host else f"{host}:{file.port}"
    labels = {"job_name": file.job, "__meta_pyhvd_rank": str(file.rank), "__meta_pyhvd_pid": str(file.pid)}
    path = folder / f"{file.job}.{file.rank}.{place.host}.{file.pid}.json"
    _write(path, msgspec.json.encode([TargetGroup([target], {**labels, **node})]))
    return path


def _is_left_over(path: Path, node: dict[str, str]) -> bool:
    """Return whether a file is of an ended rank of this user on this node."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return False
        (group,) = msgspec.json.decode(path.read_bytes(), type=list[TargetGroup])
        return node.items() <= group.labels.items() and not _runs(int(group.labels["__meta_pyhvd_pid"]))
    except (OSError, ValueError, KeyError):  # removed meanwhile, or a file of another program
        return False


def _write(path: Path, data: bytes) -> None:
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.unlink(missing_ok=True)
    with hidden.open("xb") as file:  # not through a link that another user has made
        file.write(data)
    hidden.replace(path)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # gone, or the id now belongs to another user's process
        return False
    return True
