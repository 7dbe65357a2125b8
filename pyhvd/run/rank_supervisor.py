"""The process that mpiexec starts for each rank: it forks the rank proper, watches it, and ends the job.

It stays tiny and single-threaded, never touches MPI, and so can tell how the rank ended whatever happened to
it: a traceback that came up the report pipe, a signal, an exit code. Signals that it gets it passes on.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import sys
import time
from types import FrameType

from pyhvd.job.mpi.abort import can_end_job, claim_first_failure, drain_stderr, end_job
from pyhvd.job.mpi.rank_env import Place
from pyhvd.job.process.exit_report import (
    EXCEPTION,
    EXIT,
    INTERRUPT,
    SECONDARY,
    SIGNAL,
    TENTATIVE,
    UP,
    ExitReport,
)
from pyhvd.job.process.output import Relay
from pyhvd.job.process.signals import BLOCKED_OVER_FORK, ENDING, describe_signal, to_handle
from pyhvd.run.control_socket import Line

# After it reported a failure, a rank has this long for its exit handlers; then the job ends without them.
_EXIT_HANDLERS_S = 0.5
# A rank that did not fail first leaves the first this long to end the job, and to be the one shown.
FIRST_ENDS_JOB_S = 1.0
# An unfinished line of output is passed on after this long, so that a prompt or a progress bar shows.
_PARTIAL_LINE_S = 0.2


class Supervisor:
    """Watches one rank from its fork to its end.

    Parameters
    ----------
    place : Place
        Where the rank stands.
    pid : int
        The rank's process, leader of a process group of its own.
    report_fd : int
        Read end, non-blocking, of the pipe on which the rank reports an uncaught exception.
    line : Line or None
        To the launcher, when there is one.
    relays : list of Relay
        Copies of the rank's output to make, when asked for.
    """

    def __init__(
        self, place: Place, pid: int, report_fd: int, line: Line | None, relays: list[Relay]
    ) -> None:
        self._place = place
        self._pid = pid
        self._report_fd = report_fd
        self._report = b""
        self._record: ExitReport | None = None
        self._deadline = math.inf  # when the rank must have ended
        self._line = line
        self._relays = relays
        self._reported = False
        self._doubt = ""
        self._up = False  # pyhvd is, in the rank
        self._overdue = False  # had to be killed
        self._is_first = False  # to fail, on this host
        self._stopping = False  # told to end by a signal or by the launcher
        self._job_stops = False  # the launcher has said so, and not somebody else to this rank alone
        self._parent = os.getppid()
        self._selector = selectors.DefaultSelector()

    def watch(self) -> int:
        """Return when the rank has ended and nothing is left to do, with the exit code to leave with."""
        self._prepare()
        while not self._has_ended():
            if time.monotonic() > self._deadline or os.getppid() != self._parent:
                self._overdue = True
                self._kill()  # over its time, or mpiexec is gone: nobody is left to run for
            self._wait(min(self._deadline - time.monotonic(), _PARTIAL_LINE_S if self._relays else math.inf))
        self._read_report()
        ended_well = self._exit_code() == 0 and self._record is None and not self._up
        if not ended_well:
            self._kill()  # what the rank had started; it is a zombie still, so its group's number is its own
        exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        for relay in self._relays:
            relay.finish()
        if self._record is None and not ended_well and not self._stopping:
            self._announce(self._describe_end(exit_code))
        self._tell("ended", exit_code or int(not ended_well))
        if self._record is not None and not self._stopping:
            return self._leave(self._record.code)
        return self._leave(exit_code if exit_code >= 0 else 128 - exit_code)

    def _prepare(self) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in to_handle():
            signal.signal(number, self._forward)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_OVER_FORK)
        self._selector.register(read, selectors.EVENT_READ, lambda: _discard(read))
        self._selector.register(self._report_fd, selectors.EVENT_READ, self._read_report)
        if self._line is not None:
            self._selector.register(self._line, selectors.EVENT_READ, self._read_line)
        for relay in self._relays:
            self._selector.register(relay, selectors.EVENT_READ, relay.pump)

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _exit_code(self) -> int:
        """The exit code of the ended, not yet reaped rank; not 0 if it was killed."""
        info = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert info is not None
        return info.si_status

    def _wait(self, seconds: float) -> None:
        """Handle what comes in within `seconds`; return at the first of it."""
        events = self._selector.select(None if seconds == math.inf else max(0.0, seconds))
        for key, _ in events:
            key.data()
        for relay in self._relays:
            if relay.closed:
                self._forget(relay)
            elif not events:
                relay.flush()

    def _forget(self, source: int | Line | Relay) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _forward(self, number: int, _frame: FrameType | None = None) -> None:
        if number in ENDING:
            self._stopping = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def _read_line(self) -> None:
        assert self._line is not None
        for what, value in self._line.receive():
            if what == "signal":
                self._job_stops = self._job_stops or value in ENDING
                self._forward(value)
        if not self._line.open:  # the launcher is gone, or wants us gone
            self._forget(self._line)
            self._stopping = True
            self._kill()

    def _read_report(self) -> None:
        """Take what the rank reports: lines, which may come in pieces."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._report_fd, 65536):
                self._report += chunk
            self._forget(self._report_fd)  # closed
        *lines, self._report = self._report.split(b"\n")
        for record in map(ExitReport.load, lines):
            if record.kind == TENTATIVE:
                self._doubt = record.text
                continue
            if record.kind == UP:
                self._up = bool(record.code)
                continue
            self._reported = True
            self._deadline = time.monotonic() + _EXIT_HANDLERS_S
            self._announce(record)

    def _announce(self, record: ExitReport) -> None:
        """Pass the failure on at once: should this process be killed next, it is known already."""
        self._record = record
        self._tell("record", record.dump().decode())
        self._is_first = record.kind != SECONDARY and claim_first_failure(self._parent)

    def _describe_end(self, exit_code: int) -> ExitReport:
        """A record for a rank that ended without reporting anything."""
        who = f"pyhvd: {self._place.title} (pid {self._pid})"
        if exit_code < 0:
            return ExitReport(
                self._place.rank, SIGNAL, 128 - exit_code, f"{who} {describe_signal(-exit_code)}"
            )
        if self._doubt:
            return ExitReport(self._place.rank, EXIT, 1, f"{who} exited with code {exit_code}: {self._doubt}")
        if not exit_code:
            text = (
                f"{who} exited with code 0 while pyhvd was up, without its exit handlers (as os._exit does):"
                " the other ranks still counted on it; call pyhvd.shutdown() first"
            )
            return ExitReport(self._place.rank, EXIT, 1, text)
        text = f"{who} exited with code {exit_code}, without a Python exception"
        return ExitReport(self._place.rank, EXIT, exit_code, text)

    def _leave(self, code: int) -> int:
        """With the rank ended: show its failure unless the launcher will, and end the job if it failed."""
        if self._stopping and self._line is not None and (code or self._job_stops):
            self._pause(math.inf)  # the launcher lets every rank stop before it ends the job
            self._line.remove_traces()
            end_job(self._place, code, signal_mpiexec=False)
            return code
        record = self._record
        if record is None:
            if code:
                end_job(self._place, code, signal_mpiexec=False)
            return code
        self._let_first_rank_end_job(record)
        if self._line is None and self._shows(record):
            sys.stderr.write(record.text.rstrip() + "\n")
            sys.stderr.flush()
            drain_stderr()
        launched = self._line is not None
        end_job(self._place, code, signal_mpiexec=not self._stopping and (launched or code == 1))
        return code

    def _shows(self, record: ExitReport) -> bool:
        if self._stopping:
            return self._is_first and record.kind in (EXCEPTION, INTERRUPT)
        # A rank that has to call MPI_Abort shows its failure itself, if it gets that far.
        return can_end_job(self._place) or self._overdue or not self._reported

    def _let_first_rank_end_job(self, record: ExitReport) -> None:
        """Unless this rank was the first to fail, wait for that one to end the job, and us with it."""
        if self._is_first:
            return
        self._pause(FIRST_ENDS_JOB_S)
        if record.kind == SECONDARY and not self._stopping:
            # No rank has a better reason: one of those that waited like this one shows its own.
            self._is_first = claim_first_failure(self._parent)
            if not self._is_first:
                self._pause(FIRST_ENDS_JOB_S)

    def _pause(self, seconds: float) -> None:
        """Wait until the launcher hangs up or mpiexec is gone; without a launcher, until told to stop."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and os.getppid() == self._parent:
            if not self._line.open if self._line is not None else self._stopping:
                break
            self._wait(min(left, 0.5))

    def _tell(self, what: str, value: object) -> None:
        if self._line is not None:
            self._line.send(what, value)


def _discard(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)
