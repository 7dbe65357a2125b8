"""stdin, stdout and stderr of a process that was started without some of them, as cron and daemons do."""

from __future__ import annotations

import os
import sys


def fill_standard_files() -> None:
    """Open /dev/null in place of each standard descriptor that is closed.

    Else the next file or pipe would get its number, and mpiexec fails.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
            continue
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
        if opened == number:
            os.set_inheritable(number, True)
        else:
            os.dup2(opened, number)
            os.close(opened)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - it stays
