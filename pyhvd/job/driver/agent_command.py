"""The command that starts a host's agent, as the driver sees it: the channel, what it says, how it ends.

The command's stdin and stdout are one socket, whose other end is the driver's. Knows neither ssh nor the
meaning of a message.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Protocol

from pyhvd.job.process.guardian import signal_group
from pyhvd.job.process.supervised import read_some
from pyhvd.transport.tcp.connection import Connection
from pyhvd.transport.tcp.session import Role, Session

SKIPPED = 1 << 16
"""The most bytes that a login shell may print before the agent starts."""
_LAST_WORDS = 4096
# The most reads at the end: a process that the command has started may go on writing.
_LAST_READS = 64
END_S = 0.5
"""After its channel has ended, a command usually has this long to end by itself."""


class AgentProcess(Protocol):
    """What started a host's agent: a command, or a task of Spark."""

    connection: Connection

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`listen` has something to read."""

    def listen(self) -> bool:
        """Read some of what it says besides the channel; return whether there was anything."""

    def end(self, patience: float = END_S) -> tuple[int, str]:
        """End it, also by force after `patience` seconds; return its exit code, and what it said."""

    def close(self) -> None:
        """Close the descriptor, after :meth:`end`."""


class AgentCommand:
    """A running command; it gets a session of its own, so that Ctrl-C does not reach it.

    Parameters
    ----------
    command : sequence of str
        The command line.
    key : bytes
        The job's key, which the agent reads from its stdin.

    Attributes
    ----------
    connection : Connection
        The driver's end of the channel.

    Raises
    ------
    OSError
        The command cannot be started.
    """

    def __init__(self, command: Sequence[str], key: bytes) -> None:
        self._words = b""
        self._errors, errors = os.pipe()
        os.set_blocking(self._errors, False)
        channel, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                start_new_session=True,
            )
        except OSError:
            os.close(self._errors)
            channel.close()
            raise
        finally:
            os.close(errors)
            theirs.close()
        with contextlib.suppress(OSError):  # a command that has ended already is noticed by reading
            channel.sendall(key.hex().encode() + b"\n")
        self.connection = Connection(channel, Session(key, Role.SERVER, skip=SKIPPED))

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`listen` has something to read."""
        return self._errors

    def listen(self) -> bool:
        """Read some of what the command wrote to its stderr; return whether there was anything."""
        data = read_some(self._errors) if self._errors >= 0 else b""
        self._words = (self._words + (data or b""))[-_LAST_WORDS:]
        return bool(data)

    def end(self, patience: float = END_S) -> tuple[int, str]:
        """End the command; return its exit code, and what it said.

        The command has `patience` seconds to end by itself after its channel has ended. The code is negative
        if a signal ended the command, also if this call sent it.
        """
        self.connection.close()
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            # All of its group: a shell does not pass the signal on.
            signal_group(self._process.pid, signal.SIGTERM)
            try:
                code = self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                signal_group(self._process.pid, signal.SIGKILL)
                code = self._process.wait()
        return code, self.said

    @property
    def said(self) -> str:
        """What the command wrote to its stderr, and to its stdout before the agent's first bytes."""
        for _ in range(_LAST_READS):
            if not self.listen():
                break
        printed = self.connection.skipped.decode(errors="replace").strip()
        words = self._words.decode(errors="replace").strip()
        return "\n".join(filter(None, [printed, words]))

    def close(self) -> None:
        """Close the descriptor, after :meth:`end`."""
        os.close(self._errors)
        self._errors = -1
