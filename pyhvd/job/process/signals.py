"""Signals of a job: which are passed on to ranks, and what they mean when they end a process."""

from __future__ import annotations

import signal

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


BLOCKED_OVER_FORK = (*FORWARDED, signal.SIGCHLD)


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def to_handle() -> list[signal.Signals]:
    """The signals to take and pass on: not SIGHUP under nohup, which has had it ignored."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in FORWARDED if not (nohup and number == signal.SIGHUP)]


def describe_signal(number: int) -> str:
    """Say how a process ended that a signal killed."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "an unnamed signal"
    hints = {
        signal.SIGKILL: "; was it out of memory? (see dmesg)",
        signal.SIGSEGV: "; set PYTHONFAULTHANDLER=1 to see where",
        signal.SIGBUS: "; is /dev/shm full? PYTHONFAULTHANDLER=1 shows where",
        signal.SIGABRT: "; set PYTHONFAULTHANDLER=1 to see where",
    }
    return f"was killed by {name} (signal {number}){hints.get(number, '')}"  # type: ignore[call-overload]
