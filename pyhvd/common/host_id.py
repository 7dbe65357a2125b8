"""Which processes share a kernel, a namespace, or memory.

Two tasks can share memory if, and only if, they have the same host hash. Spark's address of an executor does
not tell: two containers of one machine may have the same, and so may two hosts behind one address
translation. MPI needs a common /dev/shm, and processes that see each other.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys


def boot_id() -> str:
    """Return the id of the running kernel's boot; empty if /proc does not have it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def node_of(namespace: str) -> str:
    """Return an id of this process's kernel and namespace; empty if /proc does not have it.

    ``namespace`` is a name from namespaces(7): ``"pid"``, ``"net"``, ...
    """
    boot = boot_id()
    try:
        return f"{boot}/{os.stat(f'/proc/self/ns/{namespace}').st_ino}" if boot else ""
    except OSError:
        return ""


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
