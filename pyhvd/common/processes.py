"""Where ranks run, and what the kernel knows of a process that does not answer.

Owns: :class:`Place`, which ranks tell each other as they start, and reading ``/proc``. Knows of no ranks.
"""

from __future__ import annotations

import enum
import os
import socket
import time

import msgspec


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a process is.

    Attributes
    ----------
    host : str
        Name of its host.
    pid : int
        Its process id.
    node : str
        The same for two processes that see each other's ids in /proc; empty where there is no /proc.
    """

    host: str
    pid: int
    node: str = ""

    def __str__(self) -> str:
        return f"host {self.host} (pid {self.pid})"


class State(enum.Enum):
    """What a process does, as far as one can see from outside; the value says it in words."""

    STOPPED = "is stopped (by SIGSTOP or Ctrl-Z)"
    TRACED = "is held by a debugger"
    GONE = "has ended"
    RUNNING = "computes"
    WAITING = "waits for the disk, or for a file system over the network"
    SLEEPING = "sleeps"
    UNKNOWN = "cannot be seen from here"

    @property
    def is_lost(self) -> bool:
        """Whether the process will not go on by itself."""
        return self in (State.STOPPED, State.TRACED, State.GONE)


def here() -> Place:
    """Return where this process is."""
    return Place(socket.gethostname(), os.getpid(), node_of("pid"))


def boot_id() -> str:
    """Return what tells one run of a kernel from every other; empty where /proc does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def node_of(namespace: str) -> str:
    """Return what processes of one kernel and one namespace have in common; empty where /proc does not tell.

    ``namespace`` is as in namespaces(7): ``"pid"``, ``"net"``, ...
    """
    boot = boot_id()
    try:
        return f"{boot}/{os.stat(f'/proc/self/ns/{namespace}').st_ino}" if boot else ""
    except OSError:
        return ""


def state_of(place: Place, seen_from: Place) -> State:
    """Return what a process does; UNKNOWN if it is on another host, or in another container.

    Of a process that has something to run it takes a moment: up to a quarter of a second.
    """
    if not place.node or place.node != seen_from.node:
        return State.UNKNOWN
    letters = _letters(place.pid)
    if not letters or letters <= {"Z", "X"}:
        return State.GONE
    if "R" in letters and not letters & {"T", "t"} and _computes(place.pid):
        return State.RUNNING
    for letter, state in _STATES.items():
        if letter in letters:
            return state
    return State.SLEEPING


def _computes(pid: int) -> bool:
    """Return whether a process uses the processor: one that waits for the GIL wakes up every 5 ms."""
    used, since = _cpu_seconds(pid), time.monotonic()
    for _ in range(_LOOKS):
        time.sleep(_BETWEEN_LOOKS)
        if _cpu_seconds(pid) - used > _SHARE * (time.monotonic() - since):
            return True
    return False


_LOOKS = 5
_BETWEEN_LOOKS = 0.05  # s
_SHARE = 0.2  # of a core


_STATES = {
    "T": State.STOPPED,
    "t": State.TRACED,
    "D": State.WAITING,
}


def _letters(pid: int) -> set[str]:
    """Return the states of a process's threads, as letters of proc(5)."""
    letters = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                letters.add(file.read().rpartition(")")[2].split()[0])
    except (OSError, IndexError):  # it ended meanwhile
        pass
    return letters


def _cpu_seconds(pid: int) -> float:
    """Return the processor time (s) that a process has used; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
