"""The driver of a job on hosts: it starts an agent per host by a command, and ends the job with one cause.

1. :mod:`pyhvd.job.hosts_machine` decides; this module acts, and tells it what happens.
2. Each agent says what its host has, and the driver compares that with what the job needs.
3. The rest is :class:`~pyhvd.job.driver.DriverService`. The job is over when all ranks have ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from pyhvd.common.text import list_some
from pyhvd.job.agent_command import END_S, SKIPPED, AgentCommand, AgentProcess
from pyhvd.job.connections import Peer
from pyhvd.job.driver import DriverService, JobSpec, epoch
from pyhvd.job.facts import hello, problem, version_problem
from pyhvd.job.hosts_machine import HostsMachine
from pyhvd.job.input import InputReader
from pyhvd.job.machine import Action, Begin, Done, PassOn, Pause, Say, StartCommand, Tell
from pyhvd.job.messages import (
    Dialed,
    Ended,
    EnteringInit,
    Facts,
    FromAgent,
    FromDriver,
    Hello,
    Input,
    InputAck,
    Listening,
    Member,
    Pmi,
    Prepare,
    RankOutput,
    Signal,
    Start,
)
from pyhvd.job.network_choice import Wanted
from pyhvd.job.output import Output
from pyhvd.job.placement import RankPlacement
from pyhvd.job.rendezvous import Rendezvous
from pyhvd.job.status_line import StatusLine
from pyhvd.transport.tcp.connection import Secret
from pyhvd.transport.tcp.session import ChannelError

# At Ctrl-Z the agents have this long to be told.
_TELL_S = 1.0


@dataclass(frozen=True)
class Seat:
    """One host of the job: its name in messages, its number of ranks, and the command of its agent."""

    name: str
    slots: int
    command: Sequence[str]


@dataclass(frozen=True)
class Checked:
    """What all hosts must have, and how the ranks find each other.

    For the first three see :func:`pyhvd.job.facts.problem`; `facts` are the launcher's.
    """

    directory: str
    script: str
    facts: Facts
    rendezvous: Rendezvous


Explain = Callable[[str, int, str], tuple[str, bool]]
"""Returns why a host's command failed, and whether that may pass, from its name, exit code and words."""


@dataclass(eq=False)
class Place:
    """A host with the command of its agent, and its connection, while it runs."""

    number: int
    seat: Seat
    command: AgentProcess | None = None
    peer: Peer | None = None


