"""``python -m pyhvd.spark.rank_process LIFE CONTROL``: a keeper, and the rank proper, forked from it.

A Spark task starts it; the arguments are descriptors. The keeper holds the other end of the task's lifetime
line: when that ends, however the task died (Spark kills its Python workers with SIGKILL), the keeper kills
the rank and all that the rank has started. It tells the task how the rank ended. Should the keeper itself be
killed, the kernel kills the rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from typing import NoReturn

from pyhvd.run.ending import die_with_parent


def main(life_fd: int, control_fd: int) -> None:
    """Fork the rank, and keep it."""
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
        from pyhvd.spark.rank import run_rank

        sys.exit(run_rank(socket.socket(fileno=control_fd)))
    with contextlib.suppress(OSError):  # the rank does it too; whoever comes first
        os.setpgid(pid, pid)
    _close_all_but(wake, told, life_fd)
    _tell(life_fd, pid)
    _keep(pid, wake, life_fd)


def _close_all_but(*kept: int) -> None:
    """Leave the rank the only one that holds its ends, so that who reads the others sees them end."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(devnull, fd)
    fds = sorted({*kept, devnull})
    for low, high in zip([2, *fds], [*fds, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


def _keep(pid: int, wake: int, life_fd: int) -> NoReturn:
    while not _has_ended(pid):
        ready, _, _ = select.select([wake, life_fd], [], [])
        if wake in ready:
            os.read(wake, 4096)
        if life_fd in ready and not _still_there(life_fd):
            break
    # While it is a zombie, or runs, its number is its own; what it has started goes with it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _tell(life_fd, code)
    os._exit(0)


def _tell(life_fd: int, number: int) -> None:
    """Say a number to the task: first the rank's process id, which is its group's, then how it ended."""
    with contextlib.suppress(OSError):
        os.write(life_fd, b"%d\n" % number)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _still_there(life_fd: int) -> bool:
    try:
        return bool(os.read(life_fd, 4096))
    except OSError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
