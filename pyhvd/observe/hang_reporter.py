"""Hang reports: looking for stalled tensors, asking the missing ranks where they stand, and saying so.

Owns: rank 0's open inquiry. Runs on the runtime's thread, and never waits: it is asked again when an answer
has come in, or is overdue. What to report, and its text, are :mod:`pyhvd.observe.stall_inspector`'s and
:mod:`pyhvd.observe.hang_report`'s, which are pure.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pyhvd.common.processes import ProcessPlace, ProcessState, has_ended, state_of
from pyhvd.common.stacks import user_stacks, waits_inside
from pyhvd.config import Config
from pyhvd.controller import Coordinator, Stalled
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    PROTOCOL_VERSION,
    ErrorInfo,
    StackReport,
    StackRequest,
    WaitAnswer,
    WaitQuestion,
    bits_of,
    encode,
)
from pyhvd.observe.hang_report import error_of, warning_of
from pyhvd.observe.metrics import Meter
from pyhvd.observe.stall_inspector import Answer, Inquiry, Stall, StallInspector

_log = logging.getLogger("pyhvd")

Send = Callable[[int, bytes], object]


def _log_warning(text: str) -> None:
    _log.warning("%s", text)


@dataclass(frozen=True, slots=True)
class RankLocations:
    """Where the ranks are, as this one knows it.

    Attributes
    ----------
    rank : int
        This rank.
    places : sequence of ProcessPlace
        Of every rank.
    threads : collection of int or None
        Idents of the threads that are this rank's program; None: all of the process.
    has_long_waits : callable
        Whether a thread waits in C code, without a Python function of pyhvd.
    job : str
        The job's name.
    """

    rank: int
    places: Sequence[ProcessPlace]
    threads: Collection[int] | None = None
    has_long_waits: Callable[[], bool] = bool
    job: str = ""

    def states(self, ranks: Iterable[int]) -> dict[int, ProcessState]:
        """Return what the processes of some ranks do, as far as that is seen from here."""
        return {rank: state_of(self.places[rank], self.places[self.rank]) for rank in ranks}

    def describe_ended(self, rank: int) -> str:
        """Return the text about a rank whose process has ended, if that is seen from here; else empty."""
        place = self.places[rank]
        return f"rank {rank} on {place} has ended" if has_ended(place, self.places[self.rank]) else ""

    def report(self, number: int) -> StackReport:
        """Return where this rank's threads stand."""
        waits = waits_inside(self.threads) or self.has_long_waits()
        return StackReport(PROTOCOL_VERSION, number, user_stacks(self.threads), waits)


