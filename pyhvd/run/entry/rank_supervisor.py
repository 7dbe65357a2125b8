"""The supervisor: mpiexec starts one for each rank; it watches the rank's process and ends the job.

It has one thread and never calls MPI, so it can report how the rank ended: by the rank's own report, a signal
or an exit code. It passes signals on to the rank.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import selectors
import signal
import sys
import time
from dataclasses import asdict
from types import FrameType

from pyhvd.job.mpi.abort import can_end_job, claim_first_failure, drain_output, end_job
from pyhvd.job.mpi.rank_env import RankEnv
from pyhvd.job.process import segments
from pyhvd.job.process.exit_report import EXCEPTION, INTERRUPT, ExitReport, describe_unreported
from pyhvd.job.process.guardian import find_end, signal_group
from pyhvd.job.process.output import Relay
from pyhvd.job.process.rank_line import ENTERING, EXIT_HANDLERS_S, REPORT, RankLine
from pyhvd.job.process.signals import BLOCKED_OVER_FORK, ENDING, shell_code, wake_on_signals
from pyhvd.run.entry.control_socket import Line

# The first rank to fail shows its failure and ends the job. Ranks that fail later wait this long for it.
FIRST_ENDS_JOB_S = 1.0
# An unfinished line of output is shown after this long, as it may be a prompt or a progress bar.
_PARTIAL_LINE_S = 0.2


class Supervisor:
    """Watches one rank from its fork to its end.

    `pid` is the rank's process, the leader of its own process group. `rank_fd` is the supervisor's
    non-blocking end of the rank's line. `line` is the line to the launcher; None under a bare mpiexec.
    """

    def __init__(
        self, rank_env: RankEnv, pid: int, rank_fd: int, line: Line | None, relays: list[Relay]
    ) -> None:
        self._rank_env = rank_env
        self._pid = pid
        self._rank_fd = rank_fd
        self._rank = RankLine(functools.partial(self._tell, ENTERING), self._take_report)
        self._report: ExitReport | None = None
        self._deadline = math.inf  # the time at which the rank is killed
        self._line = line
        self._relays = relays
        self._reported = False  # whether the rank itself sent a report
        self._overdue = False  # whether the rank was killed: at its deadline, or because mpiexec was gone
        self._is_first = False  # whether the rank failed first on this host
        self._stopping = False  # whether a signal or the launcher ended the rank
        self._job_stops = False  # whether the launcher sent an ending signal, as it does to all ranks
        self._parent = os.getppid()
        self._selector = selectors.DefaultSelector()

    def watch(self) -> int:
        """Watch the rank to its end, and end the job if it failed; return this process's exit code."""
        self._prepare()
        while (end := find_end(self._pid)) is None:
            if time.monotonic() > self._deadline or os.getppid() != self._parent:
                self._overdue = True
                signal_group(self._pid, signal.SIGKILL)
            self._wait(min(self._deadline - time.monotonic(), _PARTIAL_LINE_S if self._relays else math.inf))
        self._read_rank()
        ended_well = end.si_status == 0 and self._report is None and not self._rank.up
        if not ended_well:
            # Kill what the rank started. The rank is not reaped yet: no other group has its number.
            signal_group(self._pid, signal.SIGKILL)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if not ended_well:
            segments.remove(self._rank.segments)
        for relay in self._relays:
            relay.finish()
        if self._report is None and not ended_well and not self._stopping:
            self._announce(self._describe_end(exit_code))
        if self._stopping:
            drain_output()  # when all ranks have said that they have ended, the launcher ends mpiexec
        self._tell("ended", exit_code or int(not ended_well))
        if self._report is not None and not self._stopping:
            return self._leave(self._report.code)
        return self._leave(shell_code(exit_code))

    def _prepare(self) -> None:
        read = wake_on_signals(self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_OVER_FORK)
        self._selector.register(read, selectors.EVENT_READ, lambda: _discard(read))
        self._selector.register(self._rank_fd, selectors.EVENT_READ, self._read_rank)
        if self._line is not None:
            self._selector.register(self._line, selectors.EVENT_READ, self._read_line)
        for relay in self._relays:
            relay.meanwhile = self._hear_launcher
            self._selector.register(relay, selectors.EVENT_READ, relay.pump)

    def _wait(self, seconds: float) -> None:
        """Wait for events, for at most `seconds`, and handle them."""
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

    def _hear_launcher(self) -> None:
        """Take the launcher's messages while a relay waits to write the rank's output."""
        if self._line is not None and self._line.open and select.select([self._line], [], [], 0)[0]:
            self._read_line()

    def _read_line(self) -> None:
        assert self._line is not None
        for what, value in self._line.receive():
            if what == "signal":
                self._job_stops = self._job_stops or value in ENDING
                self._forward(value)
        if not self._line.open:  # the launcher has died, or ends the job
            self._forget(self._line)
            self._stopping = True
            signal_group(self._pid, signal.SIGKILL)

    def _read_rank(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._rank_fd, 65536):
                self._rank.feed(chunk)
            self._forget(self._rank_fd)  # closed

    def _take_report(self, report: ExitReport, _: bytes) -> None:
        self._reported = True
        self._deadline = time.monotonic() + EXIT_HANDLERS_S
        self._announce(report)

    def _announce(self, report: ExitReport) -> None:
        """Send the report to the launcher at once, as this process may be killed soon; claim the failure."""
        self._report = report
        self._tell(REPORT, asdict(report))
        self._is_first = not report.follows_another and claim_first_failure(self._parent)

    def _describe_end(self, exit_code: int) -> ExitReport:
        """Return a report for a rank that sent none."""
        from pyhvd.job.process.crash import describe_crash

        stderr = b"".join(relay.last for relay in self._relays)
        crash = describe_crash(-exit_code, self._pid, self._rank.crash, stderr)
        kind, code, text = describe_unreported(exit_code, self._rank.tentative, crash)
        who = f"pyhvd: {self._rank_env.title} (pid {self._pid})"
        return ExitReport(self._rank_env.rank, kind, code, f"{who} {text}")

    def _leave(self, code: int) -> int:
        """If the rank failed, show that unless the launcher does, and end the job; return `code`."""
        if self._stopping and self._line is not None and (code or self._job_stops):
            self._pause(math.inf)  # until the launcher ends the job, after every rank has stopped
            self._line.remove_traces()
            end_job(self._rank_env, code, signal_mpiexec=False)
            return code
        report = self._report
        if report is None:
            if code:
                end_job(self._rank_env, code, signal_mpiexec=False)
            return code
        self._let_first_rank_end_job(report)
        if self._line is None and self._shows(report):
            sys.stderr.write(report.text.rstrip() + "\n")
            sys.stderr.flush()
        launched = self._line is not None
        end_job(self._rank_env, code, signal_mpiexec=not self._stopping and (launched or code == 1))
        return code

    def _shows(self, report: ExitReport) -> bool:
        if self._stopping:
            return self._is_first and report.kind in (EXCEPTION, INTERRUPT)
        # A rank that must call MPI_Abort shows its reported failure itself, unless it is killed first.
        return can_end_job(self._rank_env) or self._overdue or not self._reported

    def _let_first_rank_end_job(self, report: ExitReport) -> None:
        """Unless this rank failed first, wait: the first rank ends the job, and with it this process."""
        if self._is_first:
            return
        self._pause(FIRST_ENDS_JOB_S)
        if report.follows_another and not self._stopping:
            # No rank reported a primary failure: one of the waiting ranks shows its own.
            self._is_first = claim_first_failure(self._parent)
            if not self._is_first:
                self._pause(FIRST_ENDS_JOB_S)

    def _pause(self, seconds: float) -> None:
        """Wait at most `seconds` until mpiexec is gone or the line closes; without a line, until a signal."""
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
