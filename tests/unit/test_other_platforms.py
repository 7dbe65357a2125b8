"""pyhvd can be imported where the names that only Linux has are missing, as on macOS."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import fcntl, importlib, mmap, os, pkgutil, select, signal, socket
import asyncio, multiprocessing, ssl, subprocess, cloudpickle, msgspec, mpi4py, numpy  # they have guards

mpi4py.rc.initialize = False
MISSING = {
    os: "eventfd EFD_ memfd_create MFD_ O_PATH O_TMPFILE pidfd_open pipe2 posix_fallocate sched_ splice"
    " waitid P_PID P_ALL P_PGID",
    select: "epoll EPOLL",
    socket: "MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE SO_PEERCRED TCP_KEEPIDLE"
    " TCP_USER_TIMEOUT",
    signal: "SIGPOLL SIGPWR SIGRT SIGSTKFLT sigtimedwait sigwaitinfo pidfd_send_signal",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SETPIPE_SZ",
    mmap: "MAP_POPULATE MADV_HUGEPAGE",
}
for module, prefixes in MISSING.items():
    for name in [name for name in vars(module) if name.startswith(tuple(prefixes.split()))]:
        delattr(module, name)

import pyhvd

imported = 0
for found in pkgutil.walk_packages(pyhvd.__path__, "pyhvd.", onerror=lambda name: None):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
        imported += 1
    except ImportError as error:  # torch or Spark is not installed
        if str(error.name).startswith("pyhvd"):
            raise
    except RuntimeError as error:  # or no MPI
        if "cannot load MPI library" not in str(error):
            raise
print(imported)
"""


def test_no_module_needs_what_only_linux_has() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150
