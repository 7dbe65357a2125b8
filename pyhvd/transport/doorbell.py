"""Doorbells: how a sleeping rank is woken, at no cost while nobody rings.

A datagram socket per rank, and a pipe for the rank's own threads; a ring is one byte, and says only "look". A
rank sleeps in ``poll(2)`` on both, so it uses no CPU. Bells reach the ranks of one host and one network
namespace; where a peer is out of reach the owner must look for itself now and then (see
:class:`~pyhvd.transport.mpi.control.MpiTransport`).

A rank's own ring is never lost: a full pipe rings already. Another rank's can be, when that rank has too many
rings under way that nobody has heard yet; the sleeper looks for itself every now and then for this reason
too. A false ring does no harm.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import sys
import tempfile

from pyhvd.common.processes import node_of

_RING = b"!"
_LONGEST_MS = 2**31 - 1


def host_id() -> str:
    """Return what two ranks have in common if their bells reach each other."""
    return node_of("net") or socket.gethostname()


class Doorbell:
    """This rank's bell, and the means to ring others.

    Attributes
    ----------
    address : bytes
        What the others need to ring it.
    shortest : float
        Seconds of the shortest wait: poll(2) counts in milliseconds.
    """

    shortest = 1e-3

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._folder = ""
        if sys.platform == "linux":
            self._socket.bind("")  # the kernel picks a free abstract name: no file, nothing to clean up
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
        """Ring a bell, by default this rank's own; from any thread; never blocks."""
        # Full: see above. Gone: there is nobody to wake.
        with contextlib.suppress(OSError):
            if address is None:
                os.write(self._write, _RING)
            else:
                self._socket.sendto(_RING, address)

    def wait(self, timeout: float | None) -> bool:
        """Sleep until rung, at most ``timeout`` seconds; return whether it was rung."""
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
        """Take the bell down."""
        self._socket.close()
        os.close(self._read)
        os.close(self._write)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
