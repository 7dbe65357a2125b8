"""The driver of a job on hosts whose ranks run a function: it collects the results, and keeps the agents."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence

from pyhvd.job.connections import SILENT_S, Peer
from pyhvd.job.driver import JobSpec
from pyhvd.job.hosts_driver import Checked, Explain, HostsDriver, Place, Seat
from pyhvd.job.kept_agents import KeptAgents
from pyhvd.job.messages import Again, Failed, FromAgent, Hello, Result, ResultAck
from pyhvd.job.network_choice import Wanted
from pyhvd.job.output import Output


class FunctionDriver(HostsDriver):
    """Serves one job on the hosts of `seats`; see :class:`HostsDriver`.

    Parameters
    ----------
    spec : JobSpec
        What the ranks run; its `code` is that of :func:`~pyhvd.job.function_process.dump_call`.
    seats, checked, explain, display, say, network
        See :class:`HostsDriver`.
    kept : KeptAgents
        Where this job takes its agents from, as far as they are there, and leaves them.

    Attributes
    ----------
    exceptions : dict of int to bytes
        The pickled exceptions of the ranks that failed, as far as they could be sent.
    """

    _runs_functions = True

    def __init__(
        self,
        spec: JobSpec,
        seats: Sequence[Seat],
        checked: Callable[[], Checked],
        explain: Explain,
        display: Output,
        say: Callable[[str], None],
        network: Wanted,
        kept: KeptAgents,
    ) -> None:
        super().__init__(spec, seats, checked, explain, display, say, None, network)
        self.exceptions: dict[int, bytes] = {}
        self._kept = kept
        self._waking: set[int] = set()  # the hosts whose kept agents have not answered yet
        self._results: defaultdict[int, bytearray] = defaultdict(bytearray)

    def take_result(self, rank: int) -> bytearray:
        """Return what a rank returned, pickled; after :meth:`serve`, and only once."""
        return self._results.pop(rank)

    def keep_agents(self) -> None:
        """Keep the agents for a next job, after :meth:`serve`."""
        for place in self._places:
            peer, command = place.peer, place.command
            if peer is not None and command is not None and peer.connection.open:
                self._connections.release(peer)
                with contextlib.suppress(KeyError):
                    self.selector.unregister(command)
                place.peer = place.command = None
                self._kept.keep(place.seat.command, command)

    def _step(self) -> float:
        now = super()._step()
        for number in list(self._waking):
            peer = self._places[number].peer
            if peer is not None and now > peer.connection.heard + SILENT_S:
                self._connections.drop(peer, "was lost between two jobs", waited=True)
        return now

    def _start_command(self, place: Place) -> None:
        kept = self._kept.take(place.seat.command)
        if kept is None:
            super()._start_command(place)
            return
        self._waking.add(place.number)
        self._take_command(place, kept)
        assert place.peer is not None
        place.peer.send(Again())

    def _handle(self, peer: Peer, message: FromAgent) -> None:
        if isinstance(message, Result):
            if message.rank in peer.ranks:
                self._results[message.rank] += message.data
                peer.send(ResultAck(message.rank, len(message.data)))
            return
        if isinstance(message, Hello):
            self._waking.discard(self._place_of(peer).number)
        super()._handle(peer, message)

    def _note_failure(self, failed: Failed) -> None:
        self.exceptions.setdefault(failed.report.rank, failed.exception)
        super()._note_failure(failed)

    def _lose(self, peer: Peer, why: str, waited: bool) -> None:
        place = self._place_of(peer)
        if place.number not in self._waking or self._stop_reason is not None:
            super()._lose(peer, why, waited)
            return
        # It was lost between two jobs: another is started in its place in the next turn.
        self._waking.discard(place.number)
        assert place.command is not None
        self._end_command(place, place.command, 0.0)
        place.peer = None
        self._hosts.start_again(place.number)
