"""The rank itself: it receives the function from its agent, runs it, and sends the result.

The agent sends the pickle of function, args and kwargs on the control socket. The rank answers with the
messages of :mod:`pyhvd.job.process.rank_line`. The bytes of its result are those of
:mod:`pyhvd.job.rank.pickles`, or none to make room in an elastic job.
"""

from __future__ import annotations

import base64
import os
import socket
import sys
import threading
from typing import Any, NoReturn

from pyhvd.common import launcher_hooks
from pyhvd.common.standard_files import flush_standard_files
from pyhvd.common.text import describe_exception, describe_traceback
from pyhvd.errors import TransportError
from pyhvd.job.errors import MadeRoom
from pyhvd.job.mpi.rank_env import OPENMPI, RankEnv, read_rank_env, set_defaults
from pyhvd.job.process import segments
from pyhvd.job.process.exit_report import EXIT, INTERRUPT, SECONDARY, ExitReport, kind_of
from pyhvd.job.process.rank_line import ENTERING, LOGGED, RESULT, read_code, tell, tell_crashes, tell_report
from pyhvd.job.rank.imports import watch_mpi_import
from pyhvd.job.rank.pickles import dump
from pyhvd.job.rank.step_signals import leave_sigterm_to_agent
from pyhvd.transport.tcp.session import MAX_RECORD

PATHS = "_PYHVD_JOB_PATHS"
"""The variable with the directories in which a rank looks for modules before those of its Python.

Each rank on a host of the job has it, and none of a Spark task.
"""
_FLUSH_S = 0.5
# A pickled exception travels in one message, together with its report.
_MOST_EXCEPTION = MAX_RECORD // 2
# A logged value travels in one message.
_MOST_LOGGED = MAX_RECORD // 2
_control: socket.socket | None = None  # of this process, if it is a rank


def run_rank(control: socket.socket) -> int:
    """Run the function and send its result; return the exit code 0. After a failure, report it and exit.

    The report has the exception itself on a host of the job, and its text in any case. A child that the
    function forks ends as Python ends it: it sends nothing.
    """
    of_host = PATHS in os.environ
    rank_env, pid = prepare(control), os.getpid()
    import cloudpickle

    try:
        function, args, kwargs = cloudpickle.loads(read_code(control))
        pieces = dump(function(*args, **kwargs))
    except MadeRoom:
        pieces = []
    except BaseException as exc:
        if os.getpid() != pid:
            raise
        fail(control, exc, rank_env.rank, pickles=of_host)
    if os.getpid() == pid:
        tell(control.fileno(), RESULT, sum(map(len, pieces)), *pieces)
    return 0


def prepare(control: socket.socket) -> RankEnv:
    """Make this process ready to run functions as a rank; return its numbers."""
    global _control
    _control = control
    for path in reversed(os.environ.pop(PATHS, "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    pid = os.getpid()
    launcher_hooks.supervised = True
    launcher_hooks.tell_up = segments.remove_own
    rank_env = read_rank_env()
    assert rank_env is not None
    if "SLURM_JOB_ID" in os.environ:
        leave_sigterm_to_agent(os.environ)
    set_defaults(rank_env, os.environ)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)

    # An MPI that ends the process in MPI_Init says why itself: no tentative text is needed.
    def enter() -> None:
        if os.getpid() == pid:
            tell(control.fileno(), ENTERING, True)

    def entered() -> None:
        if os.getpid() == pid:
            tell_crashes(control.fileno())

    watch_mpi_import(rank_env, lambda _: None, _describe_mismatch, enter, entered)
    return rank_env


def log(value: Any) -> None:
    """Hand a value to the driver while a function runs; do nothing outside of ranks.

    Raises
    ------
    ValueError
        The value's pickle is too large for a message.
    """
    import cloudpickle

    if _control is None:
        return
    data = cloudpickle.dumps(value)
    if len(data) > _MOST_LOGGED:
        raise ValueError(f"a value of {len(data)} bytes: at most {_MOST_LOGGED} can be logged")
    tell(_control.fileno(), LOGGED, base64.b64encode(data).decode())


def fail(control: socket.socket, exc: BaseException, rank: int, *, pickles: bool) -> NoReturn:
    """Report the exception that ended a function, itself too if it `pickles`; then end this process."""
    report = describe_failure(exc, rank)
    _flush()
    tell_report(control.fileno(), report, _pickled(exc) if pickles else b"")
    _leave(report.code)


def describe_failure(exc: BaseException, rank: int) -> ExitReport:
    """Return the report that the driver will show for an exception that ended the function."""
    if isinstance(exc, SystemExit):
        number = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
        text = f": {exc.code}" if isinstance(exc.code, str) else ""
        text = f"called sys.exit({number}) and returned nothing{text}"
        return ExitReport(rank, EXIT, number & 0xFF, text)
    if isinstance(exc, KeyboardInterrupt):
        return ExitReport(rank, INTERRUPT, 130, "was interrupted")
    # MPI's errors mostly follow from the loss of another rank.
    kind = SECONDARY if isinstance(exc, TransportError) else kind_of(exc, rank)
    # The frame of run_rank is not the user's.
    traceback = describe_traceback(exc, skip=1)
    return ExitReport(rank, kind, 1, f"failed: {describe_exception(exc)}", traceback=traceback)


def _pickled(exc: BaseException) -> bytes:
    """Return an exception, pickled; empty if it cannot be pickled, is too large, or only asks for the end."""
    import cloudpickle

    if not isinstance(exc, Exception):
        return b""
    try:
        pickled: bytes = cloudpickle.dumps(exc)
    except Exception:
        return b""
    return pickled if len(pickled) <= _MOST_EXCEPTION else b""


def _flush() -> bool:
    """Write buffered output, for at most 0.5 s, as its reader may have stopped; return True.

    Return False at once if the process has no room for a thread.
    """
    thread = threading.Thread(target=flush_standard_files, daemon=True)
    try:
        thread.start()
    except Exception:
        return False
    thread.join(_FLUSH_S)
    return True


def _leave(code: int) -> NoReturn:
    """Exit without exit handlers, which would wait for other ranks: the driver knows, and ends them all."""
    if not _flush():
        flush_standard_files()
    os._exit(code or 1)


def _describe_mismatch(rank_env: RankEnv) -> str:
    from pyhvd.job.mpi.flavour import find_library

    alone = f"each of the {rank_env.size} ranks would be alone in a world of size 1"
    if rank_env.launcher == OPENMPI:
        return (
            f"mpi4py is built on {find_library().name}, but the driver's mpiexec is Open MPI's: {alone};"
            ' install Open MPI for the ranks: pip install "pyhvd[openmpi]"'
        )
    return (
        f"mpi4py is built on {find_library().name}, which does not speak PMI-1: {alone};"
        ' install MPICH for the ranks: pip install "pyhvd[mpich]"'
    )
