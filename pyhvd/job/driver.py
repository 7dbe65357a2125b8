"""The driver's side of a job: agents register, start ranks, and are watched until the job is over.

The thread that calls :meth:`DriverService.run` does all the work; the service starts no thread. Its parts:

1. :mod:`pyhvd.job.connections` holds the connections to the agents.
2. :mod:`pyhvd.job.placement` decides which ranks an agent owns.
3. :mod:`pyhvd.job.rendezvous` makes the ranks one MPI world.
4. :mod:`pyhvd.job.machine` decides when ranks start, and what ends the job.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from pyhvd.job.connections import ConnectionServer, Peer
from pyhvd.job.errors import LaunchError
from pyhvd.job.machine import NEWER_ATTEMPT, Action, Begin, End, JobMachine, Late
from pyhvd.job.messages import (
    Beat,
    Code,
    DaemonEnded,
    DaemonOutput,
    Dialed,
    Ended,
    EnteringInit,
    Failed,
    FromAgent,
    FromDriver,
    Hello,
    InputAck,
    Listening,
    Member,
    OutputAck,
    Pmi,
    RankOutput,
    RankProxy,
    Remark,
    Restored,
    Result,
    Start,
    Stop,
    parts,
)
from pyhvd.job.output import Output
from pyhvd.job.placement import RankPlacement
from pyhvd.job.process.exit_report import EXIT
from pyhvd.job.rendezvous import PmiRendezvous, Rendezvous
from pyhvd.transport.tcp.connection import Secret

# After the Spark job has failed, its ranks have this long to report the cause.
_LAST_REPORTS_S = 1.0
_GONE = "its Spark task is gone (Python worker, executor or host)"


class SparkJob(Protocol):
    """The job in Spark, as the service sees it."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when the job is over."""

    @property
    def done(self) -> bool:
        """Whether the job is over."""

    def results(self) -> list[tuple[int, bytes]]:
        """Return each rank and its pickled result, or raise Spark's error."""


@dataclass
class JobSpec:
    """Says what the ranks of a job run.

    `code` is the pickled function with its args and kwargs. `env` is added to each agent's own environment.
    `executable` is the ranks' Python; None for the agents' own. All agents must register, and the ranks must
    find each other, within `start_timeout` seconds.
    """

    size: int
    code: bytes
    env: Mapping[str, str] = field(default_factory=dict)
    executable: str | None = None
    start_timeout: float = 600.0


def epoch() -> float:
    """Return the wall-clock time when the monotonic clock was 0."""
    return time.time() - time.monotonic()


