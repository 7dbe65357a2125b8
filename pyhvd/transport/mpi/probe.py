"""Ask MPI what it is, in a process of its own: an MPI that hangs or crashes takes only that process with it.

It is run by path, so it imports nothing of pyhvd's. It prints one JSON object per stage, with all that is
known by then: the reader sees at which stage an MPI failed. Only Linux shows the library's path.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any


def library_path() -> str:
    """Return the path of the MPI library that this process has loaded; empty if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split()[-1]
            if "/libmpi" in path and ".so" in path:
                return path
    return ""


def main() -> None:
    """Print what is known of MPI, stage by stage."""
    found: dict[str, Any] = {"stage": ""}

    def tell(stage: str, **more: Any) -> None:
        found.update(more, stage=stage)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()

    tell("import")
    import mpi4py

    tell("load", mpi4py=mpi4py.__version__)
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    tell("init", library=MPI.Get_library_version(), path=library_path())
    granted = MPI.Init_thread(MPI.THREAD_MULTIPLE)
    levels = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
    names = {getattr(MPI, level): f"MPI_{level}" for level in levels}
    tell("finalize", threads=names[granted])
    MPI.Finalize()
    tell("done")


if __name__ == "__main__":
    main()
