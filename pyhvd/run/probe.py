"""Asks MPI what it is, in a process of its own: an MPI that hangs or crashes takes only this one with it.

Run by path, so that it needs nothing of pyhvd's. Prints one JSON object per stage, each with what is known
so far: a reader who hears only the first knows where it went wrong. Linux tells the library's path; elsewhere
that and CUDA-awareness stay unknown.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from pathlib import Path
from typing import Any


def library_path() -> str:
    """Return the path of the MPI library that this process has loaded, or nothing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split()[-1]
            if "/libmpi" in path and ".so" in path:
                return path
    return ""


def cuda_aware(path: str) -> bool | None:
    """Return what MPIX_Query_cuda_support says, which Open MPI and MPICH have; None where there is none."""
    if not path:
        return None
    query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
    return None if query is None else bool(query())


def main() -> None:
    """Tell what there is, stage by stage."""
    found: dict[str, Any] = {"stage": "import"}

    def tell(stage: str, **more: Any) -> None:
        found.update(more, stage=stage)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()

    import mpi4py

    tell("load", mpi4py=mpi4py.__version__)
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    tell("init", library=MPI.Get_library_version(), path=library_path())
    level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
    names = {
        MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
        MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
    }
    tell("finalize", threads=names[level], cuda_aware=cuda_aware(found["path"]))
    MPI.Finalize()
    tell("done")


if __name__ == "__main__":
    main()
