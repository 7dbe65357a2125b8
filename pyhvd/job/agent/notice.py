"""The notice that a host will be taken away, as its agent gets it: SIGTERM, or a command that succeeds.

The ranks of an elastic job then leave the host, and no step is lost. The agent tells the driver with each
beat, so a change of generations cannot lose the notice.

1. The first SIGTERM is a notice. After a notice SIGTERM ends the agent, as in a job that is not elastic.
2. The command runs in a shell. When it fails, it is started again 1 s later. It may take any time: it may ask
   for a state, or wait for a change.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from functools import partial

from pyhvd.job.process.guardian import die_with_parent

_AGAIN_S = 1.0
# Exit codes of a shell that cannot run a command.
_CANNOT_RUN = (126, 127)


class Notice:
    """What the agent of a host knows of the host's end.

    Attributes
    ----------
    why : str
        Why the host will be taken away; empty while nothing is known of it.
    remarks : list of str
        What the user should know; the agent sends it to the driver.
    """

    def __init__(self) -> None:
        self.why = ""
        self.remarks: list[str] = []
        self._command = ""
        self._running: subprocess.Popen[bytes] | None = None
        self._next = 0.0
        self._told = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Return a descriptor that is readable after SIGTERM, until :meth:`clear`."""
        return self._read.fileno()

    def clear(self) -> None:
        """Note that a waiting thread has woken."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(16)

    def watch(self, command: str) -> None:
        """Take SIGTERM for a notice from now on, and run a command, unless it is empty."""
        self._command = command
        if threading.current_thread() is threading.main_thread() and not self.why:
            signal.signal(signal.SIGTERM, self._hear)

    def check(self, now: float) -> None:
        """Run the command, if it is time to, and look how it has ended."""
        if self._running is not None and self._running.poll() is not None:
            code, self._running = self._running.returncode, None
            self._next = now + _AGAIN_S
            if code == 0:
                self.why = self.why or "the preemption command has succeeded"
            elif code in _CANNOT_RUN and not self._told:
                self._told = True
                self.remarks.append(f"the preemption command cannot be run (code {code}): {self._command}")
        if self._command and self._running is None and not self.why and now >= self._next:
            self._next = now + _AGAIN_S
            with contextlib.suppress(OSError):  # no room for a process: later there may be
                self._running = subprocess.Popen(
                    ["/bin/sh", "-c", self._command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
                )

    def close(self) -> None:
        """End the command; SIGTERM ends the agent again."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
        self._read.close()
        self._write.close()

    def _hear(self, *_: object) -> None:
        """Note SIGTERM, and wake the thread that waits for :meth:`fileno`."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.why = self.why or "its agent got SIGTERM"
        with contextlib.suppress(BlockingIOError):
            self._write.send(b".")
