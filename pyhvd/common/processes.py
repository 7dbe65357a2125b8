"""The place of a process, and the state of one that does not answer.

Owns: :class:`ProcessPlace`, which processes exchange as they start, and reading ``/proc``. It knows
nothing of ranks.
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import time

import msgspec

from pyhvd.common.kernel import node_of


class ProcessPlace(msgspec.Struct, frozen=True, array_like=True):
    """The host and the id of a process."""

    host: str
    pid: int
    node: str = ""
    """Equal for two processes that see each other's ids in /proc; empty without /proc."""

    def __str__(self) -> str:
        return f"host {self.host} (pid {self.pid})"


class ProcessState(enum.Enum):
    """The state of a process, as seen from another process; the value is its text."""

    STOPPED = "is stopped (by SIGSTOP or Ctrl-Z)"
    TRACED = "is held by a debugger"
    GONE = "has ended"
    RUNNING = "computes"
    WAITING = "waits for the disk, or for a file system over the network"
    SLEEPING = "sleeps"
    UNKNOWN = "cannot be seen from here"

    @property
    def is_lost(self) -> bool:
        """Whether the process cannot continue by itself."""
        return self in (ProcessState.STOPPED, ProcessState.TRACED, ProcessState.GONE)


def here() -> ProcessPlace:
    """Return the place of this process."""
    return ProcessPlace(socket.gethostname(), os.getpid(), node_of("pid"))


def has_ended(place: ProcessPlace, seen_from: ProcessPlace) -> bool:
    """Return whether a process has ended, as far as that is seen from another one; takes microseconds."""
    return bool(place.node) and place.node == seen_from.node and _letters(place.pid) <= {"Z", "X"}


def state_of(place: ProcessPlace, seen_from: ProcessPlace) -> ProcessState:
    """Return the state of a process; UNKNOWN if it is on another host, or in another container.

    This takes up to 0.25 s for a process that can run.
    """
    if not place.node or place.node != seen_from.node:
        return ProcessState.UNKNOWN
    letters = _letters(place.pid)
    if letters <= {"Z", "X"}:
        return ProcessState.GONE
    if "R" in letters and not letters & {"T", "t"} and _computes(place.pid):
        return ProcessState.RUNNING
    for letter, state in _STATES.items():
        if letter in letters:
            return state
    return ProcessState.SLEEPING


def _computes(pid: int) -> bool:
    """Return whether a process uses the processor; one that waits for the GIL only wakes every 5 ms.

    On a busy machine a process that computes may get a small share of a core. But then a thread of it has run
    between two looks and has not gone to sleep, as a thread that waits for the GIL does after each look.
    """
    used, since, before = _cpu_seconds(pid), time.monotonic(), _runs(pid)
    for _ in range(_LOOKS):
        time.sleep(_BETWEEN_LOOKS)
        if _cpu_seconds(pid) - used > _SHARE * (time.monotonic() - since):
            return True
        runs = _runs(pid)
        for thread in runs.keys() & before.keys():
            (ran, sleeps), (ran_before, sleeps_before) = runs[thread], before[thread]
            if sleeps == sleeps_before and ran - ran_before > _LEAST_RUN:
                return True
        before = runs
    return False


_LOOKS = 5
_BETWEEN_LOOKS = 0.05  # s
_SHARE = 0.2  # of a core
_LEAST_RUN = 1_000_000  # ns
_STATES = {"T": ProcessState.STOPPED, "t": ProcessState.TRACED, "D": ProcessState.WAITING}


def _letters(pid: int) -> set[str]:
    """Return the states of a process's threads, as letters of proc(5)."""
    letters = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            letters.add(_stat(f"/proc/{pid}/task/{thread}/stat")[0])
    except (OSError, IndexError):  # the process has ended
        pass
    return letters


def _cpu_seconds(pid: int) -> float:
    """Return the processor time (s) that a process has used; 0 if it has ended."""
    try:
        fields = _stat(f"/proc/{pid}/stat")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def _runs(pid: int) -> dict[str, tuple[int, int]]:
    """Return, by thread, for how long it has run (ns), and how often it has gone to sleep by itself."""
    runs = {}
    with contextlib.suppress(OSError, IndexError, ValueError):  # ended meanwhile, or a kernel without these
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                ran = int(file.read().split()[0])
            with open(f"/proc/{pid}/task/{thread}/status", encoding="utf-8", errors="replace") as file:
                sleeps = file.read().partition("\nvoluntary_ctxt_switches:")[2].split()[0]
            runs[thread] = ran, int(sleeps)
    return runs


def _stat(path: str) -> list[str]:
    """Return the fields after the name in a stat file of proc(5), of a process or a thread."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
