"""A rank under ``python -m pyhvd.run``: the supervisor, and the script's process, forked from it."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import asdict

from pyhvd.job.mpi.abort import claim_first_failure, end_job
from pyhvd.job.mpi.rank_env import RankEnv, set_defaults, set_horovods
from pyhvd.job.process import segments
from pyhvd.job.process.exit_report import EXIT, ExitReport
from pyhvd.job.process.guardian import die_with_parent
from pyhvd.job.process.output import make_relays
from pyhvd.job.process.rank_line import REPORT
from pyhvd.job.process.signals import BLOCKED_OVER_FORK
from pyhvd.run.entry.control_socket import Line, connect
from pyhvd.run.entry.rank_supervisor import FIRST_ENDS_JOB_S, Supervisor
from pyhvd.run.options import Options


def run_rank(options: Options, rank_env: RankEnv) -> int:
    """Run this rank's script in a child process and watch it; return this process's exit code."""
    # SIGTERM, not SIGKILL: the supervisor then ends the rank, and what the rank has started.
    die_with_parent(signal.SIGTERM, os.getppid())
    line = connect()
    if line is not None:
        line.send("hello", rank_env.rank)
        _take_stdin(line, rank_env)
    elif rank_env.local_rank == 0:
        segments.sweep()
    os.environ.update(options.settings)
    set_horovods(rank_env, os.environ)
    message = set_defaults(rank_env, os.environ)
    if message is not None and rank_env.rank == 0:
        print(message, file=sys.stderr, flush=True)
    try:
        relays = make_relays(
            rank_env.rank,
            rank_env.size,
            options.output_filename,
            prefix=options.prefix_output,
            timestamp=options.prefix_timestamp,
            shown=options.ranks is None or rank_env.rank in options.ranks,
            whole=line is not None,
        )
    except OSError as exc:
        return _refuse(rank_env, line, f"cannot write the files of --output-filename: {exc}")
    read, write = os.pipe()
    os.set_blocking(read, False)
    # Signals that arrive before the handlers are installed stay pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_OVER_FORK)
    supervisor_pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        # A group of its own, so that signals reach the rank once, by the supervisor alone.
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
        from pyhvd.run.entry.user_script import run_script

        return run_script(options.program, rank_env, write)
    os.close(write)
    for relay in relays:
        relay.detach()
    return _supervise(Supervisor(rank_env, pid, read, line, relays))


def _refuse(rank_env: RankEnv, line: Line | None, why: str) -> int:
    """End the job before this rank's script has begun; return this process's exit code."""
    report = ExitReport(rank_env.rank, EXIT, 1, f"pyhvd: {rank_env.title} {why}")
    if line is not None:
        line.send(REPORT, asdict(report))
        line.send("ended", report.code)
    if not claim_first_failure(os.getppid()):
        time.sleep(FIRST_ENDS_JOB_S)
        return report.code
    if line is None:
        os.write(2, f"{report.text}\n".encode())
    # Open MPI's mpiexec ends the job when this process exits; ranks that it still starts find the claim.
    end_job(rank_env, report.code, signal_mpiexec=False)
    return report.code


def _take_stdin(line: Line, rank_env: RankEnv) -> None:
    """Give rank 0 the launcher's own stdin, and the other ranks /dev/null.

    mpiexec passes on input too. But Open MPI 5.0 never passes on its end, and Hydra makes every rank but 0
    wait for input forever.
    """
    source = line.take_stdin() if rank_env.rank == 0 else os.open(os.devnull, os.O_RDONLY)
    if source is not None:
        os.dup2(source, 0)
        os.close(source)


def _supervise(supervisor: Supervisor) -> int:
    code = supervisor.watch()
    # The script ran in another process: leave without the exit handlers of imported modules.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
