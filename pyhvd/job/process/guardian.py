"""A guardian: a parent that ends its process when the process's owner dies, however the owner dies.

The guardian and the owner hold the two ends of a lifetime line, a socket pair.

1. When the owner's end closes, the guardian kills the process and all that the process started. Spark kills
   its Python workers with SIGKILL, so the owner cannot do that itself.
2. When the process ends, the guardian tells the owner how.
3. When the guardian is killed, the kernel kills the process.
4. Signals that launchers pass on to ranks have no effect on the guardian: Slurm sends them to all processes.

``python -m pyhvd.job.process.guardian LIFE CONTROL MODULE`` guards a rank; the rank's agent starts it.
LIFE and CONTROL are descriptors: the lifetime line, and the rank's control socket. MODULE has ``run_rank``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

from pyhvd.job.process.segments import remove, segments_of
from pyhvd.job.process.signals import FORWARDED

_PR_SET_PDEATHSIG = 1
# A process that is inside the kernel may stop later than it was told to.
_STOP_S = 1.0


def die_with_parent(number: int, parent: int) -> None:
    """Make the kernel send signal `number` to this process when its parent dies (Linux only).

    `parent` is the parent's process id: if it died before this call, the signal is sent at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def find_end(pid: int, states: int = os.WEXITED) -> os.waitid_result | None:
    """Return how a child has ended, and leave it unreaped; None while it runs.

    With ``os.WEXITED | os.WSTOPPED`` a child that is stopped counts too: none of its threads runs then.
    """
    return os.waitid(os.P_PID, pid, states | os.WNOHANG | os.WNOWAIT)


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process group, if there is one that this user may signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def ignore(numbers: Iterable[signal.Signals]) -> None:
    """Let signals have no effect on this process, which looks after others.

    Slurm sends a signal to every process of a job step. Programs that this process executes have the default
    action again, as they would not if the signals were ignored.
    """
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def guard(
    life_fd: int, body: Callable[[], int], grace: float = 0.0, clean: Callable[[], None] | None = None
) -> NoReturn:
    """Fork a process that runs `body` in a group of its own, and guard it until it ends.

    The process keeps all descriptors but the lifetime line; the guardian closes them.

    Parameters
    ----------
    life_fd : int
        The lifetime line: a socket.
    body : callable
        Runs in the process; returns its exit code.
    grace : float
        Seconds from SIGTERM to SIGKILL after the owner has died; 0 sends SIGKILL at once.
    clean : callable, optional
        Called after the process has ended, before the owner is told.
    """
    guardian = os.getpid()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL, guardian)
        for fd in (wake, waker, life_fd):
            os.close(fd)
        sys.exit(body())
    ignore(FORWARDED)
    with contextlib.suppress(OSError):  # the process does the same; either may be first
        os.setpgid(pid, pid)
    close_all_but(wake, waker, life_fd)
    _tell(life_fd, pid)
    ended = _wait(pid, wake, life_fd, None)
    if not ended and grace:
        signal_group(pid, signal.SIGTERM)
        ended = _wait(pid, wake, None, grace)
    # A process that has ended does not show them any more.
    segments = set() if ended else _stop_and_find_segments(pid, wake)
    # The process is not reaped yet, so that no other group can have its number.
    signal_group(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if segments:
        remove(segments)
    if clean is not None:
        clean()
    _tell(life_fd, code)
    os._exit(0)


def close_all_but(*open_fds: int) -> None:
    """Close all other descriptors, so that readers of the process's pipes see their end."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(devnull, fd)
    # Only open ones: in containers the limit may be a thousand million, and closing all up to it may take
    # minutes.
    for fd in map(int, os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")):
        if fd > 2 and fd not in open_fds:
            with contextlib.suppress(OSError):  # the descriptor of the listing
                os.close(fd)


def _stop_and_find_segments(pid: int, wake: int) -> set[str]:
    """Stop the process, so that it makes no more files, and return those of MPI's shared memory."""
    signal_group(pid, signal.SIGSTOP)
    _wait(pid, wake, None, _STOP_S, os.WEXITED | os.WSTOPPED)
    return segments_of(pid)


def _wait(pid: int, wake: int, life_fd: int | None, timeout: float | None, states: int = os.WEXITED) -> bool:
    """Return True when the process has ended; False when the owner has died, or after `timeout` seconds.

    `states` are those of :func:`find_end` for which to wait.
    """
    until = None if timeout is None else time.monotonic() + timeout
    poll = select.poll()  # a descriptor from the owner may be too large for select()
    for source in (wake, life_fd):
        if source is not None:
            poll.register(source, select.POLLIN)
    while find_end(pid, states) is None:
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            return False
        ready = [fd for fd, _ in poll.poll(None if left is None else left * 1000)]
        if wake in ready:
            os.read(wake, 4096)
        if life_fd in ready and life_fd is not None and not _owner_lives(life_fd):
            return False
    return True


def _tell(life_fd: int, number: int) -> None:
    """Send a number to the owner: first the process's id, which is its group's, then its exit code."""
    with contextlib.suppress(OSError):
        os.write(life_fd, b"%d\n" % number)


def _owner_lives(life_fd: int) -> bool:
    try:
        return bool(os.read(life_fd, 4096))
    except OSError:
        return False


def guard_rank(life: str, control: str, module: str) -> NoReturn:
    """Guard a rank; the arguments are those of the command."""
    guard(int(life), lambda: _run_rank(int(control), module))


def _run_rank(control_fd: int, module: str) -> int:
    found = importlib.import_module(module)  # in the rank alone: the guardian stays small
    code: int = found.run_rank(socket.socket(fileno=control_fd))
    return code


if __name__ == "__main__":
    guard_rank(*sys.argv[1:])
