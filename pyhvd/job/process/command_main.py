"""``python -m pyhvd.job.process.command_main LIFE COMMAND``: a keeper, and a shell command.

So mpiexec runs on the driver, and its daemons run beside the tasks. They have a temporary directory of their
own, as Open MPI's daemons refuse to start where an earlier job of theirs was killed; it goes when they end.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile

from pyhvd.job.process.guardian import keep

# Asked to end, mpiexec and its daemons tidy up after themselves: Open MPI's shared memory, its directories.
_GRACE_S = 1.0
# Open MPI puts paths of its own beneath it, those of sockets among them, which are 108 bytes at most.
_LONGEST = 60


def _execute(command: str, folder: str) -> int:
    os.execve("/bin/sh", ["sh", "-c", command], os.environ | {"TMPDIR": folder})


def _temporary_directory() -> str:
    path = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="pyhvd-", dir=path if len(os.fsencode(path)) < _LONGEST else "/tmp")


if __name__ == "__main__":
    folder = _temporary_directory()
    keep(
        int(sys.argv[1]),
        lambda: _execute(sys.argv[2], folder),
        grace=_GRACE_S,
        clean=functools.partial(shutil.rmtree, folder, ignore_errors=True),
    )
