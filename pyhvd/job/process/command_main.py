"""``python -m pyhvd.job.process.command_main LIFE COMMAND``: a guardian, and a shell command.

mpiexec runs in this way on the driver, and its daemons beside the tasks. The command has a temporary
directory of its own, which the guardian removes: Open MPI's daemons refuse to start beside files that a
killed job left.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile

from pyhvd.job.mpi.openmpi.settings import short_temporary_directory
from pyhvd.job.process.guardian import guard

# On SIGTERM, mpiexec and its daemons remove Open MPI's shared memory and directories.
_GRACE_S = 1.0


def _execute(command: str, folder: str) -> int:
    os.execve("/bin/sh", ["sh", "-c", command], os.environ | {"TMPDIR": folder})


if __name__ == "__main__":
    folder = tempfile.mkdtemp(prefix="pyhvd-", dir=short_temporary_directory())
    guard(
        int(sys.argv[1]),
        lambda: _execute(sys.argv[2], folder),
        grace=_GRACE_S,
        clean=functools.partial(shutil.rmtree, folder, ignore_errors=True),
    )
