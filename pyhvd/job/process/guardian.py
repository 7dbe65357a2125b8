"""A keeper: the parent of one process on behalf of another, the owner, which may be killed at any time.

The keeper holds the other end of the owner's lifetime line: when that ends, however the owner died (Spark
kills its Python workers with SIGKILL), the keeper ends the process and all that it has started. It tells the
owner how the process ended. Should the keeper itself be killed, the kernel kills the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from pyhvd.job.process.parent_death import die_with_parent


def keep(
    life_fd: int, body: Callable[[], int], grace: float = 0.0, clean: Callable[[], None] | None = None
) -> NoReturn:
    """Fork a process for `body`, a group of its own, and keep it; it leaves the keeper's other descriptors.

    Parameters
    ----------
    life_fd : int
        The lifetime line: a socket.
    body : callable
        What the process does; returns its exit code.
    grace : float
        Seconds from SIGTERM to SIGKILL when the owner is gone; 0 for SIGKILL at once.
    clean : callable, optional
        Called when nothing is left of the process, before the owner is told.
    """
    keeper = os.getpid()
    wake, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL, keeper)
        for fd in (wake, told, life_fd):
            os.close(fd)
        sys.exit(body())
    with contextlib.suppress(OSError):  # the process does it too; whoever comes first
        os.setpgid(pid, pid)
    _close_all_but(wake, told, life_fd)
    _tell(life_fd, pid)
    if not _wait(pid, wake, life_fd, None) and grace:
        _signal_group(pid, signal.SIGTERM)
        _wait(pid, wake, None, grace)
    # While it is a zombie, or runs, its number is its own; what it has started goes with it.
    _signal_group(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if clean is not None:
        clean()
    _tell(life_fd, code)
    os._exit(0)


def _close_all_but(*kept: int) -> None:
    """Leave the process the only one that holds its ends, so that who reads the others sees them end."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(devnull, fd)
    # Not all up to the limit: in containers that may be a thousand million, through which a kernel that does
    # not close a range at once, or a Python that does not ask it to, goes for minutes.
    for fd in map(int, os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(fd)


def _wait(pid: int, wake: int, life_fd: int | None, timeout: float | None) -> bool:
    """Return whether the process has ended; False when the owner has, or after `timeout` seconds."""
    until = None if timeout is None else time.monotonic() + timeout
    poll = select.poll()  # the owner may have given a descriptor that is too large for select()
    for source in (wake, life_fd):
        if source is not None:
            poll.register(source, select.POLLIN)
    while not _has_ended(pid):
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            return False
        ready = [fd for fd, _ in poll.poll(None if left is None else left * 1000)]
        if wake in ready:
            os.read(wake, 4096)
        if life_fd in ready and life_fd is not None and not _still_there(life_fd):
            return False
    return True


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _tell(life_fd: int, number: int) -> None:
    """Say a number to the owner: first the process's id, which is its group's, then how it ended."""
    with contextlib.suppress(OSError):
        os.write(life_fd, b"%d\n" % number)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _still_there(life_fd: int) -> bool:
    try:
        return bool(os.read(life_fd, 4096))
    except OSError:
        return False
