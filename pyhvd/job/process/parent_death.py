"""A process that dies with its parent (Linux)."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int, parent: int) -> None:
    """Have the kernel send signal `number` when the parent dies (Linux only).

    `parent` is its process id: it may have died before the request.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
