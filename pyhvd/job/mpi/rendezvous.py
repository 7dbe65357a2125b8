"""How the ranks become one MPI world: what the driver asks of it, and the way by PMI-1.

The other way is :mod:`pyhvd.job.mpi.openmpi.rendezvous`. Ranks are numbered host by host, so that ranks that
share memory have consecutive numbers. The host of agent 0 comes first, so that rank 0 runs there. The ranks
of a host follow the indices of their agents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from selectors import BaseSelector
from typing import Protocol

from pyhvd.job.connections import Peer
from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import PART, FromAgent, FromDriver, Member, Pmi, PmiValues
from pyhvd.job.mpi.pmi import Abort, PmiError, PmiServer
from pyhvd.job.process.exit_report import EXIT


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The agent that owns a rank, by its index, and the rank's numbers."""

    rank: int
    index: int
    host: str
    local_rank: int
    local_size: int


def assign(owners: Iterable[Member]) -> list[RankPlacement]:
    """Return the placements of ranks whose agents are given in rank order, each as often as it has ranks."""
    ranks = list(owners)
    sizes = Counter(member.host_hash for member in ranks)
    placed: Counter[str] = Counter()
    placements: list[RankPlacement] = []
    for rank, member in enumerate(ranks):
        local_rank = placed[member.host_hash]
        placed[member.host_hash] += 1
        placements.append(RankPlacement(rank, member.index, member.host, local_rank, sizes[member.host_hash]))
    return placements


class Driver(Protocol):
    """The driver of ranks, as a rendezvous uses it."""

    @property
    def selector(self) -> BaseSelector:
        """The selector on which each turn waits; the turn calls a ready key's ``data`` without arguments."""

    def tell_rank(self, rank: int, message: FromDriver) -> None:
        """Send a message to a rank's agent."""

    def tell_agent(self, index: int, message: FromDriver) -> None:
        """Send a message to an agent."""

    def blame(self, rank: int, text: str, code: int, kind: str = EXIT) -> None:
        """Record a failure of a rank; rank -1 for a failure that belongs to no rank."""


class Rendezvous:
    """A way for the ranks to find each other; this base class needs and starts nothing.

    Attributes
    ----------
    speaks_pmi : bool
        Whether a rank speaks PMI-1 with its task.
    ends_ranks : bool
        Whether MPI silently ends ranks that have lost others.
    """

    speaks_pmi = True
    ends_ranks = False

    def begin(self, driver: Driver, groups: Sequence[Sequence[Member]]) -> None:
        """Begin, with the agents of each host in the order of :meth:`AgentPool.groups`.

        Raises
        ------
        LaunchError
            These agents cannot become one world.
        """
        raise NotImplementedError

    def placements(self) -> list[RankPlacement]:
        """Return the placements in rank order; empty until they are known."""
        raise NotImplementedError

    def hear(self, peer: Peer, message: FromAgent) -> None:
        """Handle a message about the rendezvous."""
        raise NotImplementedError

    def leave(self, rank: int) -> None:
        """Note that a rank ended without error."""
        raise NotImplementedError

    def waits_for(self) -> str:
        """Return what is missing, for an error's text."""
        return ""

    def variables(self, rank: int) -> Mapping[str, str]:  # noqa: ARG002
        """Return the variables that MPI needs in the rank's environment."""
        return {}

    def check(self, now: float) -> None:
        """Do what is due at this time; the driver calls it in each turn."""

    def stop(self) -> None:
        """End what the rendezvous started, without waiting: the job is over."""

    def close(self) -> None:
        """End what still runs, and wait for it."""


class PmiRendezvous(Rendezvous):
    """The driver serves PMI-1 itself, and starts no further process."""

    def begin(self, driver: Driver, groups: Sequence[Sequence[Member]]) -> None:
        self._driver = driver
        try:
            self._server = PmiServer(
                [host for host, group in enumerate(groups) for member in group for _ in range(member.slots)]
            )
        except PmiError as exc:
            raise LaunchError(str(exc)) from exc
        self._placements = assign(
            chain.from_iterable([member] * member.slots for group in groups for member in group)
        )

    def placements(self) -> list[RankPlacement]:
        return self._placements

    def hear(self, peer: Peer, message: FromAgent) -> None:  # noqa: ARG002
        """Answer a rank's line of PMI-1."""
        if not isinstance(message, Pmi):
            return
        try:
            answers = self._server.handle(message.rank, message.line)
        except Abort as abort:
            self._driver.blame(abort.rank, f"called MPI_Abort with code {abort.code}", abort.code)
        except PmiError as exc:
            self._driver.blame(message.rank, f"cannot continue: {exc}", 1)
        else:
            if len(answers) > 1:  # all have passed the barrier, and will ask for what the others have put
                self._share()
            for rank, answer in answers:
                self._driver.tell_rank(rank, Pmi(rank, answer))

    def _share(self) -> None:
        """Send every agent the values that are new, so that its ranks need not ask here."""
        first_ranks = {each.index: each.rank for each in reversed(self._placements)}
        for values in self._server.take_unshared(PART // 2):
            for rank in first_ranks.values():
                self._driver.tell_rank(rank, PmiValues(self._server.name, values))

    def leave(self, rank: int) -> None:
        try:
            self._server.leave(rank)
        except PmiError as exc:
            self._driver.blame(rank, f"ended too early: {exc}", 1)
