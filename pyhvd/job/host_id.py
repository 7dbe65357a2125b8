"""Which tasks can share memory: they have the same host hash if, and only if, they can.

Spark's address of an executor does not tell: two containers of one machine may have the same, and so may two
hosts behind one address translation. MPI needs a common /dev/shm, and processes that see each other.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys

from pyhvd.common.processes import boot_id


def host_hash(salt: str = "") -> str:
    """Return this process's host hash, 16 hexadecimal digits.

    It hashes the host's name and, on Linux, the kernel's boot id, the ipc and pid namespaces and the device
    of /dev/shm. Processes with different salts get different hashes.
    """
    parts = [salt, socket.gethostname()]
    if sys.platform.startswith("linux"):
        parts += [boot_id(), *map(_identity, ("/proc/self/ns/ipc", "/proc/self/ns/pid", "/dev/shm"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _identity(path: str) -> str:
    """Return what identifies a namespace by its file, or a file system by its root; empty if unknown."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev} {status.st_ino}"
