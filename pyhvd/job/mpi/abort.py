"""How a supervisor ends the job, and how it dies with its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time

from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, Place

# mpiexec kills this process long before; should it not, the process leaves all the same.
_KILLED_WITHIN_S = 2.0

_claims: list[socket.socket] = []  # held until this process ends


def claim_first_failure(parent: int) -> bool:
    """Whether this is the first rank of this host to fail, among those that mpiexec's `parent` started.

    Without a launcher the supervisors know nothing of each other but their common parent. A name in the
    abstract socket namespace can be bound once and vanishes with its owner. Should a stranger hold it, this
    rank only waits a moment longer before it shows its failure. Elsewhere than on Linux every rank is first.
    """
    if not sys.platform.startswith("linux"):
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0pyhvd-first-failure-{os.getuid()}-{parent}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def can_end_job(place: Place) -> bool:
    """Whether :func:`end_job` ends the job by itself, or the rank has to call MPI_Abort."""
    return place.launcher == OPENMPI or (place.launcher == MPICH and "PMI_FD" in os.environ)


def end_job(place: Place, code: int, *, signal_mpiexec: bool) -> None:
    """End all ranks of the job, so that mpiexec exits with `code`; this process should then exit with it.

    Hydra does not end a job when a process exits with a code other than 0 (if it never called MPI_Init, the
    others run on); but it reads PMI-1 from the descriptor PMI_FD, which this process inherited, and obeys
    `abort` there at any time, before MPI_Init and after MPI_Finalize, without a banner of its own.

    Open MPI does end it, with a banner that would come after the failure on the screen. On the host where
    mpiexec runs (it calls itself prterun) SIGTERM ends the job as fast, silently, and always with code 1.

    Parameters
    ----------
    place : Place
        Where this rank stands.
    code : int
        The exit code.
    signal_mpiexec : bool
        Whether to end Open MPI's job so, although it costs the exit code when that is not 1. Not when the job
        is ending already: a second signal makes mpiexec speak.
    """
    descriptor = os.environ.get("PMI_FD", "")
    with contextlib.suppress(OSError):
        if place.launcher == MPICH and descriptor.isdecimal():
            os.write(int(descriptor), b"cmd=abort exitcode=%d\n" % code)
            time.sleep(_KILLED_WITHIN_S)
        elif place.launcher == OPENMPI and signal_mpiexec:
            with open(f"/proc/{os.getppid()}/comm", encoding="ascii") as comm:
                if comm.read().strip() != "prterun":
                    return
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(_KILLED_WITHIN_S)


def drain_stderr(seconds: float = 0.5) -> None:
    """Wait until mpiexec has taken what was written to stderr: Hydra drops what it has not read by then."""
    try:
        import fcntl
        import termios

        until = time.monotonic() + seconds
        while time.monotonic() < until:
            unread = fcntl.ioctl(2, termios.FIONREAD, b"\0\0\0\0")
            if unread == b"\0\0\0\0":
                return
            time.sleep(0.001)
    except (ImportError, OSError):
        return
