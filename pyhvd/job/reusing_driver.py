"""A driver of jobs on hosts that takes agents which an earlier job has left, and leaves them to the next."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any

from pyhvd.job.connections import SILENT_S, Peer
from pyhvd.job.hosts_driver import HostsDriver, Place
from pyhvd.job.hosts_machine import RankError
from pyhvd.job.kept_agents import KeptAgents
from pyhvd.job.messages import Again, Failed, FromAgent, Hello, Result, ResultAck


class ReusingDriver(HostsDriver):
    """Serves one job; `kept` has agents, the other arguments are those of :class:`HostsDriver`."""

    def __init__(self, kept: KeptAgents, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept = kept
        self._waking: set[int] = set()  # the hosts whose kept agents have not answered yet
        self._exceptions: dict[int, bytes] = {}
        self._results: defaultdict[int, bytearray] = defaultdict(bytearray)

    def serve(self) -> None:
        """See :meth:`HostsDriver.serve`; an error of a rank has the exception of its function."""
        try:
            super().serve()
        except RankError as exc:
            exc.exception = self._exceptions.get(exc.rank, b"")
            raise

    def take_result(self, rank: int) -> bytearray:
        """Return what a rank's function returned, pickled; after :meth:`serve`, and only once."""
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
        self._exceptions.setdefault(failed.report.rank, failed.exception)
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
