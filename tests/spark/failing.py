"""The functions that the ranks of these tests run, most of them failures; ranks import this module too."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyhvd as hvd
import pyhvd.spark

BAD = 2
"""The rank that fails."""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def python_worker() -> int:
    """Return the Python worker of this rank's task: the parent of the rank's guardian."""
    return parent_of(os.getppid())


def executor() -> int:
    """Return the JVM of this rank's executor: the parent of the daemon that started the Python worker."""
    pid = python_worker()
    while "java" not in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
        pid = parent_of(pid)
    return pid


def fail(how: str, when: str) -> None:
    """Fail on one rank while the others wait for it."""
    import numpy as np

    hvd.init()
    hvd.allreduce(np.ones(1))
    if hvd.rank() == BAD:
        subprocess.Popen(["sleep", "1000"])
        Path(when).write_text(str(time.monotonic()))
        FAILURES[how]()
    hvd.allreduce(np.ones(1))


def fork() -> tuple[int, float]:
    """Return how a forked child has ended that leaves by sys.exit, and an allreduce after that."""
    import numpy as np

    hvd.init()
    pid = os.fork()
    if pid == 0:
        sys.exit("the helper has ended")
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return ended, float(hvd.allreduce(np.float64(1), op=hvd.Sum))


def _raise() -> None:
    raise KeyError("no such column")


def _signal(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
    time.sleep(1000)


FAILURES: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "exit": lambda: sys.exit(3),
    "leave": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "guardian": lambda: _signal(os.getppid(), signal.SIGKILL),
    "worker": lambda: _signal(python_worker(), signal.SIGKILL),
    "executor": lambda: _signal(executor(), signal.SIGKILL),
    "freeze": lambda: _signal(python_worker(), signal.SIGSTOP),
}


SOON_S = 2.0
"""Seconds from the failure to the error."""
SILENT_S = 6.0
"""The same for who fails without a word."""
ONE_ERROR = {
    "raise": (r"failed: KeyError: 'no such column'", SOON_S),
    "exit": (r"called sys.exit\(3\) and returned nothing", SOON_S),
    "leave": (r"exited with code 0 before the function returned", SOON_S),
    "kill": (r"was killed by SIGKILL", SOON_S),
    "guardian": (r"and its guardian were killed", SOON_S),
    "worker": (r"is lost: its Spark task is gone", SOON_S),
    "executor": (r"is lost: its Spark task is gone", SOON_S),
    "freeze": (r"has been silent for 5 s: its host is frozen", SILENT_S),
}
"""For each failure what the error says of it, and within how many seconds."""


def one_error(how: str) -> str:
    """Return a pattern for the whole text of a failure's error."""
    who = "[23]" if how == "executor" else BAD  # both ranks of the executor are lost at the same time
    return rf"rank {who} of 4 on host \S+ \(Spark task \d\) {ONE_ERROR[how][0]}"


def rank_number() -> int:
    """Return the rank."""
    hvd.init()
    return hvd.rank()


def devices() -> list[str]:
    """Return the devices of the rank."""
    return pyhvd.spark.get_available_devices()


def place() -> tuple[str, int, int, int, int, float]:
    """Return host, local rank and size, cross rank and size, and the sum of all ranks."""
    import numpy as np

    hvd.init()
    total = float(hvd.allreduce(np.full(1, hvd.rank()), op=hvd.Sum)[0])
    return socket.gethostname(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total


def wait(folder: str) -> None:
    """Write this rank's host to a file once all ranks run, and never return."""
    import numpy as np

    hvd.init()
    hvd.allreduce(np.ones(1))
    said = Path(folder, f"rank-{hvd.rank()}")
    said.with_suffix(".new").write_text(socket.gethostname())
    said.with_suffix(".new").rename(said)
    while True:
        time.sleep(0.05)
        hvd.allreduce(np.ones(1))


def abort() -> None:
    """Call MPI_Abort on rank 1 while the others wait."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 1:
        MPI.COMM_WORLD.Abort(9)
    MPI.COMM_WORLD.Barrier()


def only_rank_0() -> int:
    """Start pyhvd on rank 0 alone."""
    if int(os.environ["PMI_RANK"]) == 0:
        hvd.init()
    return 0
