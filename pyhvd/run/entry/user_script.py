"""Runs the script in the rank, and reports the exception that ends it.

Under mpiexec a supervisor forks the rank. On a host of the job a guardian does (:func:`run_rank`).
"""

from __future__ import annotations

import atexit
import importlib.util
import io
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import redirect_stderr, suppress
from types import TracebackType

from mpi4py.run import run_command_line, set_abort_status

from pyhvd.common import launcher_hooks
from pyhvd.common.standard_files import flush_standard_files
from pyhvd.job.mpi.abort import can_end_job, drain_output
from pyhvd.job.mpi.rank_env import RankEnv, let_hangup_end, read_generation, read_rank_env, set_defaults
from pyhvd.job.process import segments
from pyhvd.job.process.exit_report import EXIT, INTERRUPT, ExitReport, kind_of
from pyhvd.job.process.rank_line import (
    ENTERING,
    SEGMENTS,
    TENTATIVE,
    UP,
    read_code,
    tell,
    tell_crashes,
    tell_report,
)
from pyhvd.job.rank.imports import offer_horovod, watch_mpi_import
from pyhvd.job.rank.step_signals import leave_sigterm_to_agent
from pyhvd.transport.mpi.ending import take_over, watch_abort


def run_rank(control: socket.socket) -> int:
    """Run the program whose words the rank's agent sends on the control socket; return the exit code."""
    import msgspec

    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # the agent runs in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    control.set_inheritable(False)
    program = msgspec.msgpack.decode(read_code(control), type=list[str])
    rank_env = read_rank_env()
    assert rank_env is not None
    known = read_generation(os.environ)
    if "SLURM_JOB_ID" in os.environ:
        leave_sigterm_to_agent(os.environ)
    message = set_defaults(rank_env, os.environ)
    let_hangup_end(os.environ)  # the launcher alone sends SIGHUP, and knows of nohup
    if message is not None and rank_env.rank == 0 and (known is None or not known.number):
        print(message, file=sys.stderr, flush=True)
    return run_script(program, rank_env, control.detach())


