"""Hang reports of a simulated cluster: the real reporter, on rank 0's process and on virtual time.

Rank 0 looks at the end of its turns, as the engine does, and asks ranks by out-of-band messages. Where a
simulated rank stands is given. Left out: with ready tables, ranks of other hosts do not tell rank 0 of cached
tensors for which they have long waited, so one is found only if a rank of host 0 has submitted it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyhvd.common.processes import ProcessPlace, ProcessState
from pyhvd.common.stacks import Frame, ThreadStack
from pyhvd.negotiation.messages import PROTOCOL_VERSION, Aside, StackReport, StackRequest
from pyhvd.observe.hang_reporter import HangReporter, RankLocations, take_aside
from pyhvd.observe.stall_inspector import StallInspector

if TYPE_CHECKING:
    from pyhvd.simulation.ranks import SimulatedRank
    from pyhvd.simulation.world import SimulatedWorld

IN_STEP = [ThreadStack("MainThread", [Frame("train.py", 71, "step"), Frame("train.py", 90, "<module>")])]
"""The stack of a rank that stands in its training step: the same for all ranks."""


@dataclass(frozen=True)
class HangReport:
    """A hang report: when rank 0 had made it (s), and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Locations(RankLocations):
    """What a simulated rank answers, and what it sees of the other ranks' processes."""

    world: SimulatedWorld

    def states(self, ranks: Iterable[int]) -> dict[int, ProcessState]:
        """See :meth:`pyhvd.observe.hang_reporter.RankLocations.states`."""
        return {rank: self._state_of(rank) for rank in ranks}

    def _state_of(self, rank: int) -> ProcessState:
        if self.world.host_of(rank) != self.world.host_of(self.rank):
            return ProcessState.UNKNOWN
        return ProcessState.GONE if self.world.ranks[rank].error else ProcessState.SLEEPING

    def report(self, number: int) -> StackReport:
        """See :meth:`pyhvd.observe.hang_reporter.RankLocations.report`."""
        return StackReport(PROTOCOL_VERSION, number, IN_STEP)


class Stalls:
    """Reports tensors that some ranks do not submit.

    Parameters
    ----------
    world : SimulatedWorld
        The cluster.
    warn_s, end_s : float
        Seconds after which rank 0 warns, and ends the job; 0: it does not end the job.

    Attributes
    ----------
    reports : list of HangReport
        The reports so far, the error that ended the job included.
    longest : float
        CPU time (s) of the longest look, or answer, on rank 0. Where turns are measured, it is part of rank
        0's turns.
    """

    def __init__(self, world: SimulatedWorld, warn_s: float = 60.0, end_s: float = 0.0) -> None:
        self.reports: list[HangReport] = []
        self.longest = 0.0
        self._world = world
        self._process = world.ranks[0].process
        places = [
            ProcessPlace(world.name_of(rank.host), 1000 + rank.rank, str(rank.host)) for rank in world.ranks
        ]
        self._where = [_Locations(rank, places, world=world) for rank in range(world.size)]
        coordinator = world.ranks[0].node.coordinator
        assert coordinator is not None
        inspector = StallInspector(warn_s, end_s, unannounced=bool(world.tables))
        self._reporter = HangReporter(
            inspector, self._where[0], world.ranks[0].send, coordinator.stalled, lambda *_: None, self._note
        )
        self._timer = math.inf
        world.ranks[0].stalls = self

    def look(self) -> None:
        """Do what is due; in a turn of rank 0's process."""
        now = self._process.now
        look = self._reporter.due
        if now >= look:
            begun = time.thread_time()
            look, error = self._reporter.inspect(now)
            self._count(begun)
            self._world.announce(0, 0)  # what the look has recalled
            if error is not None:
                self._note(error.message)
                self._world.ranks[0].node.stop(error, self._process.now)
        if look < math.inf and look != self._timer:
            self._timer = look
            self._world.clock.at(look, self._process.wake)

    def _note(self, text: str) -> None:
        self.reports.append(HangReport(self._process.now, text))

    def _count(self, begun: float) -> None:
        self.longest = max(self.longest, time.thread_time() - begun)

    def take(self, source: int, rank: SimulatedRank, message: Aside) -> None:
        """Let a rank's background thread answer, or take an answer."""
        assert isinstance(message, StackRequest | StackReport), message
        begun = time.thread_time()
        reporter = None if rank.rank else self._reporter
        take_aside(message, source, self._where[rank.rank], reporter, rank.send)
        if reporter is not None:
            self._count(begun)
