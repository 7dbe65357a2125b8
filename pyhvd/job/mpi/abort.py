"""How the supervisor of a rank ends the job."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import time

from pyhvd.common.kernel import hold_name
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, RankEnv

# mpiexec kills this process sooner; if it does not, the process leaves.
_KILLED_WITHIN_S = 2.0
# How long a terminal may take to pass on what was written: 6 ms were seen with 12 busy processes on 2 cores.
_TERMINAL_S = 0.1

# How the names of Open MPI's mpiexec begin, since version 5 and before.
_MPIEXECS = ("prterun", "mpiexec", "mpirun", "orterun")

_claims: list[socket.socket] = []  # held until this process ends


def claim_first_failure(parent: int) -> bool:
    """Return whether this rank is the first on this host to fail, of those that `parent` started.

    Without a launcher, supervisors only know that they have the same parent, mpiexec's process.

    1. Open MPI's mpiexec ends the others only after the first supervisor has exited: the claim must outlast
       that process. It is a file in the session directory, which mpiexec removes with the job.
    2. MPICH has no such directory, but kills the first supervisor together with the others. The claim is a
       name in the abstract socket namespace: it can be bound once, and vanishes with its owner. If a stranger
       has bound it, this rank shows its failure a second later. Except on Linux, every rank is the first.
    """
    folder = os.environ.get("PMIX_SERVER_TMPDIR", "")
    if os.path.isdir(folder):
        try:
            os.close(os.open(os.path.join(folder, _claim_name(parent)), os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        except OSError:  # not this user's, or removed at this moment
            pass
        else:
            return True
    if not sys.platform.startswith("linux"):
        return True
    try:
        _claims.append(hold_name(f"pyhvd-first-failure-{os.getuid()}-{parent}"))
    except OSError:
        return False
    return True


def _claim_name(parent: int) -> str:
    """Return a name that no other job has: one server may run several, and a killed one leaves its files."""
    started = ""
    with contextlib.suppress(OSError), open(f"/proc/{parent}/stat", "rb") as file:
        started = file.read().rpartition(b")")[2].split()[19].decode()
    return f"pyhvd-first-failure-{os.environ.get('PMIX_NAMESPACE', '')}-{parent}-{started}"


def can_end_job(rank_env: RankEnv) -> bool:
    """Return whether :func:`end_job` ends the job; if not, the rank must call MPI_Abort."""
    return rank_env.launcher == OPENMPI or (rank_env.launcher == MPICH and "PMI_FD" in os.environ)


def end_job(rank_env: RankEnv, code: int, *, signal_mpiexec: bool) -> None:
    """End all ranks of the job, so that mpiexec exits with `code`; the caller should then exit with it too.

    Hydra does not end a job when a process exits with a code other than 0: if it never called MPI_Init, the
    other ranks run on. But Hydra reads PMI-1 from the descriptor PMI_FD, which this process inherited. At any
    time, before MPI_Init and after MPI_Finalize, it obeys `abort` there and prints no banner.

    Open MPI ends the job by itself, but prints a banner below the failure. On the host of mpiexec, whose
    process is the parent of the ranks there, SIGTERM ends the job as fast, silently, and always with code 1.

    Parameters
    ----------
    rank_env : RankEnv
        This rank's numbers.
    code : int
        The exit code.
    signal_mpiexec : bool
        Whether to end Open MPI's job by SIGTERM, which replaces `code` by 1. It must be False if the job is
        ending already: a second signal makes mpiexec print a message.
    """
    drain_output()
    descriptor = os.environ.get("PMI_FD", "")
    with contextlib.suppress(OSError):
        if rank_env.launcher == MPICH and descriptor.isdecimal():
            os.write(int(descriptor), b"cmd=abort exitcode=%d\n" % code)
            time.sleep(_KILLED_WITHIN_S)
        elif rank_env.launcher == OPENMPI and signal_mpiexec:
            with open(f"/proc/{os.getppid()}/comm", encoding="ascii") as comm:
                if not comm.read().startswith(_MPIEXECS):  # a daemon, or a script of the user's
                    return
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(_KILLED_WITHIN_S)


def drain_output(seconds: float = 0.5) -> None:
    """Wait until mpiexec has read stdout and stderr: when a job ends, it drops what it has not read.

    Open MPI's stdout is a terminal. The kernel passes on what was written there a little later, on a busy
    machine by milliseconds, and does not tell when: the wait there is a fixed one.
    """
    until = time.monotonic() + seconds
    for fd in (1, 2):
        with contextlib.suppress(ImportError, OSError):
            if os.isatty(fd):
                time.sleep(_TERMINAL_S)
            elif stat.S_ISFIFO(os.fstat(fd).st_mode):
                _drain_pipe(fd, until)


def _drain_pipe(fd: int, until: float) -> None:
    import fcntl
    import termios

    while fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0") != b"\0\0\0\0" and time.monotonic() < until:
        time.sleep(0.001)