class HostsDriver(DriverService):
    """Serves one job on the hosts of `seats`, in this order.

    Parameters
    ----------
    spec : JobSpec
        What the ranks run; its `code` is a :class:`~pyhvd.job.program_process.Program`.
    seats : sequence of Seat
        The hosts.
    checked : callable
        Returns what all hosts must have; called while the agents start.
    explain : callable
        See :data:`Explain`.
    display : Output
        Shows the ranks' output.
    say : callable
        Shows a line of the driver's own.
    stdin : int or None
        The descriptor whose bytes are for rank 0; it stays the caller's.
    network : Wanted
        What the user wants of the network between the hosts.
    status : StatusLine, optional
        Shows how far the start has come.
    """

    def __init__(
        self,
        spec: JobSpec,
        seats: Sequence[Seat],
        checked: Callable[[], Checked],
        explain: Explain,
        display: Output,
        say: Callable[[str], None],
        stdin: int | None,
        network: Wanted,
        status: StatusLine | None = None,
    ) -> None:
        secret = Secret()
        names = [seat.name for seat in seats]
        machine = HostsMachine(spec.size, names, spec.start_timeout, epoch(), network)
        super().__init__(spec, secret, [], display, gone="its agent is gone", machine=machine)
        self._hosts = machine
        self._secret = secret
        self._check = checked
        self._explain = explain
        self._say = say
        self._status = status
        self._hello = hello()
        self._places = [Place(number, seat) for number, seat in enumerate(seats)]
        self._signals: list[int] = []
        self._done = False
        self._input: InputReader | None = None
        self._stdin = stdin
        self._shows_network = network.show

    def serve(self) -> None:
        """Start the agents and the ranks, and return when all ranks have ended without error.

        Raises
        ------
        LaunchError
            The job could not start; the text has a line for each host that is the reason.
        RankError
            A rank failed, or a host is lost.
        Interrupted
            A signal that :meth:`note_signal` had noted ended the job.
        """
        now = time.monotonic()
        self._hosts.until = now + self._spec.start_timeout
        self._perform_all(self._hosts.tick(now))
        self._checked = self._check()
        self._rendezvous = self._checked.rendezvous
        while not self._done:
            now = self._step()
            if self._input is not None:
                self._input.check()
            while self._signals:
                self._perform_all(self._hosts.signal(self._signals.pop(0), now))

    def note_signal(self, number: int) -> None:
        """Note a signal for the ranks; a signal handler may call it."""
        self._signals.append(number)

    def stop(self, reason: str, timeout: float) -> None:
        """See :meth:`DriverService.stop`; skip agents that are still starting, or have no rank left.

        The last message of an agent says that its last rank has ended. The agent of a command ends when the
        channel does, which ssh keeps open until then.
        """
        self._stop_reason = reason
        if self._status is not None:
            self._status.end()
        for peer in list(self._connections.peers):
            if not peer.connection.authenticated or (peer.ranks and peer.ranks <= self._hosts.ended):
                self._connections.drop(peer, reason)
        super().stop(reason, timeout)

    def close(self) -> None:
        """End the agents' commands, and close all connections."""
        if self._input is not None:
            self._input.close()
        for place in self._places:
            if place.command is not None:
                place.command.connection.close()
        until = time.monotonic() + END_S
        for place in self._places:
            if place.command is not None:
                self._end_command(place, place.command, max(0.0, until - time.monotonic()))
        super().close()

    def _perform(self, action: Action) -> None:
        if isinstance(action, StartCommand):
            self._start_command(self._places[action.host])
        elif isinstance(action, PassOn):
            for place in self._places:
                if place.peer is not None and place.peer.ranks:
                    place.peer.send(Signal(action.number))
        elif isinstance(action, Tell):
            self.tell_agent(action.index, action.message)
        elif isinstance(action, Pause):
            self._pause()
        elif isinstance(action, Say):
            self._say(action.text)
        elif isinstance(action, Done):
            self._done = True
        else:
            if isinstance(action, Begin):
                self._say_who_is_one(action.groups)
            super()._perform(action)

    def _step(self) -> float:
        now = super()._step()
        if self._status is not None and not self._status.over:
            if text := self._hosts.describe_start(now):
                self._status.show(text)
            else:
                self._status.end()
        return now

    def _pause(self) -> None:
        """Stop this process, as Ctrl-Z does, after the agents have been told."""
        until = time.monotonic() + _TELL_S
        while any(peer.connection.wants_write for peer in self._connections.peers):
            self._connections.turn()
            if time.monotonic() > until:
                break
        if self._status is not None:
            self._status.clear()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _start_command(self, place: Place) -> None:
        try:
            command = AgentCommand(place.seat.command, self._secret.reveal())
        except OSError as exc:
            text = f"{place.seat.command[0]} cannot be started: {exc}"
            self._hosts.fail_command(place.number, text, False, time.monotonic(), 0.0)
            return
        self._take_command(place, command)

    def _take_command(self, place: Place, command: AgentProcess) -> None:
        place.command = command
        place.peer = self._connections.adopt(command.connection)
        self.selector.register(command, selectors.EVENT_READ, lambda: self._listen(command))

    def _listen(self, command: AgentProcess) -> None:
        if not command.listen():
            with contextlib.suppress(KeyError, ValueError):  # the command may have ended in this turn
                self.selector.unregister(command)

    def _end_command(self, place: Place, command: AgentProcess, patience: float) -> tuple[int, str]:
        """End a place's command; return its exit code, and what it said."""
        ended = command.end(patience)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(command)
        command.close()
        place.command = None
        return ended

    def _place_of(self, peer: Peer) -> Place:
        return next(place for place in self._places if place.peer is peer)

    def _handle(self, peer: Peer, message: FromAgent) -> None:
        if isinstance(message, Hello):
            place = self._place_of(peer)
            self._hosts.set_clock(place.number, message.clock - time.time())
            if wrong := version_problem(self._hello, message):
                self._refuse(place, wrong)
            else:
                peer.send(self._prepare(place))
        elif isinstance(message, InputAck) and self._input is not None:
            self._input.acknowledge(message.count)
        elif isinstance(message, Listening | Dialed):
            if peer.member is not None:
                self._perform_all(self._hosts.hear(peer.member.index, message))
        else:
            super()._handle(peer, message)

    def _refuse(self, place: Place, why: str) -> None:
        """Note why the job cannot run on a host."""
        self._hosts.refuse(place.number, why, time.monotonic())

    def _prepare(self, place: Place) -> Prepare:
        """Return what an agent shall own, and look for."""
        return Prepare(place.number, place.seat.slots, self._checked.directory, self._checked.script)

    def _handle_of_rank(self, peer: Peer, message: RankOutput | Pmi | EnteringInit | Ended) -> None:
        if isinstance(message, EnteringInit):
            self._hosts.enter(message.rank)
        super()._handle_of_rank(peer, message)

    def _register(self, peer: Peer, member: Member) -> None:
        place = self._place_of(peer)
        if (member.index, member.slots) != (place.number, place.seat.slots) or member.facts is None:
            raise ChannelError("an agent registered as another than it is")
        checked = self._checked
        if wrong := problem(checked.facts, member.facts, checked.directory, checked.script):
            self._refuse(place, wrong)
        else:
            super()._register(peer, member)

    def _lose(self, peer: Peer, why: str, waited: bool) -> None:
        place = self._place_of(peer)
        if self._stop_reason is not None or (peer.ranks and peer.ranks <= self._hosts.ended):
            return  # as the job ends; close() waits for all commands together
        assert place.command is not None
        code, said = self._end_command(place, place.command, 0.0 if waited else END_S)
        started = self._hosts.all_registered
        if peer.member is not None:
            why = "; ".join([why, *said.splitlines()[-1:]])
            self._hosts.lose(peer.member, why, time.monotonic(), waited=waited)
        if not started:
            place.peer = None
            self._note_failed_command(place, peer, code, said)

    def _note_failed_command(self, place: Place, peer: Peer, code: int, said: str) -> None:
        if len(peer.connection.skipped) > SKIPPED:
            said = f"{SKIPPED} bytes were printed instead of the agent's first; they begin: {said[:80]!r}"
        text, may_pass = self._explain(place.seat.name, code, said)
        self._hosts.fail_command(place.number, text, may_pass, time.monotonic(), random.random())

    def _say_who_is_one(self, groups: Iterable[Sequence[Member]]) -> None:
        for group in groups:
            if len(group) > 1:
                names = list_some([self._places[member.index].seat.name for member in group], " and ")
                self._say(f"pyhvd: {names} are one host")

    def _start(self, placements: list[RankPlacement]) -> None:
        if self._shows_network and (line := self._hosts.network.describe()):
            self._say(f"pyhvd: {line}")
        super()._start(placements)
        first = self._by_rank[0]
        first.feed = chain(first.feed, self._begin_input(first))

    def _start_message(self, placement: RankPlacement) -> Start:
        defaults = dict(self._hosts.network.variables(placement.index))
        return msgspec.structs.replace(super()._start_message(placement), defaults=defaults)

    def _begin_input(self, peer: Peer) -> Iterator[FromDriver]:
        """Begin to read stdin; the peer's feed does so after rank 0 has been started."""
        if self._stdin is None:
            yield Input(b"")
        else:
            self._input = InputReader(self._stdin, self.selector, lambda data: peer.send(Input(data)))

    def _variables(self, placement: RankPlacement) -> Mapping[str, str]:
        """Return the numbers of a rank, which scripts read, and the job's variables."""
        across = [other.rank for other in self.placements if other.local_rank == placement.local_rank]
        numbers = {
            "HOSTNAME": self._places[placement.index].seat.name,
            "RANK": placement.rank,
            "SIZE": self._spec.size,
            "LOCAL_RANK": placement.local_rank,
            "LOCAL_SIZE": placement.local_size,
            "CROSS_RANK": across.index(placement.rank),
            "CROSS_SIZE": len(across),
        }
        return {f"HOROVOD_{name}": str(value) for name, value in numbers.items()} | dict(self._spec.env)
