"""Which tasks can share memory: a hash that two processes have in common if, and only if, they can.

Spark's own address of an executor says nothing: two containers of one machine have one, and two hosts behind
one address translation may too. What counts for MPI is /dev/shm, and that processes see each other.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys

from pyhvd.common.processes import boot_id


def host_hash(salt: str = "") -> str:
    """Return this process's host hash, 16 hexadecimal digits.

    It is made of the host's name, the kernel's boot id, the ipc and pid namespaces and the device of
    /dev/shm, as far as there are such.

    Parameters
    ----------
    salt : str
        Processes of different salts do not share a host.
    """
    parts = [salt, socket.gethostname()]
    if sys.platform.startswith("linux"):
        parts += [boot_id(), _inode("/proc/self/ns/ipc"), _inode("/proc/self/ns/pid"), _device("/dev/shm")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _inode(path: str) -> str:
    try:
        return str(os.stat(path).st_ino)
    except OSError:
        return ""


def _device(path: str) -> str:
    try:
        return str(os.stat(path).st_dev)
    except OSError:
        return ""
