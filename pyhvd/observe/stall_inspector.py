"""Which tensors wait for ranks that have not submitted them, for how long already, and where those ranks are.

Owns: :class:`StallInspector`, which decides when to warn and when to give up, and :class:`Inquiry`, which
collects what the missing ranks answer. Pure: told the time, what is pending, and what was answered. The text
of it all is :mod:`pyhvd.observe.hang_report`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyhvd.common.processes import ProcessState
from pyhvd.common.stacks import ThreadStack
from pyhvd.controller import Stalled
from pyhvd.negotiation.messages import StackReport, iter_bits

ANSWER_SECONDS = 2.0
"""How long a rank may take to say where it stands."""

MOST_ASKED = 16
"""Ranks that are asked at once, and described in one report."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Tensors that have waited for too long.

    Attributes
    ----------
    stalled : tuple of Stalled
        Those.
    pending : tuple of Stalled
        All that wait, those included.
    limit : float
        Seconds for which they have waited at least.
    ends_job : bool
        Whether that is the time after which the job ends.
    """

    stalled: tuple[Stalled, ...]
    pending: tuple[Stalled, ...]
    limit: float
    ends_job: bool

    @property
    def missing(self) -> list[int]:
        """The ranks that have not submitted one of them."""
        missing = 0
        for each in self.stalled:
            missing |= each.missing
        return iter_bits(missing)

    def still(self, pending: Sequence[Stalled]) -> Stall | None:
        """Return what is left of it, by what is pending now; None for nothing."""
        left = {(each.process_set, each.name, each.since): each for each in pending}
        keys = [(each.process_set, each.name, each.since) for each in self.stalled]
        stalled = tuple(left[key] for key in keys if key in left)
        return Stall(stalled, tuple(pending), self.limit, self.ends_job) if stalled else None


class StallInspector:
    """Decides when to warn and when to give up.

    Parameters
    ----------
    warn_after : float
        Seconds.
    end_after : float
        Seconds after which the job is ended; 0 for never.
    unannounced : bool
        Whether tensors may come to wait without a message, so that one has to look for them.

    Attributes
    ----------
    next_look : float
        When (s) to look again.
    oversleep : float
        How late (s) a look may come before that means something: half of the warning time.
    """

    def __init__(self, warn_after: float, end_after: float, *, unannounced: bool = False) -> None:
        self.unannounced = unannounced
        self._warn_after = warn_after
        self._end_after = end_after or math.inf
        self.next_look = 0.0
        self.oversleep = warn_after / 2
        self._silent_until = 0.0

    def look(self, pending: Sequence[Stalled], now: float) -> Stall | None:
        """Return what is to be reported, if anything."""
        period = min(self._warn_after, self._end_after)
        oldest = min((p.since for p in pending), default=now)
        self.next_look = now + max(min(period, oldest + period - now), period / 4)
        if self.unannounced:
            self.next_look = min(self.next_look, now + period / 4)
        late = tuple(p for p in pending if now - p.since >= self._warn_after)
        if not late:
            return None
        if over := tuple(p for p in late if now - p.since >= self._end_after):
            return Stall(over, tuple(pending), self._end_after, ends_job=True)
        if now < self._silent_until:
            return None
        self._silent_until = min(now + self._warn_after, oldest + self._end_after)
        sooner = self.next_look if self.unannounced else math.inf
        self.next_look = min(sooner, self._silent_until)
        return Stall(late, tuple(pending), self._warn_after, ends_job=False)

    def overdue(self, pending: Sequence[Stalled], now: float) -> int:
        """Return how many tensors have waited for longer than the warning time."""
        return sum(now - each.since >= self._warn_after for each in pending)

    def answers_until(self, finding: Stall, now: float) -> float:
        """Return until when (s) to wait for answers: a warning must not hold up the end."""
        until = now + ANSWER_SECONDS
        if finding.ends_job:
            return until
        return min(until, max(now, min(each.since for each in finding.stalled) + self._end_after))


Answer = list[ThreadStack] | ProcessState
"""What is known of a rank: where its threads stand, or, if it did not say so, what its process does."""


@dataclass(slots=True)
class Inquiry:
    """Where are the ranks of a finding? Ends when all have answered, or ``until`` (s).

    Attributes
    ----------
    asked : list of int
        The ranks that are to say where they stand.
    """

    number: int
    finding: Stall
    until: float
    answers: dict[int, Answer] = field(default_factory=dict)
    asked: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.asked = self.finding.missing[:MOST_ASKED]

    def take(self, rank: int, report: StackReport) -> None:
        """Take a rank's answer, unless it belongs to an earlier question."""
        if report.number == self.number:
            self.answers[rank] = report.threads

    def is_over(self, now: float) -> bool:
        """Return whether there is nothing left to wait for."""
        return now >= self.until or self.answers.keys() >= set(self.asked)
