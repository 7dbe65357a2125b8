"""Runs the script that prints an elastic job's hosts, once a second, and reads what it prints.

The script runs in a session of its own, below a shell that kills all of it when the driver dies. One thread
runs it, and shares nothing but a queue and two pipes: a script that hangs stops nobody else.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pyhvd.job.member_host import FoundHost
from pyhvd.job.process.guardian import signal_group

INTERVAL_S = 1.0
"""From the start of a run to the start of the next, if the run is shorter."""
LIMIT_S = 10.0
"""A run that takes longer is killed."""
# A run that prints more, to stdout or to stderr, is killed, or cut.
_MOST_BYTES = 1 << 20
_ERRORS_SHOWN = 300
_LINE_SHOWN = 80
_LOOK_S = 0.01
_JOIN_S = 2.0

# Its stdin is a pipe whose other end the driver alone holds: when that closes, the group dies. Each child is
# waited for, because the first process of a container may reap none.
_GUARDED = (
    "exec 3<&0 </dev/null; (read -r line <&3; kill -9 0) >/dev/null 2>&1 & "
    '"$@" 3<&-; code=$?; kill $! 2>/dev/null; wait $! 2>/dev/null; exit $code'
)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Found:
    """A run that ended well: the hosts, and a text for each bad line."""

    hosts: tuple[FoundHost, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """A run that failed, and why."""

    why: str


def parse_hosts(text: str, slots: int = 1) -> tuple[tuple[FoundHost, ...], tuple[str, ...]]:
    """Return the hosts that a script printed, and a text for each bad line.

    Blank lines, and text after ``#``, are ignored. Of a host that is printed twice the last line counts.

    Parameters
    ----------
    text : str
        Lines such as ``h``, ``h:2``, ``[fe80::1]`` or ``[fe80::1]:2``.
    slots : int
        The slots of a line that gives none.
    """
    hosts: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        host = _parse_entry(entry, slots)
        if host is None:
            shown = entry if len(entry) <= _LINE_SHOWN else f"{entry[:_LINE_SHOWN]}..."
            problems.append(f"line {number}, {shown!r}: expected h, h:2 or [fe80::1]:2")
        else:
            hosts[host.name] = host.slots
    return tuple(FoundHost(name, each) for name, each in hosts.items()), tuple(problems)


def _parse_entry(entry: str, slots: int) -> FoundHost | None:
    """Return the host of a line; None if the line is bad."""
    if entry.startswith("["):
        name, bracket, rest = entry[1:].partition("]")
        good = bool(bracket) and _is_ipv6(name) and rest[:1] in ("", ":")
        colon, number = rest[:1], rest[1:]
    else:
        name, colon, number = entry.partition(":")
        good = _NAME.fullmatch(name) is not None
    if not colon:
        return FoundHost(name, slots) if good else None
    number = number.strip()
    given = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0
    return FoundHost(name, given) if good and given else None


def _is_ipv6(name: str) -> bool:
    try:
        ipaddress.IPv6Address(name)
    except ValueError:
        return False
    return True


class Discovery:
    """Runs a script again and again, until :meth:`close`.

    Parameters
    ----------
    command : sequence of str
        The script and its arguments.
    slots : int
        The slots of a host whose line gives none.
    interval, limit : float
        See :data:`INTERVAL_S` and :data:`LIMIT_S`.
    """

    def __init__(
        self, command: Sequence[str], slots: int = 1, interval: float = INTERVAL_S, limit: float = LIMIT_S
    ) -> None:
        self._command = ["/bin/sh", "-c", _GUARDED, "sh", *command]
        self._slots = slots
        self._interval = interval
        self._limit = limit
        self._results: queue.SimpleQueue[Found | Failed] = queue.SimpleQueue()
        self._wake, self._waker = os.pipe()
        self._closed, self._closer = os.pipe()
        for fd in (self._wake, self._waker):
            os.set_blocking(fd, False)
        self._thread = threading.Thread(target=self._run, name="pyhvd.job.discovery", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`take` has something to return."""
        return self._wake

    def take(self) -> list[Found | Failed]:
        """Return the results since the last call, the oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 1 << 16)
        results = []
        with contextlib.suppress(queue.Empty):
            while True:
                results.append(self._results.get_nowait())
        return results

    def close(self) -> None:
        """End the thread, and a script that runs."""
        if self._closer < 0:
            return
        os.close(self._closer)
        self._closer = -1
        # A process that waits for a file system cannot be killed; then the thread keeps its descriptors.
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            for fd in (self._wake, self._waker, self._closed):
                os.close(fd)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._is_closed(due - time.monotonic()):
            due = time.monotonic() + self._interval
            self._run_once(time.monotonic() + self._limit)

    def _run_once(self, until: float) -> None:
        """Run the script, and hand its result over."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as exc:
            self._hand_over(Failed(f"the script cannot be started: {exc}"))
            return
        try:
            result = self._watch(process, until)
            if result is not None:
                self._hand_over(result)
        finally:
            if process.poll() is None:
                signal_group(process.pid, signal.SIGKILL)
            while process.poll() is None and not self._is_closed(_LOOK_S):
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_JOIN_S / 2)
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()

    def _watch(self, process: subprocess.Popen[bytes], until: float) -> Found | Failed | None:
        """Return the result of a run; None if this object is closed meanwhile."""
        assert process.stdout is not None
        assert process.stderr is not None
        said: dict[int, bytes] = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
        out, err = said
        left = [out, err]
        while left:
            ready = _readable([*left, self._closed], until - time.monotonic())
            if self._closed in ready:
                return None
            if time.monotonic() >= until:
                return Failed(f"the script has not ended within {self._limit:g} s")
            for fd in ready:
                data = os.read(fd, 1 << 16)
                said[fd] += data
                if not data:
                    left.remove(fd)
            if len(said[out]) > _MOST_BYTES:
                return Failed(f"the script printed more than {_MOST_BYTES} bytes")
            said[err] = said[err][-_ERRORS_SHOWN:]
        while process.poll() is None:
            if self._is_closed(_LOOK_S):
                return None
            if time.monotonic() >= until:
                return Failed(f"the script has not ended within {self._limit:g} s")
        if process.returncode:
            words = " / ".join(filter(None, map(str.strip, said[err].decode(errors="replace").splitlines())))
            return Failed(f"the script ended with code {process.returncode}{f': {words}' if words else ''}")
        return Found(*parse_hosts(said[out].decode(errors="replace"), self._slots))

    def _hand_over(self, result: Found | Failed) -> None:
        self._results.put(result)
        with contextlib.suppress(BlockingIOError):  # full: it is readable already
            os.write(self._waker, b"x")

    def _is_closed(self, wait: float = 0.0) -> bool:
        """Return whether this object is closed; wait so long for that."""
        return bool(_readable([self._closed], wait))


def _readable(fds: Sequence[int], wait: float) -> list[int]:
    """Return the descriptors that are readable, or have ended, after at most so long."""
    poll = select.poll()  # select() takes no descriptor above 1023, and a driver of many hosts has more
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, wait) * 1000)]