class DriverService:
    """Serves one job, on all addresses in `hosts`. By default the ranks find each other by PMI-1.

    `gone` says why a connection to an agent may end. The `machine` decides.
    """

    def __init__(
        self,
        spec: JobSpec,
        secret: Secret,
        hosts: Sequence[str],
        display: Output,
        rendezvous: Rendezvous | None = None,
        gone: str = _GONE,
        machine: JobMachine | None = None,
    ) -> None:
        self._spec = spec
        self._display = display
        self._machine = machine or JobMachine(spec.size, spec.size, spec.start_timeout, epoch())
        self._rendezvous: Rendezvous = rendezvous or PmiRendezvous()
        self._by_rank: dict[int, Peer] = {}
        self._stop_reason: str | None = None
        self._connections = ConnectionServer(secret, hosts, spec.size, self._handle, self._lose, gone)
        self._connections.selector.register(display, selectors.EVENT_READ, self._acknowledge_output)

    @property
    def ports(self) -> list[int]:
        """The port of each address."""
        return self._connections.ports

    @property
    def placements(self) -> list[RankPlacement]:
        """Where the ranks are; empty before they start."""
        return self._machine.placements

    @property
    def selector(self) -> selectors.BaseSelector:
        """The selector on which each turn waits; the turn calls a ready key's ``data`` without arguments."""
        return self._connections.selector

    def run(self, job: SparkJob) -> list[bytes]:
        """Return the pickled results in rank order.

        Raises
        ------
        RankFailedError
            A rank raised, ended, was killed, or its host is lost.
        StartTimeoutError
            Some tasks did not register in time.
        LaunchError
            Spark ended the job for a reason of its own.
        """
        self.selector.register(job, selectors.EVENT_READ, lambda: None)
        try:
            return self._serve(job)
        finally:
            self._forget(job)

    def _forget(self, job: SparkJob) -> None:
        """Take a job out of the selector: once over, it stays readable, and no turn would wait."""
        with contextlib.suppress(KeyError):
            self.selector.unregister(job)

    def _serve(self, job: SparkJob) -> list[bytes]:
        self._machine.until = time.monotonic() + self._spec.start_timeout
        job_ended = math.inf
        while True:
            now = self._step()
            if not job.done:
                continue
            self._forget(job)
            try:
                by_rank = dict(job.results())
            except LaunchError:
                job_ended = min(job_ended, now)
                if now > job_ended + _LAST_REPORTS_S and not self._machine.failing:
                    raise
            else:
                self._receive_the_rest()
                return [by_rank[rank] for rank in range(self._spec.size)]

    def _step(self) -> float:
        """Handle events for at most one tick, and do what is due; return the time."""
        self._connections.turn()
        now = time.monotonic()
        self._rendezvous.check(now)
        self._perform_all(self._machine.tick(now))
        if self._machine.all_registered and not self.placements:
            placements = self._rendezvous.placements()
            if placements:
                self._start(placements)
        return now

    def _perform_all(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        if isinstance(action, Begin):
            self._rendezvous.begin(self, action.groups)
        elif isinstance(action, Late):
            raise self._machine.late_error(self._rendezvous.waits_for())
        elif isinstance(action, End):
            raise action.error

    def _receive_the_rest(self) -> None:
        """Receive what the ranks' agents sent before they ended, until they disconnect or fall silent."""
        while any(peer.ranks and self._connections.hears(peer) for peer in self._connections.peers):
            self._connections.turn()
            self._rendezvous.check(time.monotonic())

    def stop(self, reason: str, timeout: float) -> None:
        """Tell all tasks to kill their ranks; wait at most `timeout` seconds until they have disconnected.

        The wait skips tasks that have fallen silent.
        """
        self._stop_reason = reason
        for peer in self._connections.peers:
            peer.feed = iter(())
            if peer.connection.authenticated and peer.connection.open:
                peer.send(Stop(reason, quietly=True))
        self._rendezvous.stop()
        until = time.monotonic() + timeout
        while any(map(self._connections.hears, self._connections.peers)) and time.monotonic() < until:
            self._connections.turn()

    def close(self) -> None:
        """Close all connections, and end the processes of the rendezvous on this host."""
        try:
            self._rendezvous.close()
        finally:
            self._connections.close()

    def _start(self, placements: list[RankPlacement]) -> None:
        self._machine.place(placements)
        code = parts(self._spec.code)
        for peer in self._connections.peers:
            if peer.member is None:
                continue
            peer.ranks = self._machine.ranks_of(peer.member.index)
            owned = [placement for placement in placements if placement.rank in peer.ranks]
            self._by_rank |= dict.fromkeys(peer.ranks, peer)
            peer.feed = chain(map(Code, code), map(self._start_message, owned))

    def _start_message(self, placement: RankPlacement) -> Start:
        return Start(
            rank=placement.rank,
            size=self._spec.size,
            local_rank=placement.local_rank,
            local_size=placement.local_size,
            env={**self._variables(placement), **self._rendezvous.variables(placement.rank)},
            executable=self._spec.executable,
            pmi=self._rendezvous.speaks_pmi,
        )

    def _variables(self, placement: RankPlacement) -> Mapping[str, str]:  # noqa: ARG002
        """Return the variables of a rank, in addition to those of its agent and of its MPI."""
        return self._spec.env

    def _handle(self, peer: Peer, message: FromAgent) -> None:
        if isinstance(message, Member):
            self._register(peer, message)
        elif isinstance(message, RankProxy | DaemonOutput | DaemonEnded):
            if self._stop_reason is None:
                self._rendezvous.hear(peer, message)
        elif isinstance(message, Beat | Hello | InputAck | Result | Listening | Dialed | Remark | Restored):
            return
        elif isinstance(message, Failed):
            if message.report.rank in peer.ranks:
                self._note_failure(message)
        elif message.rank in peer.ranks:
            self._handle_of_rank(peer, message)

    def _handle_of_rank(self, peer: Peer, message: RankOutput | Pmi | EnteringInit | Ended) -> None:
        if isinstance(message, RankOutput):
            self._display.write(message.rank, message.stream, message.data)
        elif isinstance(message, Pmi):
            self._rendezvous.hear(peer, message)
        elif isinstance(message, EnteringInit):
            self._rendezvous.enter(message.rank)
        else:
            self._machine.end(message.rank)
            self._rendezvous.leave(message.rank)

    def _acknowledge_output(self) -> None:
        for rank, count in self._display.take_shown().items():
            self.tell_rank(rank, OutputAck(rank, count))

    def _note_failure(self, failed: Failed) -> None:
        ended = failed.silent and self._rendezvous.ends_ranks
        self._machine.report(failed.report, time.monotonic(), ended=ended)

    def _register(self, peer: Peer, member: Member) -> None:
        if self._stop_reason is not None:  # Spark has reused a Spark slot that became free as the job ended
            peer.send(Stop(self._stop_reason, quietly=True))
            return
        if refused := self._machine.register(member):
            peer.send(Stop(refused))
            return
        for other in self._connections.peers:
            if other.member is not None and other.member.index == member.index:
                other.member = None
                other.send(Stop(NEWER_ATTEMPT))
        peer.member = member

    def tell_rank(self, rank: int, message: FromDriver) -> None:
        """Send a message to a rank's agent."""
        if rank in self._by_rank:  # else its agent was lost before the ranks started
            self._by_rank[rank].send(message)

    def tell_agent(self, index: int, message: FromDriver) -> None:
        """Send a message to an agent."""
        for peer in self._connections.peers:
            if peer.member is not None and peer.member.index == index:
                peer.send(message)

    def blame(self, rank: int, text: str, code: int, kind: str = EXIT) -> None:
        """Record a failure of a rank; rank -1 for a failure that belongs to no rank."""
        self._machine.blame(rank, text, code, time.monotonic(), kind)

    def _lose(self, peer: Peer, why: str, waited: bool) -> None:
        """Handle the loss of an agent; before all have registered, Spark may replace the task."""
        assert peer.member is not None
        self._machine.lose(peer.member, why, time.monotonic(), waited=waited)
