"""The files of shared memory that MPI makes in /dev/shm, and that a killed rank would leave there.

MPICH and Open MPI remove them in MPI_Finalize, which a killed rank does not reach. The kernel does not tell
which files a process had that has ended. So they are removed in two ways:

1. Under MPICH all ranks of a host have mapped the file when MPI is up, and no process opens it again. A rank
   then removes the name at once.
2. Open MPI's files are opened later too. A guardian removes those of a rank that it kills.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

_FOLDER = "/dev/shm/"
_DELETED = " (deleted)"
# How the names begin that MPICH and Open MPI give to shared memory.
_OF_MPICH, _OF_OPENMPI = "mpich_shm_", "sm_segment."


def segments_of(process: int, beginnings: tuple[str, ...] = (_OF_MPICH, _OF_OPENMPI)) -> set[str]:
    """Return the files of MPI's shared memory that a process has mapped; none if it has ended."""
    try:
        with open(f"/proc/{process}/maps", encoding="utf-8", errors="surrogateescape") as file:
            mapped = {line.rstrip("\n").partition(_FOLDER)[2] for line in file}
    except OSError:
        return set()
    return {_FOLDER + name for name in mapped if name.startswith(beginnings) and _DELETED not in name}


def remove(segments: Iterable[str]) -> None:
    """Remove the names of files; processes that have mapped them keep the memory."""
    for segment in segments:
        with contextlib.suppress(OSError):  # another rank, or its guardian, was faster
            os.unlink(segment)


def remove_own() -> None:
    """Remove the names of this rank's files of MPICH, which all ranks of its host must have mapped."""
    remove(segments_of(os.getpid(), (_OF_MPICH,)))
