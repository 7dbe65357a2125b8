"""The notice that a host will be taken away: SIGTERM to the host's agent, or a command that succeeds.

The ranks of an elastic job then leave the host, and no step is lost. The agent repeats the notice with each
beat to the driver, so a change of generations cannot lose the notice.

1. The first SIGTERM is a notice, also after the command has succeeded. The second SIGTERM ends the agent. In
   a job that is not elastic the first one does.
2. The command runs in a shell. When the command fails, it is started again 1 s later. The command has no time
   limit: it may ask and return, or wait for the notice.
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
# The exit codes of a shell for a command that it cannot run.
_CANNOT_RUN = (126, 127)


class Notice:
    """Listens for the notice that this host will be taken away.

    Attributes
    ----------
    why : str
        How the notice came; empty before it.
    remarks : list of str
        Lines for the user; the agent sends them to the driver.
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
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(16)

    def watch(self, command: str) -> None:
        """Treat the next SIGTERM as a notice, and let :meth:`check` run a command; empty for none."""
        self._command = command
        if threading.current_thread() is threading.main_thread() and not self.why:
            signal.signal(signal.SIGTERM, self._hear)

    def check(self, now: float) -> None:
        """Note how the command has ended, and start it if it is due."""
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
            with contextlib.suppress(OSError):  # too many processes: try again later
                self._running = subprocess.Popen(
                    ["/bin/sh", "-c", self._command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
                )

    def close(self) -> None:
        """Kill the command, and let SIGTERM end the agent again."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
        self._read.close()
        self._write.close()

    def _hear(self, *_: object) -> None:
        """Note SIGTERM, and make the descriptor of :meth:`fileno` readable."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.why = self.why or "its agent got SIGTERM"
        with contextlib.suppress(BlockingIOError):
            self._write.send(b".")
