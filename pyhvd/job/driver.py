"""The driver's side of a job: tasks register, become ranks, and are watched until the job is over.

The thread that calls :meth:`DriverService.run` does all the work; the service starts no thread. Its parts:

1. :mod:`pyhvd.job.connections` holds the connections to the tasks.
2. :mod:`pyhvd.job.placement` decides which rank a task becomes.
3. :mod:`pyhvd.job.rendezvous` makes the ranks one MPI world.
4. :mod:`pyhvd.job.failure` finds the cause of a failure.
"""

from __future__ import annotations

import contextlib
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
    OutputAck,
    Pmi,
    RankOutput,
    RankProxy,
    Start,
    Stop,
    Task,
    parts,
)
from pyhvd.job.output import Output
from pyhvd.job.placement import RankPlacement, Registry
from pyhvd.job.process.exit_report import EXIT, LOST, ExitReport
from pyhvd.job.rendezvous import PmiRendezvous, Rendezvous

# After the Spark job has failed, its ranks have this long to report the cause.
_LAST_REPORTS_S = 1.0
_NEWER_ATTEMPT = "a newer attempt of this task has registered"


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

    `code` is the pickled function with its args and kwargs. `env` is added to each task's own environment.
    `executable` is the ranks' Python; None for the tasks' own. All tasks must register, and the ranks must
    find each other, within `start_timeout` seconds.
    """

    size: int
    code: bytes
    env: Mapping[str, str] = field(default_factory=dict)
    executable: str | None = None
    start_timeout: float = 600.0


class DriverService:
    """Serves one job, on all addresses in `hosts`. By default the ranks find each other by PMI-1."""

    def __init__(
        self,
        spec: JobSpec,
        secret: Secret,
        hosts: Sequence[str],
        display: Output,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._spec = spec
        self._display = display
        self._registry = Registry(spec.size)
        self._failures = FailureAnalysis()
        self._rendezvous: Rendezvous = rendezvous or PmiRendezvous()
        self._all_registered = False
        self._by_rank: dict[int, Peer] = {}
        self.placements: list[RankPlacement] = []
        self._stop_reason: str | None = None
        self._connections = ConnectionServer(secret, hosts, spec.size, self._handle, self._lose)
        self._connections.selector.register(display, selectors.EVENT_READ, self._acknowledge_output)

    @property
    def ports(self) -> list[int]:
        """The port of each address."""
        return self._connections.ports

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
        until = time.monotonic() + self._spec.start_timeout
        job_ended = math.inf
        while True:
            self._connections.turn()
            now = time.monotonic()
            self._rendezvous.check(now)
            if now >= self._failures.settled_at:
                raise self._failures.error(self.placements)
            if not self.placements:
                self._start_or_time_out(now, until)
            if not job.done:
                continue
            self._forget(job)
            try:
                by_rank = dict(job.results())
            except LaunchError:
                job_ended = min(job_ended, now)
                if now > job_ended + _LAST_REPORTS_S and self._failures.settled_at == math.inf:
                    raise
            else:
                self._receive_the_rest()
                return [by_rank[rank] for rank in range(self._spec.size)]

    def _receive_the_rest(self) -> None:
        """Receive what the ranks' tasks sent before they ended, until they disconnect or fall silent."""
        while any(peer.rank >= 0 and self._connections.hears(peer) for peer in self._connections.peers):
            self._connections.turn()

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

    def _start_or_time_out(self, now: float, until: float) -> None:
        missing = self._registry.missing
        if not missing and not self._all_registered:
            self._all_registered = True
            self._rendezvous.begin(self, self._registry.groups())
        if self._all_registered and (placements := self._rendezvous.placements()):
            self._start(placements)
        elif now > until and self._all_registered:
            raise StartTimeoutError(
                f"all {self._spec.size} Spark tasks have started, but not all ranks within"
                f" {self._spec.start_timeout:g} s: {self._rendezvous.waits_for()}"
            )
        elif now > until:
            size, indices = self._spec.size, ", ".join(map(str, missing))
            raise StartTimeoutError(
                f"{len(missing)} of {size} Spark tasks have not started within"
                f" {self._spec.start_timeout:g} s: index {indices}. Does the cluster have {size} free slots?"
                " Ask for fewer ranks with num_proc, stop what uses the slots, or wait longer with"
                " start_timeout or PYHVD_SPARK_START_TIMEOUT",
                missing,
            )

    def _start(self, placements: list[RankPlacement]) -> None:
        self.placements = placements
        code = parts(self._spec.code)
        by_index = {placement.index: placement for placement in placements}
        for peer in self._connections.peers:
            if peer.task is None:
                continue
            placement = by_index[peer.task.index]
            peer.rank = placement.rank
            self._by_rank[placement.rank] = peer
            peer.feed = self._start_messages(placement, code)

    def _start_messages(self, placement: RankPlacement, code: list[bytes]) -> Iterator[FromDriver]:
        for part in code:
            yield Code(part)
        yield Start(
            rank=placement.rank,
            size=self._spec.size,
            local_rank=placement.local_rank,
            local_size=placement.local_size,
            env={**self._spec.env, **self._rendezvous.variables(placement.rank)},
            executable=self._spec.executable,
            pmi=self._rendezvous.speaks_pmi,
        )

    def _handle(self, peer: Peer, message: FromTask) -> None:
        if isinstance(message, Task):
            self._register(peer, message)
        elif isinstance(message, Launch | RankProxy | DaemonOutput | DaemonEnded):
            if self._stop_reason is None:
                self._rendezvous.hear(peer, message)
        elif peer.rank < 0 or isinstance(message, Beat):
            return
        elif isinstance(message, RankOutput):
            self._display.write(peer.rank, message.stream, message.data)
        elif isinstance(message, Pmi):
            self._rendezvous.hear(peer, message)
        elif isinstance(message, EnteringInit):
            self._rendezvous.enter(peer.rank)
        elif isinstance(message, Failed):
            self._note_failure(message)
        elif isinstance(message, Ended):
            peer.ended = True
            self._rendezvous.leave(peer.rank)

    def _acknowledge_output(self) -> None:
        for rank, count in self._display.take_shown().items():
            self.tell_rank(rank, OutputAck(count))

    def _note_failure(self, failed: Failed) -> None:
        report = failed.report
        if failed.silent and self._rendezvous.ends_ranks:
            # MPI may have ended this rank because another one was lost. Like a lost task, this failure gets
            # the time of the driver's clock: the earliest of these failures explains the others.
            self.blame(report.rank, report.text, report.code, LOST)
        else:
            self._failures.add(report, time.monotonic())

    def _register(self, peer: Peer, task: Task) -> None:
        if self._stop_reason is not None:  # Spark has reused a Spark slot that became free as the job ended
            peer.send(Stop(self._stop_reason, quietly=True))
            return
        if self._all_registered:
            peer.send(Stop("all tasks of the job have registered already, and none can be replaced"))
            return
        if not self._registry.add(task):
            peer.send(Stop(_NEWER_ATTEMPT))
            return
        for other in self._connections.peers:
            if other.task is not None and other.task.index == task.index:
                other.task = None
                other.send(Stop(_NEWER_ATTEMPT))
        peer.task = task

    def tell_rank(self, rank: int, message: FromDriver) -> None:
        """Send a message to a rank's task."""
        if rank in self._by_rank:  # else its task was lost before the ranks started
            self._by_rank[rank].send(message)

    def tell_task(self, index: int, message: FromDriver) -> None:
        """Send a message to a task."""
        for peer in self._connections.peers:
            if peer.task is not None and peer.task.index == index:
                peer.send(message)

    def blame(self, rank: int, text: str, code: int, kind: str = EXIT) -> None:
        """Record a failure of a rank; rank -1 for a failure that belongs to no rank."""
        self._failures.add(ExitReport(rank, kind, code, text), time.monotonic())

    def _lose(self, peer: Peer, why: str, waited: bool) -> None:
        """Handle the loss of a task.

        Before all tasks have registered, Spark may replace the task. Later the loss is a failure, unless the
        task's rank has ended without error.
        """
        assert peer.task is not None
        if peer.rank < 0 and self._all_registered:
            self.blame(-1, f"Spark task {peer.task.index} on host {peer.task.host} {why}", 1, LOST)
        elif peer.rank < 0:
            self._registry.remove(peer.task)
        elif not peer.ended and not self._failures.has(peer.rank):
            self._failures.add(ExitReport(peer.rank, LOST, 1, why), time.monotonic(), waited=waited)
