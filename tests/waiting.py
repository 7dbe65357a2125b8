"""Waiting for conditions and for the end of processes, in tests."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

PATIENCE_S = 60.0


def wait_until(holds: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait until a condition holds; fail at the time limit."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_gone(pids: Collection[int], seconds: float = 30.0) -> None:
    """Wait until none of these processes runs."""
    until = time.monotonic() + seconds
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < until, f"processes left behind: {left}"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        return state_of(pid) not in "ZX"
    return sys.platform == "darwin"


def state_of(pid: int) -> str:
    """Return the letter of a process's state, as in /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