@dataclass(slots=True)
class HangReporter:
    """Rank 0's part.

    Parameters
    ----------
    inspector : StallInspector
        Decides when there is something to report.
    where : RankLocations
        Of the ranks.
    send : callable
        ``send(rank, payload)``: by the control transport.
    pending : callable
        ``pending(now)`` returns all that waits; see :meth:`pyhvd.controller.Coordinator.stalled`.
    count : callable
        ``count(tensors, warned)`` is told how many are overdue, and whether that has just been reported.
    warn : callable, optional
        Gets the text of each warning; by default it is logged.

    Attributes
    ----------
    due : float
        Time (monotonic s) before which :meth:`inspect` has nothing to do.
    """

    inspector: StallInspector
    where: RankLocations
    send: Send
    pending: Callable[[float], list[Stalled]]
    count: Callable[[int, int], None]
    warn: Callable[[str], object] = _log_warning
    due: float = field(default=0.0, init=False)
    _inquiry: Inquiry | None = field(default=None, init=False)
    _number: int = field(default=0, init=False)
    _resumed: float = field(default=0.0, init=False)
    _askers: list[tuple[int, int]] = field(default_factory=list, init=False)
    _asked_for: list[Stalled] = field(default_factory=list, init=False)  # what only the askers know of
    _told: list[tuple[int, int]] = field(default_factory=list, init=False)  # by the open inquiry

    def resumed(self, now: float) -> None:
        """Note that rank 0's thread woke up much too late, at ``now`` (s): the job was suspended.

        A scheduler, or whoever pauses a container, stops all ranks alike. Nobody is to blame for that time.
        """
        self._resumed = now

    def inspect(self, now: float) -> tuple[float, ErrorInfo | None]:
        """Do what is due; return when to call again (inf: after a message), and what ends the job."""
        if self._inquiry is None:
            pending = self._waiting(now)
            if self._askers:
                self._told, self._askers = self._askers, []
                finding = self._all_of(pending, now)
            else:
                finding = self.inspector.look(pending, now)
            self.count(self.inspector.overdue(pending, now), 0)
            self.due = self.inspector.next_look
            if finding is None:
                self._tell("")
                # A tensor that starts to wait is announced by a message, or has to be looked for.
                return (self.due if pending or self.inspector.unannounced else math.inf), None
            self._ask(Inquiry(self._number, finding, self.inspector.answers_until(finding, now)))
        error = self._conclude(now)
        if error is not None:
            self.due = math.inf
            return now, error
        self.due = self.inspector.next_look if self._inquiry is None else self._inquiry.until
        return self.due, None

    def ask(self, rank: int, request: WaitQuestion, now: float) -> None:
        """Let a rank be told of all that waits now, at ``now`` (s)."""
        self._askers.append((rank, request.number))
        if request.waits_in:
            submitted, missing = 1 << rank, bits_of(request.missing)
            since = now - request.seconds
            self._asked_for.append(Stalled(GLOBAL_SET, request.waits_in, since, submitted, missing))
        self.due = 0.0

    def take(self, rank: int, report: StackReport) -> None:
        """Take a rank's answer."""
        if self._inquiry is not None:
            self._inquiry.take(rank, report)
            self.due = 0.0

    def _all_of(self, pending: Sequence[Stalled], now: float) -> Stall | None:
        """Return a finding of all that waits, for a rank that has asked."""
        if not pending:
            return None
        waited = now - min(each.since for each in pending)
        return Stall(tuple(pending), tuple(pending), math.floor(waited), ends_job=False)

    def _waiting(self, now: float) -> list[Stalled]:
        pending = [*self.pending(now), *self._asked_for]
        if self._resumed:
            pending = [replace(each, since=max(each.since, self._resumed)) for each in pending]
        return pending

    def _ask(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._number += 1
        for rank in inquiry.asked:
            if rank == self.where.rank:
                inquiry.take(rank, self.where.report(inquiry.number))
            else:
                self.send(rank, encode(StackRequest(PROTOCOL_VERSION, inquiry.number)))

    def _conclude(self, now: float) -> ErrorInfo | None:
        """Report what the inquiry has found, if it is over, unless nothing is stalled any more."""
        inquiry = self._inquiry
        if inquiry is None or not inquiry.is_over(now):
            return None
        self._inquiry = None
        finding = inquiry.finding.still(self._waiting(now))
        if finding is None:
            self._tell("")
            return None
        places = self.where.places
        # A rank that has submitted meanwhile lacks nothing any more.
        missing = {*finding.missing}
        asked = [rank for rank in inquiry.asked if rank in missing]
        silent = [rank for rank in asked if rank not in inquiry.answers]
        known: dict[int, Answer] = {**inquiry.answers, **self.where.states(silent)}
        answers = {rank: known[rank] for rank in asked}
        if finding.ends_job:
            return error_of(finding, answers, places, now)
        text = warning_of(finding, answers, places, now)
        if self._told:
            self._tell(text)
            return None
        self.warn(text)
        self.count(len(finding.stalled), 1)
        return None

    def _tell(self, text: str) -> None:
        """Answer the ranks that have asked for the report that is made."""
        for rank, number in self._told:
            self.send(rank, encode(WaitAnswer(PROTOCOL_VERSION, number, text)))
        self._told, self._asked_for = [], []


def take_aside(
    message: StackRequest | StackReport | WaitQuestion,
    source: int,
    where: RankLocations,
    reporter: HangReporter | None,
    send: Send,
    now: float = 0.0,
) -> None:
    """Answer a question, or take an answer."""
    if isinstance(message, StackRequest):
        send(source, encode(where.report(message.number)))
    elif isinstance(message, WaitQuestion):
        if reporter is None:
            send(source, encode(WaitAnswer(PROTOCOL_VERSION, message.number, "")))
        else:
            reporter.ask(source, message, now)
    elif reporter is not None:
        reporter.take(source, message)


def make_reporter(
    config: Config,
    where: RankLocations,
    send: Send,
    coordinator: Coordinator | None,
    meter: Meter,
    *,
    unannounced: bool,
) -> HangReporter | None:
    """Return rank 0's reporter, or None if it is off; ``unannounced``: as for StallInspector."""
    if coordinator is None or config.stall_check_disable or not config.stall_check_time_seconds:
        return None
    inspector = StallInspector(
        config.stall_check_time_seconds, config.stall_shutdown_time_seconds, unannounced=unannounced
    )
    return HangReporter(inspector, where, send, coordinator.stalled, meter.stalled)