def run_script(program: list[str], rank_env: RankEnv, line_fd: int) -> int:
    """Run `program` as ``__main__``; return the exit code. After a failure, report it first.

    `line_fd` is this end of the rank's line (:mod:`pyhvd.job.process.rank_line`).
    """
    ending = _Ending(rank_env, line_fd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # By lines, so that a killed rank loses none. Not unbuffered, as with PYTHONUNBUFFERED: print would
        # write a line and its end apart, while ranks share the screen.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    offer_horovod()
    take_over()
    atexit.register(ending.leave)  # of the program's time it runs last, and MPI ends after it
    if program[0] not in ("-m", "-c") and not os.path.exists(program[0]):
        from pyhvd.run.entry.missing_script import describe_missing

        return ending.report(EXIT, 2, describe_missing(program[0], os.getcwd()))
    if sys.flags.safe_path:
        sys.path.insert(0, "")  # the entry that -P leaves out
    sys.path[0] = "" if program[0] == "-c" else os.getcwd()  # as python has it; for a script, mpi4py sets it
    when = time.time()
    try:
        run_command_line(program)
    except SystemExit as exc:
        if not ending.is_own:
            raise
        code = exc.code
        if code is None or code == 0:
            return 0
        if not ending.can_end_job:
            _order_abort(exc)
        if isinstance(code, int):
            return ending.report(EXIT, code & 0xFF or 1, f"pyhvd: {ending.who} called sys.exit({code})")
        return ending.report(EXIT, 1, f"pyhvd: {ending.who} called sys.exit:\n{code}")
    except BaseException as exc:
        when = time.time()
        # As the interpreter does, for debuggers and for pyhvd's exit handler, which tells the other ranks.
        sys.last_type, sys.last_value, sys.last_traceback = type(exc), exc, exc.__traceback__
        if not ending.is_own:
            shown = _own_frames(exc.__traceback__)
            sys.excepthook(type(exc), exc.with_traceback(shown), shown)
            return 130 if isinstance(exc, KeyboardInterrupt) else 1
        if not ending.can_end_job:
            _order_abort(exc)
        return ending.report(*_classify(exc, ending), when)
    return 0


def _order_abort(exc: BaseException) -> None:
    """Let mpi4py call MPI_Abort when this process exits."""
    watch_abort()
    set_abort_status(exc)


class _Ending:
    """How this rank ends after a failure.

    A child that the program forks ends as Python ends it, and reports nothing.
    """

    def __init__(self, rank_env: RankEnv, line_fd: int) -> None:
        self._rank_env = rank_env
        self._line_fd = line_fd
        self._pid = os.getpid()
        self._code: int | None = None
        self._text = ""
        self.rank = rank_env.rank
        self.who = f"{rank_env.title} (pid {self._pid})"
        launcher_hooks.supervised = True
        launcher_hooks.tell_up, launcher_hooks.tell_down = self.tell_up, self.tell_down
        watch_mpi_import(rank_env, self.tell_tentative, enter=self.tell_entering, entered=self.tell_entered)

    @property
    def is_own(self) -> bool:
        """Whether this process runs the program, and is no child that the program has forked."""
        return os.getpid() == self._pid

    @property
    def can_end_job(self) -> bool:
        """Whether the job ends without MPI_Abort."""
        return can_end_job(self._rank_env)

    def report(self, kind: str, code: int, text: str, when: float | None = None) -> int:
        """Report to the supervisor, which shows the text after the exit handlers, or without them."""
        self._code, self._text = code, text
        flush_standard_files()
        if self.is_own:
            at = time.time() if when is None else when
            tell_report(self._line_fd, ExitReport(self.rank, kind, code, text, at, titled=True))
        return code

    def tell_tentative(self, text: str) -> None:
        """Tell the supervisor what to show if this rank ends without a report; "" withdraws it."""
        self._tell(TENTATIVE, text)

    def tell_entering(self) -> None:
        """Tell the supervisor that this rank is about to call MPI_Init."""
        self._tell(ENTERING, True)

    def tell_entered(self) -> None:
        """Tell the supervisor that MPI_Init has returned, and its files; from now on, also of a crash."""
        self._tell(ENTERING, False)
        self._tell(SEGMENTS, sorted(segments.segments_of(os.getpid())))
        if self.is_own:
            tell_crashes(self._line_fd)

    def tell_up(self) -> None:
        """Tell the supervisor that pyhvd is up: now even exit code 0 is a failure to the other ranks."""
        self._tell(UP, True)
        segments.remove_own()

    def tell_down(self) -> None:
        """Tell the supervisor that pyhvd is about to shut down."""
        self._tell(UP, False)

    def _tell(self, what: str, value: object) -> None:
        if self.is_own:
            tell(self._line_fd, what, value)

    def leave(self) -> None:
        """After a failure, exit before MPI_Finalize waits for other ranks; this is the last exit handler."""
        if self._code is None or not self.is_own:
            return
        flush_standard_files()
        if self.can_end_job:
            os._exit(self._code)
        # mpi4py now calls MPI_Abort, which may end the supervisor before it shows the text. MPI's own message
        # would follow the traceback and add nothing.
        os.write(2, f"{self._text.rstrip()}\n".encode())
        drain_output()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _classify(exc: BaseException, ending: _Ending) -> tuple[str, int, str]:
    """Return the kind, the exit code and the text of an uncaught exception."""
    text = _format(exc)
    if isinstance(exc, KeyboardInterrupt):
        return INTERRUPT, 130, f"{text}pyhvd: {ending.who} was interrupted"
    return kind_of(exc, ending.rank), 1, f"pyhvd: {ending.who} failed:\n{text}"


def _format(exc: BaseException) -> str:
    """Return the traceback from the script on, as the user's own sys.excepthook shows it."""
    shown = _own_frames(exc.__traceback__)
    if sys.excepthook is not sys.__excepthook__:
        caught = io.StringIO()
        with suppress(Exception), redirect_stderr(caught):
            sys.excepthook(type(exc), exc, shown)
        if caught.getvalue().strip():
            return caught.getvalue().rstrip() + "\n"
    return "".join(traceback.format_exception(type(exc), exc, shown))


def _own_frames(shown: TracebackType | None) -> TracebackType | None:
    """Skip the frames that ran the script: this module's, mpi4py.run's and runpy's."""
    runner = importlib.util.find_spec("mpi4py.run")
    above = {__file__, runner.origin if runner is not None else None}
    while shown is not None:
        name = shown.tb_frame.f_code.co_filename
        if name not in above and "runpy" not in name:
            return shown
        shown = shown.tb_next
    return None
