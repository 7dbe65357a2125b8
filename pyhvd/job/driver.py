"""The driver's side of a job: tasks register, become ranks, and are watched until the job is over.

The thread that calls :meth:`DriverService.run` does it all; it waits for the results anyway. Who is connected
is :mod:`pyhvd.job.connections`'s business, which rank a task becomes :mod:`pyhvd.job.placement`'s, how
ranks find each other :mod:`pyhvd.job.rendezvous`'s, what caused a failure :mod:`pyhvd.job.failure`'s.
"""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pyhvd.job.connections import ConnectionServer, Peer
from pyhvd.job.errors import LaunchError, StartTimeoutError
from pyhvd.job.failure import FailureAnalysis
from pyhvd.job.job_key import Secret
from pyhvd.job.messages import (
    Beat,
    Code,
    DaemonEnded,
    DaemonOutput,
    Ended,
    EnteringInit,
    Failed,
    FromDriver,
    FromTask,
    Launch,
    Output,
    OutputAck,
    Pmi,
    RankProxy,
    Register,
    Start,
    Stop,
    parts,
)
from pyhvd.job.placement import Registry, Seat, Task
from pyhvd.job.process.exit_report import EXIT, LOST, ExitReport
from pyhvd.job.rendezvous import PmiRendezvous, Rendezvous

# When the Spark job has failed, its ranks have so long to say why.
_LAST_WORDS_S = 1.0


class SparkJob(Protocol):
    """The job in Spark, as the service sees it."""

    def fileno(self) -> int:
        """Readable when the job is over."""

    @property
    def done(self) -> bool:
        """Whether the job is over."""

    def results(self) -> list[tuple[int, bytes]]:
        """Return each rank and its pickled result, or raise what Spark says."""


