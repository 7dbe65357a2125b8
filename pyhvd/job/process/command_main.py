"""``python -m pyhvd.job.process.command_main LIFE GRACE FOLDER COMMAND``: a guardian, and a shell command.

The command's owner has made the folder for it. The guardian removes the folder after the command has ended,
however the owner ends. The command has GRACE seconds from SIGTERM to SIGKILL when the owner ends it.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys

from pyhvd.job.process.guardian import guard


def _execute(command: str) -> int:
    os.execv("/bin/sh", ["sh", "-c", command])


if __name__ == "__main__":
    life, grace, folder, command = sys.argv[1:]
    guard(
        int(life),
        lambda: _execute(command),
        grace=float(grace),
        clean=functools.partial(shutil.rmtree, folder, ignore_errors=True),
    )
