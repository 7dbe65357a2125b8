"""Ask a script, or a function of the user's, for the hosts of an elastic job, once a second.

A thread asks. It shares only a queue and a pipe with the driver, so a script or a call that hangs does not
block the driver. A script runs in its own session, below a shell that kills the script and its children when
the driver dies. A call cannot be killed, so each call runs in its own thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

from pyhvd.job.machines.found_hosts import DiscoveryFailed, Found, check_hosts, parse_hosts, show_value
from pyhvd.job.process.guardian import signal_group

INTERVAL_S = 1.0
"""Time from the start of a run to the start of the next one, if the run is shorter."""
LIMIT_S = 10.0
"""A run that takes longer has failed; a script is then killed."""
# A script that prints more to stdout has failed.
_MOST_BYTES = 1 << 20
# A function that returns more lines has failed.
_MOST_LINES = 1 << 16
# The most characters of a script's stderr, or of a function's exception, in a message.
_ERRORS_SHOWN = 300
_LOOK_S = 0.01
_JOIN_S = 2.0

# The shell's stdin is a pipe whose other end only the driver holds. When that end closes, `read` returns, and
# the group is killed. The shell reaps both children: the first process of a container may reap no orphans.
_GUARDED = (
    "exec 3<&0 </dev/null; (read -r line <&3; kill -9 0) >/dev/null 2>&1 & "
    '"$@" 3<&-; code=$?; kill $! 2>/dev/null; wait $! 2>/dev/null; exit $code'
)


class Discovery(ABC):
    """Asks for the hosts again and again, until :meth:`close`.

    Parameters
    ----------
    slots : int
        The slots of a host for which none are given.
    interval, limit : float
        See :data:`INTERVAL_S` and :data:`LIMIT_S`.
    """

    def __init__(self, slots: int = 1, interval: float = INTERVAL_S, limit: float = LIMIT_S) -> None:
        self._slots = slots
        self._interval = interval
        self._limit = limit
        self._results: queue.SimpleQueue[Found | DiscoveryFailed] = queue.SimpleQueue()
        self._closed, self._closer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="pyhvd.job.discovery", daemon=True)
        self._thread.start()

    def take(self) -> list[Found | DiscoveryFailed]:
        """Return the results since the last call, the oldest first."""
        results = []
        with contextlib.suppress(queue.Empty):
            while True:
                results.append(self._results.get_nowait())
        return results

    def close(self) -> None:
        """End the thread, and kill a script that runs; wait at most 1 s for a call that runs."""
        if self._closer < 0:
            return
        os.close(self._closer)
        self._closer = -1
        # A process that waits for a file system cannot be killed; then the thread keeps its descriptors.
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            os.close(self._closed)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._is_closed(due - time.monotonic()):
            due = time.monotonic() + self._interval
            self._run_once(time.monotonic() + self._limit)

    @abstractmethod
    def _run_once(self, until: float) -> None:
        """Ask once, and queue the result; return within about 1 s after this object is closed."""

    def _is_closed(self, wait: float = 0.0) -> bool:
        """Return whether this object is closed; wait at most `wait` seconds for it."""
        return bool(_readable([self._closed], wait))


class ScriptDiscovery(Discovery):
    """Runs a script again and again.

    Parameters
    ----------
    command : sequence of str
        The script and its arguments.
    slots, *times
        See :class:`Discovery`.
    """

    def __init__(self, command: Sequence[str], slots: int = 1, *times: float) -> None:
        self._command = ["/bin/sh", "-c", _GUARDED, "sh", *command]
        super().__init__(slots, *times)

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
            self._results.put(DiscoveryFailed(f"the script cannot be started: {exc}"))
            return
        try:
            result = self._watch(process, until)
            if result is not None:
                self._results.put(result)
        finally:
            if process.returncode is None:  # not reaped: no other group can have this number
                signal_group(process.pid, signal.SIGKILL)
            while process.poll() is None and not self._is_closed(_LOOK_S):
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_JOIN_S / 2)
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()

    def _watch(self, process: subprocess.Popen[bytes], until: float) -> Found | DiscoveryFailed | None:
        """Return the result of a run; None if this object is closed before the run ends."""
        assert process.stdout is not None
        assert process.stderr is not None
        late = DiscoveryFailed(
            f"the script, or a process that it started, has not ended within {self._limit:g} s"
        )
        said: dict[int, bytes] = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
        out, err = said
        left = [out, err]
        while left:
            ready = _readable([*left, self._closed], until - time.monotonic())
            if self._closed in ready:
                return None
            if time.monotonic() >= until:
                return late
            for fd in ready:
                data = os.read(fd, 1 << 16)
                said[fd] += data
                if not data:
                    left.remove(fd)
            if len(said[out]) > _MOST_BYTES:
                return DiscoveryFailed(f"the script printed more than {_MOST_BYTES} bytes")
            said[err] = said[err][-_ERRORS_SHOWN:]
        while process.poll() is None:
            if self._is_closed(_LOOK_S):
                return None
            if time.monotonic() >= until:
                return late
        if process.returncode:
            words = " / ".join(filter(None, map(str.strip, said[err].decode(errors="replace").splitlines())))
            return DiscoveryFailed(
                f"the script ended with code {process.returncode}{f': {words}' if words else ''}"
            )
        return Found(*parse_hosts(said[out].decode(errors="replace").splitlines(), self._slots))


@runtime_checkable
class FindsHosts(Protocol):
    """Finds hosts, as Horovod's ``HostDiscovery`` does."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the slots of each host."""


