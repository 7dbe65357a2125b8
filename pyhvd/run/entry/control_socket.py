"""The line between the launcher and the supervisor of each rank: messages over a Unix socket.

The messages have the form of :mod:`pyhvd.job.process.rank_line`. The socket is in the job's private directory
(mode 0700).

1. A supervisor sends ``hello``, ``entering`` (its rank calls MPI_Init, or that has returned), ``report`` and
   ``ended``.
2. The launcher answers rank 0's ``hello`` with its own stdin, and sends ``signal``.
3. When the launcher's end closes, however the launcher died, supervisors end their ranks.
4. When a supervisor's end closes, its rank is lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from pyhvd.job.process.rank_line import dump_message, take_messages
from pyhvd.job.process.signals import is_in_background

JOB_DIR = "PYHVD_JOB_DIR"
_SOCKET_NAME = "s"


def listen(job_dir: str, backlog: int) -> socket.socket:
    """Return the launcher's listening socket, in `job_dir`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(job_dir, _SOCKET_NAME))
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


def connect() -> Line | None:
    """Connect a supervisor to its launcher; return None without one (bare mpiexec), or if it is gone."""
    job_dir = os.environ.pop(JOB_DIR, None)  # jobs that the script starts are not part of this one
    if job_dir is None:
        return None
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(os.path.join(job_dir, _SOCKET_NAME))
    except OSError:  # the job is over, or the directory is on another host
        peer.close()
        return None
    return Line(peer, job_dir)


class Line:
    """One end of a line. Reading never blocks; nor does writing, as messages are smaller than buffers."""

    def __init__(self, peer: socket.socket, job_dir: str | None = None) -> None:
        self._peer = peer
        self._job_dir = job_dir
        self._received = bytearray()
        self.open = True

    def fileno(self) -> int:
        """For selectors."""
        return self._peer.fileno()

    def send(self, what: str, value: object = None) -> None:
        """Send one message; do nothing if the peer is gone, which :meth:`receive` notices."""
        with contextlib.suppress(OSError):
            self._peer.sendall(dump_message(what, value))

    def give_stdin(self) -> None:
        """Send this process's stdin as the first message on the line; /dev/null if it has none.

        In the background of a terminal it has none. Rank 0, in a session of its own, would not be stopped
        when it reads: it would take what is typed for the shell.
        """
        try:
            source = os.open(os.devnull, os.O_RDONLY) if is_in_background(0) else os.dup(0)
        except OSError:
            source = os.open(os.devnull, os.O_RDONLY)
        with contextlib.suppress(OSError):
            socket.send_fds(self._peer, [dump_message("stdin", None)], [source])
        os.close(source)

    def take_stdin(self) -> int | None:
        """Wait for the peer's stdin; return None if the peer closes the line instead."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._peer, 4096, 1)
        except OSError:
            return None
        self._received += data
        return descriptors[0] if descriptors else None

    def receive(self) -> list[tuple[str, Any]]:
        """Return the messages that have arrived; clear `open` at the end of the line."""
        try:
            chunk = self._peer.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        if not chunk:
            self.open = False
            return []
        self._received += chunk
        return list(take_messages(self._received))

    def close(self) -> None:
        """Close this end."""
        self.open = False
        self._peer.close()

    def remove_traces(self) -> None:
        """Remove the job's directory, as a killed launcher cannot; leave it if the launcher lives."""
        if self._job_dir is not None:
            from pyhvd.job.process.private_folder import remove_abandoned

            remove_abandoned(self._job_dir)
