"""The driver of one generation of an elastic job: one set of ranks, until they end, fail or make room."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from pyhvd.job.connections import ELASTIC_SILENT_S, SILENT_S, Peer
from pyhvd.job.driver import JobSpec
from pyhvd.job.errors import LaunchError
from pyhvd.job.generation_env import Generation
from pyhvd.job.hosts_driver import Checked, Explain, Place, Seat
from pyhvd.job.kept_agents import KeptAgents
from pyhvd.job.messages import (
    Again,
    Beat,
    Ended,
    EnteringInit,
    FromAgent,
    Hello,
    Leave,
    Pmi,
    Prepare,
    RankOutput,
    Remark,
    Restore,
    Restored,
)
from pyhvd.job.network_choice import Wanted
from pyhvd.job.output import Output
from pyhvd.job.placement import RankPlacement
from pyhvd.job.process.signals import ENDING
from pyhvd.job.reusing_driver import ReusingDriver
from pyhvd.job.status_line import StatusLine
from pyhvd.job.store import StoreOrder

# A stored commit must be there after so long.
_RESTORE_S = 600.0


class StateLostError(LaunchError):
    """No host is left that holds what ranks have committed."""


class Outcome(Enum):
    """How a generation without a failure is over."""

    DONE = auto()  # all ranks have returned
    LEFT = auto()  # they have committed, and made room


@dataclass(frozen=True)
class ElasticSpec:
    """What all generations of an elastic job have in common.

    Attributes
    ----------
    max_size : int
        The most ranks that the job may have; 0 without a limit.
    preemption_command : str
        A shell command of each host that succeeds when the host will be taken away; empty without one.
    store : StoreOrder or None
        Where commits are stored.
    function : bool
        Whether the ranks run a function, whose results they send.
    """

    max_size: int = 0
    preemption_command: str = ""
    store: StoreOrder | None = None
    function: bool = False


class GenerationDriver(ReusingDriver):
    """Serves one generation; see :class:`~pyhvd.job.hosts_driver.HostsDriver`.

    Parameters
    ----------
    number : int
        The generation's, from 0.
    elastic : ElasticSpec
        What it has in common with the others.
    known_commit : int
        The newest commit of which the launcher has heard.
    holders : set of str or None
        The hosts that had ranks in the last generation, and whose agents are not known to be lost; None if no
        generation has had ranks.
    each_step : callable
        Called with the time, at least four times a second.
    kept, spec, seats, checked, explain, display, say, stdin, network, status
        See :class:`~pyhvd.job.reusing_driver.ReusingDriver`.

    Attributes
    ----------
    outcome : Outcome
        How this generation is over, if it has not failed.
    began_from : int or None
        The commit from which the ranks went on; None if they were not started.
    holders : set of str or None
        The same for the next generation, once ranks are started.
    commits : dict of str to int
        The newest commit of each host that has said so.
    lost : dict of str to str
        The hosts whose agents were lost, and why.
    refused : dict of str to str
        The hosts on which ranks cannot run, and why.
    leaving : dict of str to str
        The hosts that will be taken away, as their agents know, and why.
    """

    def __init__(
        self,
        number: int,
        elastic: ElasticSpec,
        known_commit: int,
        holders: set[str] | None,
        each_step: Callable[[float], None],
        kept: KeptAgents,
        spec: JobSpec,
        seats: Sequence[Seat],
        checked: Callable[[], Checked],
        explain: Explain,
        display: Output,
        say: Callable[[str], None],
        stdin: int | None,
        network: Wanted,
        status: StatusLine | None,
    ) -> None:
        super().__init__(kept, spec, seats, checked, explain, display, say, stdin, network, status)
        self._connections.silent_s = ELASTIC_SILENT_S
        self.number = number
        self.outcome = Outcome.DONE
        self.began_from: int | None = None
        self.commits: dict[str, int] = {}
        self.lost: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.leaving: dict[str, str] = {}
        self._elastic = elastic
        self._each_step = each_step
        self._known_commit = known_commit
        self.holders = holders
        self._asks_store = self._restored = False
        self._store_problem = ""
        self._held = 0  # the newest commit on hosts, before the store was asked
        self._asked = 0  # the generation for which the ranks shall make room
        self._settling: set[int] = set()  # hosts whose agents still end their ranks

    @property
    def stopped_by(self) -> int:
        """The signal that shall end the job and came after the last turn of :meth:`serve`; 0 without one."""
        return next((number for number in self._signals if number in ENDING), 0)

    def serves(self, host: str) -> bool:
        """Return whether this generation has ranks on a host."""
        return any(place.seat.name == host for place in self._places)

    def ask_to_leave(self, generation: int) -> None:
        """Let the ranks make room for a later generation, at their next commit or check."""
        self._asked = generation
        for place in self._places:
            if place.peer is not None and self._hears(place):
                place.peer.send(Leave(generation))

    def settle(self) -> None:
        """End the ranks that are left, show their output, and wait for each host's newest commit."""
        self._settling = {place.number for place in self._places if self._hears(place)}
        for place in self._places:
            if place.number in self._settling and place.peer is not None:
                place.peer.send(Again())
        until = time.monotonic() + SILENT_S
        while self._settling and time.monotonic() < until:
            self._connections.turn()
        self._stop_reason = "the generation is over"
        for place in self._places:
            late = place.number in self._settling or not self._hears(place)
            if late and place.peer in self._connections.peers:
                self.lost.setdefault(place.seat.name, "did not end its ranks in time")
                self._connections.drop(place.peer, "did not end its ranks in time")

    def _hears(self, place: Place) -> bool:
        """Return whether a host's agent has authenticated itself, and is not lost."""
        peer = place.peer
        return peer in self._connections.peers and peer.connection.authenticated and peer.connection.open

    def _step(self) -> float:
        now = super()._step()
        self._each_step(now)
        return now

    def _prepare(self, place: Place) -> Prepare:
        return msgspec.structs.replace(
            super()._prepare(place),
            function=self._elastic.function,
            again=True,
            elastic=True,
            preemption_command=self._elastic.preemption_command,
            store=self._elastic.store if place.number == 0 else None,  # the host of rank 0
        )

    def _handle(self, peer: Peer, message: FromAgent) -> None:
        if isinstance(message, Hello):
            place = self._place_of(peer)
            self.commits[place.seat.name] = message.commit
            if place.number in self._settling:
                self._settling.discard(place.number)
                return
        elif isinstance(message, Beat):
            name = self._place_of(peer).seat.name
            self.commits[name] = max(self.commits.get(name, 0), message.commit)
            if message.leaves:
                self.leaving[name] = message.leaves
        elif isinstance(message, Remark):
            self._say(f"pyhvd: host {self._place_of(peer).seat.name}: {message.text}")
            return
        elif isinstance(message, Restored):
            self._take_restored(self._place_of(peer).seat.name, message)
            return
        super()._handle(peer, message)

    def _handle_of_rank(self, peer: Peer, message: RankOutput | Pmi | EnteringInit | Ended) -> None:
        if isinstance(message, Ended) and message.left:
            self.outcome = Outcome.LEFT
        super()._handle_of_rank(peer, message)

    def _lose(self, peer: Peer, why: str, waited: bool) -> None:
        place = self._place_of(peer)
        if self.holders is not None:
            self.holders.discard(place.seat.name)
        if place.number not in self._waking and self._stop_reason is None:
            self.lost.setdefault(place.seat.name, why)
            self._settling.discard(place.number)
        super()._lose(peer, why, waited)

    def _refuse(self, place: Place, why: str) -> None:
        self.refused[place.seat.name] = why
        super()._refuse(place, why)

    def _start(self, placements: list[RankPlacement]) -> None:
        if self._may_be_stored and not self._restored:
            self._restore()
            return  # this is called in each step until the ranks start
        newest = max(self.commits.values())
        if newest < self._known_commit:
            lost = f"every host that held commit {self._known_commit} is gone"
            if not newest:
                other = f", nor can it be had from the store: {self._store_problem}" if self._restored else ""
                raise StateLostError(f"{lost}, and no other host holds the state{other}")
            self._say(f"pyhvd: {lost}: ranks go on from commit {newest}")
        self.began_from = newest
        self.holders = {place.seat.name for place in self._places}
        super()._start(placements)
        if self._asked:  # agents without ranks have not taken notice
            self.ask_to_leave(self._asked)

    @property
    def _may_be_stored(self) -> bool:
        """Whether the store may have a newer commit than the hosts: all that had ranks before are lost."""
        if self._elastic.store is None or self.holders is None:
            return False
        return not any(self.commits.get(name, -1) >= self._known_commit for name in self.holders)

    def _restore(self) -> None:
        """Let the first host take the newest stored commit; that may last."""
        if not self._asks_store:
            self._asks_store = True
            self._held = max(self.commits.values())
            self._machine.until = time.monotonic() + _RESTORE_S
            self.tell_agent(0, Restore())

    def _take_restored(self, name: str, message: Restored) -> None:
        self._restored, self._store_problem = True, message.problem
        self._machine.until = time.monotonic() + self._spec.start_timeout
        if message.commit > self._held:  # beats may have told of it already
            self._say(f"pyhvd: commit {message.commit} comes from the store")
        self.commits[name] = max(self.commits.get(name, 0), message.commit)

    def _variables(self, placement: RankPlacement) -> Mapping[str, str]:
        newest = max(self.commits.values())
        first = next(place for place in self._places if self.commits.get(place.seat.name) == newest)
        source = min(self._machine.ranks_of(first.number))
        stores = self._elastic.store is not None
        own = Generation(self.number, newest, source, self._elastic.max_size, stores=stores)
        return {**super()._variables(placement), **own.variables()}
