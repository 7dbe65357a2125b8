"""What the kernel tells of this process: whom it shares namespaces and memory with, its limits; names.

Two tasks can share memory if, and only if, they have the same host hash. Spark's address of an executor does
not tell: two containers of one machine may have the same, and so may two hosts behind one address
translation. MPI needs a common /dev/shm, and processes that see each other.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from pathlib import Path


def boot_id() -> str:
    """Return the id of the running kernel's boot; empty if /proc does not have it."""
    return read_or_empty(Path("/proc/sys/kernel/random/boot_id"))


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


def cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[float | None, int | None]:
    """Return the quota of time (in cores) and of memory (bytes) of this process's cgroups (cgroups(7)).

    Version 2: the smallest limit from its own group up to the root. Version 1: the limits that a container
    sees as its own.
    """
    times = [(read_or_empty(root / "cpu/cpu.cfs_quota_us"), read_or_empty(root / "cpu/cpu.cfs_period_us"))]
    sizes = [read_or_empty(root / "memory/memory.limit_in_bytes")]
    mine = next((line[3:] for line in read_or_empty(own).splitlines() if line.startswith("0::")), "/")
    group = root / mine.lstrip("/")
    for folder in (each for each in (group, *group.parents) if each.is_relative_to(root)):
        quota, _, period = read_or_empty(folder / "cpu.max").partition(" ")
        times.append((quota, period))
        sizes.append(read_or_empty(folder / "memory.max"))
    quotas = [int(quota) / int(period) for quota, period in times if quota.isdecimal() and period.isdecimal()]
    # Version 1 shows no limit as a number close to 2**63.
    limits = [int(text) for text in sizes if text.isdecimal() and int(text) < 1 << 60]
    return min(quotas, default=None), min(limits, default=None)


def read_or_empty(path: Path) -> str:
    """Return the text of a file, such as one of /proc; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def hold_name(name: str) -> socket.socket:
    """Return a socket that has a name of the abstract namespace, which needs no file, until it is closed.

    Raises
    ------
    OSError
        EADDRINUSE: another socket of this network namespace has the name. Only Linux has such names.
    """
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0{name}")
    except OSError:
        holder.close()
        raise
    return holder
