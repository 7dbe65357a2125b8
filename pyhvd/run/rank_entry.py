"""The rank side of ``python -m pyhvd.run``: a supervisor, and the rank proper, forked from it."""

from __future__ import annotations

import os
import signal
import sys
import time

from pyhvd.job.mpi.abort import claim_first_failure, drain_stderr, end_job
from pyhvd.job.mpi.rank_env import Place
from pyhvd.job.process.environment import set_defaults
from pyhvd.job.process.exit_report import EXIT, ExitReport
from pyhvd.job.process.output import make_relays
from pyhvd.job.process.parent_death import die_with_parent
from pyhvd.job.process.signals import BLOCKED_OVER_FORK
from pyhvd.run.cli import Options
from pyhvd.run.control_socket import Line, connect
from pyhvd.run.rank_supervisor import FIRST_ENDS_JOB_S, Supervisor


def run_rank(options: Options, place: Place) -> int:
    """Run this rank's script in a child process and watch it; return the exit code to leave with."""
    # SIGTERM, not SIGKILL: the supervisor takes the rank with it, and what the rank has started.
    die_with_parent(signal.SIGTERM, os.getppid())
    line = connect()
    if line is not None:
        line.send("hello", place.rank)
        _take_stdin(line, place)
    os.environ.update(options.settings)
    said = set_defaults(place, os.environ)
    if said is not None and place.rank == 0:
        print(said, file=sys.stderr, flush=True)
    try:
        relays = make_relays(place, options.output_filename, options.prefix_output, options.prefix_timestamp)
    except OSError as exc:
        return _refuse(place, line, f"cannot write the files of --output-filename: {exc}")
    read, write = os.pipe()
    os.set_blocking(read, False)
    # A signal that comes before the handlers are in place waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_OVER_FORK)
    supervisor_pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        # A group of its own: signals reach the rank once, through the supervisor, and from nobody else.
        os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL, supervisor_pid)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a job in the background of a shell script
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_OVER_FORK)
        os.close(read)
        for relay in relays:
            relay.attach()
        if line is not None:
            line.close()
        from pyhvd.run.user_script import run_script

        return run_script(options.program, place, write)
    os.close(write)
    for relay in relays:
        relay.detach()
    return _supervise(Supervisor(place, pid, read, line, relays))


def _refuse(place: Place, line: Line | None, why: str) -> int:
    """End the job before this rank's script has begun; return the exit code to leave with."""
    record = ExitReport(place.rank, EXIT, 1, f"pyhvd: {place.title} {why}")
    if line is not None:
        line.send("record", record.dump().decode())
        line.send("ended", record.code)
    if not claim_first_failure(os.getppid()):
        time.sleep(FIRST_ENDS_JOB_S)
        return record.code
    if line is None:
        os.write(2, f"{record.text}\n".encode())
        drain_stderr()
    # Ranks that have not started yet would signal again, of which Open MPI's mpiexec speaks.
    end_job(place, record.code, signal_mpiexec=False)
    return record.code


def _take_stdin(line: Line, place: Place) -> None:
    """Give rank 0 the launcher's own stdin, and the others none.

    mpiexec would pass on what comes from a terminal or a pipe, but Open MPI 5.0 never passes on that it has
    ended, and Hydra leaves every rank but 0 waiting for input for ever.
    """
    source = line.take_stdin() if place.rank == 0 else os.open(os.devnull, os.O_RDONLY)
    if source is not None:
        os.dup2(source, 0)
        os.close(source)


def _supervise(supervisor: Supervisor) -> int:
    code = supervisor.watch()
    # Nothing of the script lives in this process: leave without running anything that imports may have left.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
