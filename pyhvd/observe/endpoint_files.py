"""Where the ranks of a host say how their metrics can be read: a file each, in a directory of the user's.

Owns: :class:`RankFile`, its place and its form. The directory is ``pyhvd`` in $XDG_RUNTIME_DIR, else
``pyhvd-<uid>`` in the directory for temporary files. It is used only if it belongs to this user and is closed
to everybody else; so nobody else's files are ever believed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import msgspec


class RankFile(msgspec.Struct, frozen=True):
    """How one rank's metrics can be read.

    Attributes
    ----------
    job : str
        Name of the job, the same for all of its ranks.
    rank, size : int
        Which rank, of how many.
    pid : int
        Its process.
    address, port : str, int
        Where it serves them.
    """

    job: str
    rank: int
    size: int
    pid: int
    address: str
    port: int


def write_file(file: RankFile) -> Path:
    """Write a rank's file; return where.

    Raises
    ------
    OSError
        There is no directory to write to that is this user's own.
    """
    folder = _candidates()[0]
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not a directory of this user's own, closed to others (mode 0700)")
    path = folder / f"{file.job}.{file.rank}.json"
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_bytes(msgspec.json.encode(file))
    hidden.replace(path)  # whoever looks sees all of it
    return path


def read_files() -> list[RankFile]:
    """Return the files of ranks that run, by job and rank. Those of ranks that have gone are removed."""
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
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's by now
        return False
    return True
