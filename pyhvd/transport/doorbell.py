"""Doorbells wake sleeping ranks of the same host.

Each rank has a datagram socket for other ranks and a pipe for its own threads, and sleeps in ``poll(2)`` on
both. A ring is one byte without further meaning.

1. Bells reach the ranks of one host and one network namespace.
2. A ring of the rank's own threads is never lost: a full pipe wakes the rank as well.
3. A ring of another rank is lost if the socket's queue is full. So the sleeper also polls now and then (see
   :class:`~pyhvd.transport.mpi.control.MpiTransport`).
4. A spurious ring is harmless.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import sys
import tempfile

from pyhvd.common.kernel import node_of

_RING = b"!"
_LONGEST_MS = 2**31 - 1


def host_id() -> str:
    """Return a text that is equal on two ranks if, and only if, their bells reach each other."""
    return node_of("net") or socket.gethostname()


class Doorbell:
    """This rank's bell, which also rings the bells of other ranks.

    Attributes
    ----------
    address : bytes
        Other ranks ring this address.
    shortest : float
        Shortest wait in seconds: poll(2) counts milliseconds.
    """

    shortest = 1e-3

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._folder = ""
        if sys.platform == "linux":
            self._socket.bind("")  # the kernel picks a free abstract name, which needs no file
        else:
            self._folder = tempfile.mkdtemp(prefix="pyhvd-")
            self._socket.bind(os.path.join(self._folder, "bell"))
        name = self._socket.getsockname()
        self.address: bytes = name if isinstance(name, bytes) else os.fsencode(name)
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._read, select.POLLIN)

    def ring(self, address: bytes | None = None) -> None:
        """Ring a rank's bell, by default this rank's own; never block. Any thread may call it."""
        # A full queue: see the module's docstring. A missing socket: its rank has ended.
        with contextlib.suppress(OSError):
            if address is None:
                os.write(self._write, _RING)
            else:
                self._socket.sendto(_RING, address)

    def wait(self, timeout: float | None) -> bool:
        """Sleep until rung, at most ``timeout`` s; return whether the bell was rung."""
        milliseconds = None if timeout is None else min(max(int(timeout * 1000 + 0.999), 0), _LONGEST_MS)
        rung = bool(self._poll.poll(milliseconds))
        if rung:
            with contextlib.suppress(OSError):
                while os.read(self._read, 4096):
                    pass
            with contextlib.suppress(OSError):
                while self._socket.recv(64):
                    pass
        return rung

    def close(self) -> None:
        """Close socket and pipe."""
        self._socket.close()
        os.close(self._read)
        os.close(self._write)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