HostFinder = Callable[[], Mapping[str, int] | Iterable[str]] | FindsHosts
"""Returns the slots of each host, or lines like those that a script prints."""


class CallDiscovery(Discovery):
    """Calls a function of the user's again and again, one call at a time.

    Parameters
    ----------
    find : callable or FindsHosts
        See :data:`HostFinder`.
    slots, *times
        See :class:`Discovery`.
    """

    def __init__(self, find: HostFinder, slots: int = 1, *times: float) -> None:
        method = find.find_available_hosts_and_slots if isinstance(find, FindsHosts) else find
        self._find: Callable[[], object] = method
        super().__init__(slots, *times)

    def _run_once(self, until: float) -> None:
        """Call the function, and hand over its result.

        After each limit without a result, hand over a failure. The result of such a call does not count.
        """
        results: list[Found | DiscoveryFailed] = []
        try:
            over = self._start(results)
        except (OSError, RuntimeError) as exc:
            self._results.put(DiscoveryFailed(f"the call cannot be started: {exc}"))
            return
        try:
            ready = _readable([over, self._closed], until - time.monotonic())
            if over in ready:
                self._results.put(results[0])
            while not ready:
                self._results.put(DiscoveryFailed(f"the call has not returned within {self._limit:g} s"))
                ready = _readable([over, self._closed], self._limit)
            if over not in ready:
                _readable([over], _JOIN_S / 2)
        finally:
            os.close(over)

    def _start(self, results: list[Found | DiscoveryFailed]) -> int:
        """Start a call; return a descriptor that is readable when `results` has the call's result."""
        over, end = os.pipe()

        def call() -> None:
            results.append(self._call())
            with contextlib.suppress(OSError):  # this object is closed
                os.write(end, b"x")  # end-of-file would wait for processes that the call has forked
            os.close(end)

        try:
            threading.Thread(target=call, name="pyhvd.job.discovery.call", daemon=True).start()
        except RuntimeError:
            os.close(over)
            os.close(end)
            raise
        return over

    def _call(self) -> Found | DiscoveryFailed:
        """Return the hosts that the function returns, or why it failed."""
        try:
            found = self._find()
            if isinstance(found, Mapping):
                return Found(*check_hosts(found.items()))
            if isinstance(found, str | bytes) or not isinstance(found, Iterable):
                what = "a mapping of hosts to slots, or an iterable of lines such as 'h' or 'h:2'"
                return DiscoveryFailed(f"the call returned {show_value(found)}: expected {what}")
            lines = list(islice(found, _MOST_LINES + 1))
            if len(lines) > _MOST_LINES:
                return DiscoveryFailed(f"the call returned more than {_MOST_LINES} lines")
            return Found(*parse_hosts(lines, self._slots))
        except BaseException as exc:  # the user's code may call sys.exit()
            said = " / ".join(filter(None, map(str.strip, traceback.format_exception_only(exc))))
            return DiscoveryFailed(f"the call raised {said[:_ERRORS_SHOWN]}")


def _readable(fds: Sequence[int], wait: float) -> list[int]:
    """Return the descriptors that are readable or at end-of-file; wait at most `wait` seconds for one."""
    poll = select.poll()  # select() refuses descriptors above 1023, which a driver of many hosts has
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, wait) * 1000)]
