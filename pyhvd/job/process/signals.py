"""The signals of a job: which of them ranks get, and texts about how a process ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType

from pyhvd.common.text import describe_ranks

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Launchers, agents and supervisors pass these signals on to ranks."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The forwarded signals that end the job."""
PAUSING = (signal.SIGTSTP, signal.SIGCONT)
"""The signal of Ctrl-Z suspends the whole job, and SIGCONT resumes it."""
GRACE_S = 5.0
"""After a signal that ends the job, ranks have this long to clean up. A second signal ends them at once."""
SAY_WAITING_S = 1.0
"""After a signal that ends the job, ranks that have not ended by this time are named."""
BLOCKED_OVER_FORK = (*FORWARDED, signal.SIGCHLD)
"""A supervisor blocks these from before it forks the rank until it has handlers for them."""

_HINTS = {
    signal.SIGKILL: "; was it out of memory? (see dmesg)",
    signal.SIGBUS: "; is /dev/shm full?",
}
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


def to_handle() -> list[signal.Signals]:
    """Return the signals to handle and forward; not SIGHUP if this process ignores it, as under nohup."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in FORWARDED if not (nohup and number == signal.SIGHUP)]


def wake_on_signals(handler: Callable[[int, FrameType | None], None]) -> int:
    """Handle the forwarded signals; return a descriptor that each of them, and SIGCHLD, makes readable."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in to_handle():
        signal.signal(number, handler)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read


def is_in_background(source: int) -> bool:
    """Return whether a descriptor is a terminal in whose background this process runs."""
    try:
        return os.tcgetpgrp(source) != os.getpgrp()
    except OSError:  # no terminal
        return False


def describe_waiting(ranks: Sequence[int]) -> str:
    """Return the line that names the ranks that still run after a signal that ends the job."""
    verb = "is" if len(ranks) == 1 else "are"
    killed = f"will be killed {GRACE_S:g} s after the signal, or at once by Ctrl-C"
    return f"pyhvd: {describe_ranks(ranks)} {verb} still stopping, and {killed}"


def describe_exit(code: int, where: str = "") -> str:
    """Describe how a process ended: by its exit code, or by a signal if the code is negative.

    `where`: the line of the program at which the signal killed it, if that is known.
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"was killed by an unnamed signal (signal {-code})"
    killed = f"was killed by {number.name} (signal {-code})" + (f" {where}" if where else "")
    remedy = "; set PYTHONFAULTHANDLER=1 to see where" if number in _CRASHES and not where else ""
    return killed + _HINTS.get(number, "") + remedy


def shell_code(code: int) -> int:
    """Return an exit code as a shell reports it: 128 plus the signal's number after a signal."""
    return code if code >= 0 else 128 - code
