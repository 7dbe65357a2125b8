"""Ending a process together with its parent (Linux)."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int, parent: int) -> None:
    """Make the kernel send signal `number` to this process when its parent dies (Linux only).

    `parent` is the parent's process id: if it died before this call, the signal is sent at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