class Display(Protocol):
    """Where the ranks' output goes, as the service sees it."""

    def fileno(self) -> int:
        """Readable when more has been shown."""

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Have shown what a rank has written to its descriptor 1 or 2, without waiting for it."""

    def take_shown(self) -> Mapping[int, int]:
        """Return how many bytes of each rank have been shown since the last call."""


@dataclass
class JobSpec:
    """What the ranks of a job are to do.

    Attributes
    ----------
    size : int
        How many ranks.
    code : bytes
        The pickled function, args and kwargs.
    env : mapping of str to str
        Beside each task's own environment.
    executable : str or None
        The ranks' Python; each task's own by default.
    start_timeout : float
        Seconds until all tasks must have come.
    """

    size: int
    code: bytes
    env: Mapping[str, str] = field(default_factory=dict)
    executable: str | None = None
    start_timeout: float = 600.0


class DriverService:
    """Serves one job.

    Parameters
    ----------
    spec : JobSpec
        The job.
    secret : Secret
        Its key.
    hosts : sequence of str
        Addresses to listen on.
    display : Display
        Shows what the ranks write.
    wiring : Rendezvous, optional
        How the ranks find each other; by PMI-1, of which the driver is the server.
    """

    def __init__(
        self,
        spec: JobSpec,
        secret: Secret,
        hosts: Sequence[str],
        display: Display,
        wiring: Rendezvous | None = None,
    ) -> None:
        self._spec = spec
        self._display = display
        self._registry = Registry(spec.size)
        self._verdict = FailureAnalysis()
        self._wiring: Rendezvous = wiring or PmiRendezvous()
        self._wired = False
        self._by_rank: dict[int, Peer] = {}
        self.seats: list[Seat] = []
        self._over: str | None = None
        self._board = ConnectionServer(secret, hosts, spec.size, self._handle, self._lose)
        self._board.selector.register(display, selectors.EVENT_READ, self._tell_shown)

    @property
    def ports(self) -> list[int]:
        """The port of each address."""
        return self._board.ports

    @property
    def selector(self) -> selectors.BaseSelector:
        """See :class:`~pyhvd.job.rendezvous.RendezvousHost`."""
        return self._board.selector

    def run(self, job: SparkJob) -> list[bytes]:
        """Return the pickled results in rank order.

        Raises
        ------
        RankFailedError
            A rank raised, ended, was killed, or its host is gone.
        StartTimeoutError
            Not all tasks came in time.
        LaunchError
            Spark ended the job, for its own reasons.
        """
        self._board.wake_for(job)
        try:
            return self._serve(job)
        finally:
            self._board.forget(job)  # over, it stays readable: no turn would wait for anything

    def _serve(self, job: SparkJob) -> list[bytes]:
        until = time.monotonic() + self._spec.start_timeout
        job_ended = math.inf
        while True:
            self._board.turn()
            now = time.monotonic()
            self._wiring.check(now)
            if now >= self._verdict.settled_at:
                raise self._verdict.error(self.seats)
            if not self.seats:
                self._start_or_time_out(now, until)
            if not job.done:
                continue
            self._board.forget(job)
            try:
                results = self._sort(job.results())
            except LaunchError:
                job_ended = min(job_ended, now)
                if now > job_ended + _LAST_WORDS_S and self._verdict.settled_at == math.inf:
                    raise
            else:
                self._hear_the_rest()
                return results

    def _hear_the_rest(self) -> None:
        """Take what tasks that have ended well have sent before, until they have hung up or fall silent."""
        while any(peer.rank >= 0 and self._board.hears(peer) for peer in self._board.peers):
            self._board.turn()

    def stop(self, reason: str, timeout: float) -> None:
        """Have all tasks kill their ranks; return when all that speak have, `timeout` s at most."""
        self._over = reason
        for peer in self._board.peers:
            peer.feed = iter(())
            if peer.connection.authenticated and peer.connection.open:
                peer.send(Stop(reason, quietly=True))
        self._wiring.stop()
        until = time.monotonic() + timeout
        while any(map(self._board.hears, self._board.peers)) and time.monotonic() < until:
            self._board.turn()

    def close(self) -> None:
        """Hang up on everybody, and leave nothing running here."""
        try:
            self._wiring.close()
        finally:
            self._board.close()

    def _sort(self, results: list[tuple[int, bytes]]) -> list[bytes]:
        by_rank = dict(results)
        return [by_rank[rank] for rank in range(self._spec.size)]

    def _start_or_time_out(self, now: float, until: float) -> None:
        missing = self._registry.missing
        if not missing and not self._wired:
            self._wired = True
            self._wiring.begin(self, self._registry.groups())
        if self._wired and (seats := self._wiring.seats()):
            self._start(seats)
        elif now > until and self._wired:
            raise StartTimeoutError(
                f"all {self._spec.size} Spark tasks have started, but not all ranks within"
                f" {self._spec.start_timeout:g} s: {self._wiring.waits_for()}"
            )
        elif now > until:
            size, indices = self._spec.size, ", ".join(map(str, missing))
            raise StartTimeoutError(
                f"{len(missing)} of {size} Spark tasks have not started within"
                f" {self._spec.start_timeout:g} s: index {indices}. Does the cluster have {size} free slots?"
                " Ask for fewer ranks with num_proc, stop what holds the slots, or give it more time with"
                " start_timeout or PYHVD_SPARK_START_TIMEOUT",
                missing,
            )

    def _start(self, seats: list[Seat]) -> None:
        self.seats = seats
        code = parts(self._spec.code)
        by_index = {seat.index: seat for seat in seats}
        for peer in self._board.peers:
            if peer.task is None:
                continue
            seat = by_index[peer.task.index]
            peer.rank = seat.rank
            self._by_rank[seat.rank] = peer
            peer.feed = self._opening(seat, code)

    def _opening(self, seat: Seat, code: list[bytes]) -> Iterator[FromDriver]:
        for part in code:
            yield Code(part)
        yield Start(
            rank=seat.rank,
            size=self._spec.size,
            local_rank=seat.local_rank,
            local_size=seat.local_size,
            cross_rank=seat.cross_rank,
            cross_size=seat.cross_size,
            env={**self._spec.env, **self._wiring.variables(seat.rank)},
            executable=self._spec.executable,
            pmi=self._wiring.speaks_pmi(seat.rank),
        )

    def _handle(self, peer: Peer, message: FromTask) -> None:
        if isinstance(message, Register):
            self._register(peer, message)
        elif isinstance(message, Launch | RankProxy | DaemonOutput | DaemonEnded) or peer.task is None:
            if self._over is None:
                self._wiring.hear(peer, message)
        elif peer.rank < 0 or isinstance(message, Beat):
            return
        elif isinstance(message, Output):
            self._display.write(peer.rank, message.stream, message.data)
        elif isinstance(message, Pmi):
            self._wiring.hear_pmi(peer.rank, message.line)
        elif isinstance(message, EnteringInit):
            self._wiring.enter(peer.rank)
        elif isinstance(message, Failed):
            self._note_failure(peer.rank, message)
        elif isinstance(message, Ended):
            peer.ended = True
            self._wiring.leave(peer.rank)

    def _tell_shown(self) -> None:
        for rank, count in self._display.take_shown().items():
            self.tell_rank(rank, OutputAck(count))

    def _note_failure(self, rank: int, failed: Failed) -> None:
        if failed.silent and self._wiring.ends_ranks:
            # By the driver's own clock, as with tasks that are lost: what came first explains the others.
            self.blame(rank, _phrase(failed), failed.code, LOST)
            return
        record = ExitReport(rank, failed.kind, failed.code, _phrase(failed), failed.when)
        self._verdict.add(record, time.monotonic(), failed.traceback)

    def _register(self, peer: Peer, said: Register) -> None:
        task = Task(said.index, said.attempt, said.host_hash, said.host, said.pid)
        if self._over is not None:  # Spark has filled a slot that the end of the job had made free
            peer.send(Stop(self._over, quietly=True))
            return
        if self._wired:
            peer.send(Stop("its ranks have started; none can be replaced"))
            return
        if not self._registry.add(task):
            peer.send(Stop("a newer attempt of this task has come"))
            return
        for other in self._board.peers:
            if other.task is not None and other.task.index == task.index:
                other.task = None
                other.send(Stop("a newer attempt of this task has come"))
        peer.task = task

    def tell_rank(self, rank: int, message: FromDriver) -> None:
        """See :class:`~pyhvd.job.rendezvous.RendezvousHost`."""
        if rank in self._by_rank:  # else its task was lost before the ranks have started
            self._by_rank[rank].send(message)

    def tell_task(self, index: int, message: FromDriver) -> None:
        """See :class:`~pyhvd.job.rendezvous.RendezvousHost`."""
        for peer in self._board.peers:
            if peer.task is not None and peer.task.index == index:
                peer.send(message)

    def blame(self, rank: int, text: str, code: int, kind: str = EXIT) -> None:
        """See :class:`~pyhvd.job.rendezvous.RendezvousHost`."""
        self._verdict.add(ExitReport(rank, kind, code, text), time.monotonic())

    def _lose(self, peer: Peer, why: str, waited: bool) -> None:
        """A task is gone that had more to say, perhaps."""
        assert peer.task is not None
        if peer.rank < 0 and self._wired:
            self.blame(-1, f"Spark task {peer.task.index} on host {peer.task.host} {why}", 1, LOST)
        elif peer.rank < 0:
            self._registry.remove(peer.task)
        elif not peer.ended and not self._verdict.has(peer.rank):
            self._verdict.add(ExitReport(peer.rank, LOST, 1, why), time.monotonic(), waited=waited)


def _phrase(failed: Failed) -> str:
    return f"failed: {failed.cause}" if failed.traceback else failed.cause
