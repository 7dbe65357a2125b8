"""How the ranks become one MPI world: what the driver's service needs of it; and the way by PMI-1."""

from __future__ import annotations

import selectors
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pyhvd.job.connections import Peer
from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import FromDriver, FromTask, Pmi
from pyhvd.job.mpi.pmi import Abort, PmiError, PmiServer
from pyhvd.job.placement import Seat, Task, assign
from pyhvd.job.process.exit_report import EXIT


class RendezvousHost(Protocol):
    """What a wiring may ask of the driver's service."""

    @property
    def selector(self) -> selectors.BaseSelector:
        """Calls its keys' data in each turn of the service."""

    def tell_rank(self, rank: int, message: FromDriver) -> None:
        """Send something to a rank's task."""

    def tell_task(self, index: int, message: FromDriver) -> None:
        """Send something to a task."""

    def blame(self, rank: int, text: str, code: int, kind: str = EXIT) -> None:
        """Note a failure; rank -1 if it is none of a rank."""


class Rendezvous(Protocol):
    """A way in which ranks find each other.

    Attributes
    ----------
    ends_ranks : bool
        Whether MPI ends ranks without a word when it has lost others.
    """

    @property
    def ends_ranks(self) -> bool:
        """See above."""

    def begin(self, office: RendezvousHost, groups: Sequence[Sequence[Task]]) -> None:
        """All tasks have come: those of each host, in the order of :meth:`Registry.groups`.

        Raises
        ------
        LaunchError
            They cannot be wired so.
        """

    def seats(self) -> list[Seat]:
        """Return where each rank stands, in rank order; empty until that is known."""

    def waits_for(self) -> str:
        """Return what is still missing, for an error's text."""

    def variables(self, rank: int) -> Mapping[str, str]:
        """Return what must be in the rank's environment."""

    def speaks_pmi(self, rank: int) -> bool:
        """Whether the rank gets a line on which to speak PMI-1."""

    def hear_pmi(self, rank: int, line: str) -> None:
        """A rank has said a line of PMI-1."""

    def enter(self, rank: int) -> None:
        """A rank is about to call MPI_Init."""

    def hear(self, peer: Peer, message: FromTask) -> None:
        """Somebody has said what is about the wiring alone."""

    def leave(self, rank: int) -> None:
        """A rank has ended well."""

    def check(self, now: float) -> None:
        """Time passes."""

    def stop(self) -> None:
        """The job is over: end what runs here, without waiting for it."""

    def close(self) -> None:
        """Leave nothing running."""


class PmiRendezvous:
    """The driver itself is the server of PMI-1; nothing is started anywhere but the ranks."""

    ends_ranks = False

    def begin(self, office: RendezvousHost, groups: Sequence[Sequence[Task]]) -> None:
        """See :class:`Rendezvous`."""
        self._office = office
        try:
            self._server = PmiServer([len(group) for group in groups])
        except PmiError as exc:
            raise LaunchError(str(exc)) from exc
        self._seats = assign(groups)

    def seats(self) -> list[Seat]:
        """See :class:`Rendezvous`."""
        return self._seats

    def waits_for(self) -> str:
        """See :class:`Rendezvous`."""
        return ""

    def variables(self, rank: int) -> Mapping[str, str]:  # noqa: ARG002
        """See :class:`Rendezvous`."""
        return {}

    def speaks_pmi(self, rank: int) -> bool:  # noqa: ARG002
        """See :class:`Rendezvous`."""
        return True

    def hear_pmi(self, rank: int, line: str) -> None:
        """See :class:`Rendezvous`."""
        try:
            answers: Iterable[tuple[int, str]] = self._server.handle(rank, line)
        except Abort as abort:
            blame_abort(self._office, abort)
        except PmiError as exc:
            self._office.blame(rank, f"cannot go on: {exc}", 1)
        else:
            for who, answer in answers:
                self._office.tell_rank(who, Pmi(answer))

    def enter(self, rank: int) -> None:
        """See :class:`Rendezvous`; its lines of PMI-1 say it too."""

    def hear(self, peer: Peer, message: FromTask) -> None:
        """See :class:`Rendezvous`; there is nothing more."""

    def leave(self, rank: int) -> None:
        """See :class:`Rendezvous`."""
        try:
            self._server.leave(rank)
        except PmiError as exc:
            self._office.blame(rank, f"left the others alone: {exc}", 1)

    def check(self, now: float) -> None:
        """See :class:`Rendezvous`; nothing runs."""

    def stop(self) -> None:
        """See :class:`Rendezvous`; nothing runs."""

    def close(self) -> None:
        """See :class:`Rendezvous`; nothing runs."""


def blame_abort(office: RendezvousHost, abort: Abort) -> None:
    """A rank has called MPI_Abort."""
    office.blame(abort.rank, f"called MPI_Abort with code {abort.code}", abort.code)
