"""Asks MPI what it is, in a process of its own: an MPI that hangs or crashes takes only this one with it.

Run by path, and so imports nothing of pyhvd's. Prints one JSON object per stage, each with what is known
so far: a reader who hears only the first knows where it went wrong. Linux tells the library's path; elsewhere
that stays unknown. Whether MPI takes memory on devices, ranks ask by :func:`cuda_aware` too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Mapping
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


_CUDA = 0
"""``MPIX_GPU_SUPPORT_CUDA`` of MPICH and what descends from it."""

_SWITCHES = (("Intel", "I_MPI_OFFLOAD"), ("MVAPICH", "MV2_USE_CUDA"))
"""Which libraries say it by a variable alone, without which they do not look where memory is."""


def cuda_aware(module: str, library: str, environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return whether MPI says that it takes addresses on CUDA devices; None where it does not say.

    It must have been initialised.

    Parameters
    ----------
    module : str
        Path of mpi4py's extension (``MPI.__file__``). What it is linked to is searched too, and only there
        is the library that is in use.
    library : str
        What ``MPI_Get_library_version`` returns.
    environ : mapping of str to str, optional
        The environment.
    """
    loaded = ctypes.CDLL(module)
    if (query := getattr(loaded, "MPIX_Query_cuda_support", None)) is not None:  # Open MPI, MPICH, MVAPICH
        return bool(query())
    if (query := getattr(loaded, "MPIX_GPU_query_support", None)) is not None:  # MPICH, Cray's
        says = ctypes.c_int(0)
        return None if query(_CUDA, ctypes.byref(says)) else bool(says.value)
    for name, variable in _SWITCHES:
        if name in library:
            return environ.get(variable, "0") not in ("", "0")
    return None


def refusal(aware: bool | None) -> str:
    """Return what an MPI says of memory on devices that is not to be given any, as the end of a sentence."""
    known = "says that it does not take" if aware is False else "does not say that it takes"
    return f"{known} memory on CUDA devices"


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
    tell("finalize", threads=names[level], cuda_aware=cuda_aware(MPI.__file__, found["library"]))
    MPI.Finalize()
    tell("done")


if __name__ == "__main__":
    main()
