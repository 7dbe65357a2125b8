"""The files of shared memory that MPI makes in /dev/shm, and that a killed rank would leave there.

MPICH and Open MPI remove them in MPI_Finalize, which a killed rank does not reach. The kernel does not tell
which files a process had that has ended. So they are removed in five ways:

1. Under MPICH all ranks of a host have mapped the file when pyhvd is up, and no process opens it again. Then
   a rank removes the name at once.
2. A guardian removes the names of what a rank has open or mapped when it kills the rank. It has to: Open
   MPI's files are opened later too, and UCX, which carries MPICH's messages, names its files at random. The
   guardian stops the rank before it looks, so that the rank makes no file after that.
3. MPICH derives the name from that of the world, which PMI gives. When no rank of a world is left on a host,
   its agent removes that name. The file may have been made by a rank that was killed in MPI_Init.
4. A rank under a supervisor tells the names when MPI_Init has returned. The supervisor removes them if the
   rank fails: the job then ends.
5. At the start of a job that mpiexec runs, and by an agent after a job that failed, what earlier jobs of
   this user have left is removed: :func:`sweep`.

UCX removes the name of a file as soon as it has opened the file. A rank that ends by itself in between leaves
it. Ranks of elastic jobs may end at any moment, so their UCX makes no files
(:func:`pyhvd.job.mpi.rank_env.set_defaults`). In other jobs, and if the user sets UCX_TLS, such a rank leaves
at most one file until the next sweep.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import time
from collections.abc import Iterable

_FOLDER = "/dev/shm/"
_DELETED = " (deleted)"
# How the names begin that they give to shared memory.
_OF_MPICH, _OF_OPENMPI, _OF_UCX = "mpich_shm_", "sm_segment.", "ucx_shm_posix_"
# A window's file where the kernel cannot do without a name (transport/mpi/fabric.py), and the folder in which
# a host's ranks meet (transport/link_sharing.py). No other name: TMPDIR may be /dev/shm.
_OF_WINDOW, _OF_LINKS = "pyhvd-window-", "pyhvd-links-"
# Of Hydra; ranks read it in MPI_Init.
_OF_HYDRA = "/tmp/hydra_hwloc_xmlfile_*"
# A file that no process has is left from a job if it is older: a process of another container may have it.
_OLD_S = 60.0
# A file that no process needs to have open is left from a job if it is older.
_VERY_OLD_S = 600.0
# FNV-1a, by which MPICH makes a number from a world's name.
_FNV_START, _FNV_PRIME, _FNV_MASK = 2166136261, 16777619, 0xFFFFFFFF


def segments_of(process: int, beginnings: tuple[str, ...] = (_OF_MPICH, _OF_OPENMPI, _OF_UCX)) -> set[str]:
    """Return the files of MPI's shared memory that a process has open or mapped; none if it has ended."""
    return {_FOLDER + name for name in _names(process, _FOLDER, beginnings)}


def _names(process: int | str, folder: str, beginnings: tuple[str, ...]) -> set[str]:
    """Return the names of files in a folder that a process has open or mapped, without deleted ones."""
    paths: list[str] = []
    for link in glob.glob(f"/proc/{process}/fd/*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            paths.append(os.readlink(link))
    with contextlib.suppress(OSError), open(f"/proc/{process}/maps", errors="surrogateescape") as file:
        paths += file.read().splitlines()
    names = {path.partition(folder)[2] for path in paths}
    return {name for name in names if name.startswith(beginnings) and _DELETED not in name}


def remove(segments: Iterable[str]) -> None:
    """Remove the names of files; processes that have mapped them keep the memory."""
    for segment in segments:
        with contextlib.suppress(OSError):  # another rank, or its guardian, was faster
            os.unlink(segment)


def remove_own() -> None:
    """Remove the names of this rank's files of MPICH, which all ranks of its host must have mapped."""
    remove(segments_of(os.getpid(), (_OF_MPICH,)))


def remove_of_world(name: str) -> None:
    """Remove the names of MPICH's files of a world, of which no rank may be left on this host."""
    number = _FNV_START
    for byte in name.encode():
        number = (number ^ byte) * _FNV_PRIME & _FNV_MASK
    remove(glob.glob(f"{_FOLDER}{_OF_MPICH}{number:x}_*"))


def sweep(folder: str = _FOLDER, of_hydra: str = _OF_HYDRA) -> None:
    """Remove what jobs of this user have left that did not reach their ends.

    Files that a process has open or mapped stay, as far as this one may see it, as do new ones, and those of
    Open MPI: its ranks open them at any time.
    """
    found = [path for name in (_OF_MPICH, _OF_UCX, _OF_WINDOW) for path in glob.glob(f"{folder}{name}*")]
    unused = [path for path in found if os.path.isfile(path) and _is_left(path, _OLD_S)]
    if unused:  # they are older than the list of processes
        beginnings = tuple(os.path.basename(path) for path in unused)
        used = {name for process in os.listdir("/proc") for name in _names(process, folder, beginnings)}
        remove(path for path in unused if path.removeprefix(folder) not in used)
    for path in glob.glob(f"{folder}{_OF_LINKS}*"):
        if _is_left(path, _VERY_OLD_S):
            shutil.rmtree(path, ignore_errors=True)  # it follows no symbolic link
    remove(path for path in glob.glob(of_hydra) if _is_left(path, _VERY_OLD_S))


def _is_left(path: str, age: float) -> bool:
    """Return whether this user made a file longer ago than `age` seconds."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return found.st_uid == os.getuid() and found.st_mtime < time.time() - age
    return False
