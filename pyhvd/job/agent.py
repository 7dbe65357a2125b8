"""One Spark task: registers with the driver, starts its rank, and supervises it to its end.

It runs in Spark's Python worker, which is used again for other tasks: nothing of the user runs here, no MPI
is loaded, and nothing is left behind. The result goes back as the task's own, through Spark's collect.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from pyhvd.job.host_id import host_hash
from pyhvd.job.job_key import Secret
from pyhvd.job.messages import (
    OUTPUT_CREDIT,
    PART,
    Beat,
    Code,
    DaemonEnded,
    DaemonOutput,
    EndDaemon,
    Ended,
    EnteringInit,
    Failed,
    FromTask,
    Output,
    OutputAck,
    Pmi,
    Register,
    Start,
    StartDaemon,
    Stop,
    decode_from_driver,
    encode,
)
from pyhvd.job.mpi.openmpi.daemon import Daemon, DaemonError
from pyhvd.job.process.exit_report import EXIT
from pyhvd.job.rank_process import RankProcess
from pyhvd.transport.tcp.connection import Address, Connection, connect
from pyhvd.transport.tcp.session import ChannelError

BEAT_S = 1.0
# A driver whose machine is gone says nothing any more. One that was suspended should find its ranks again.
_DRIVER_SILENT_S = 20.0
# The driver answers a failure by ending the job.
_VERDICT_S = 5.0


class TaskStoppedError(RuntimeError):
    """Why a task of the job has ended without a result; what the driver raises says more."""


class _Dismissed(Exception):
    """The driver has ended the job, and needs no result."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a task gives its rank, beside what the driver does.

    Attributes
    ----------
    files : mapping of str to int
        Descriptors that the rank inherits; it finds their numbers in variables of these names.
    env : mapping of str to str
        Variables.
    """

    files: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def run_task(
    addresses: Sequence[Address],
    secret: Secret,
    index: int,
    attempt: int,
    given: Given | None = None,
) -> tuple[int, bytes] | None:
    """Be task `index` of the job; return its rank and the pickled result, None if the driver wants none.

    Parameters
    ----------
    addresses : sequence of (str, int)
        Where the driver listens.
    secret : Secret
        The job's key.
    index, attempt : int
        Which task this is, and which attempt at it: a later one has a larger number.
    given : Given, optional
        What this task gives its rank.

    Raises
    ------
    TaskStoppedError
        The rank failed, or the driver is gone, or has no use for this attempt.
    ChannelError
        The driver cannot be reached, or does not hold the job's key.
    """
    task = _Task(connect(addresses, secret.reveal()), addresses, secret, given or Given())
    place = host_hash(os.environ.get("PYHVD_SPARK_HOST_SALT", ""))
    try:
        return task.run(Register(index, attempt, place, socket.gethostname(), os.getpid()))
    except _Dismissed:
        return None
    finally:
        task.close()


class _Task:
    def __init__(
        self, connection: Connection, addresses: Sequence[Address], secret: Secret, given: Given
    ) -> None:
        self._driver = connection
        self._addresses = addresses
        self._secret = secret
        self._given = given
        self._selector = selectors.DefaultSelector()
        self._code: list[bytes] = []
        self._child: RankProcess | None = None
        self._daemon: Daemon | None = None
        self._rank = -1
        self._said_end = False
        self._unshown = 0  # bytes of the rank's output
        self._failed_at = 0.0
        self._next_beat = 0.0
        self._patience = time.monotonic()  # the driver's silence counts from here at the earliest

    def run(self, registration: Register) -> tuple[int, bytes]:
        self._say(registration)
        self._selector.register(self._driver, selectors.EVENT_READ, self._hear)
        while True:
            self._turn()
            child = self._child
            if child is not None and child.failure is not None:
                self._fail(child.failure)
            elif child is not None and child.ended and child.result is not None:
                if not self._said_end:
                    self._said_end = True
                    self._say(Ended())
                if self._daemon is None or self._daemon.ended:  # it serves other ranks too
                    self._driver.finish(_VERDICT_S)
                    return self._rank, child.result
            if self._failed_at and time.monotonic() > self._failed_at + _VERDICT_S:
                raise TaskStoppedError(f"rank {self._rank} failed")

    def close(self) -> None:
        """Leave nothing behind, whatever goes wrong with one of them."""
        with ExitStack() as stack:
            stack.callback(self._driver.close)
            stack.callback(self._selector.close)
            if self._daemon is not None:
                stack.callback(self._daemon.close)
            if self._child is not None:
                stack.callback(self._child.close)

    def _turn(self) -> None:
        """Wait for something, for half a beat at most, and handle it."""
        before = time.monotonic()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._driver.wants_write else 0)
        self._selector.modify(self._driver, wanted, self._hear)
        if self._child is not None:  # a rank that prints faster than its output is shown has to wait
            self._child.hold_output(self._unshown >= OUTPUT_CREDIT or self._driver.full)
        if self._daemon is not None:
            self._daemon.hold_output(self._driver.full)
        for key, _ in self._selector.select(BEAT_S / 2):
            key.data()
        now = time.monotonic()
        if now > before + 2 * BEAT_S:
            self._patience = now  # it was this process that stood still
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._say(Beat())
        if now > max(self._driver.heard, self._patience) + _DRIVER_SILENT_S:
            raise TaskStoppedError(f"the driver has said nothing for {_DRIVER_SILENT_S:g} s")

    def _hear(self) -> None:
        self._driver.pump_out()
        for record in self._driver.pump_in():
            message = decode_from_driver(record)
            if isinstance(message, Stop):
                if message.quietly:
                    raise _Dismissed
                raise TaskStoppedError(f"the driver has ended this task: {message.reason}")
            if isinstance(message, Code):
                self._code.append(message.part)
            elif isinstance(message, Pmi) and self._child is not None:
                self._child.answer_pmi(message.line)
            elif isinstance(message, OutputAck):
                self._unshown -= message.count
            elif isinstance(message, Start):
                self._begin(message)
            elif isinstance(message, StartDaemon):
                self._start_daemon(message)
            elif isinstance(message, EndDaemon) and self._daemon is not None:
                self._daemon.let_go()
        if not self._driver.open:
            raise TaskStoppedError("the driver is gone")

    def _begin(self, start: Start) -> None:
        if self._child is not None:
            raise ChannelError("the driver started this task's rank twice")
        self._rank = start.rank
        start = msgspec.structs.replace(start, env={**start.env, **self._given.env})
        code = b"".join(self._code)
        self._code.clear()
        try:
            self._child = RankProcess(
                start,
                code,
                on_pmi=lambda line: self._say(Pmi(line)),
                on_enter=lambda: self._say(EnteringInit()),
                on_output=self._pass_on,
                files=self._given.files,
            )
        except (OSError, ValueError) as exc:
            self._fail(Failed(EXIT, f"could not be started: {exc}", "", time.time()))
        else:
            self._child.register(self._selector)

    def _start_daemon(self, wanted: StartDaemon) -> None:
        if self._daemon is not None:
            raise ChannelError("the driver started mpiexec's daemon twice")
        try:
            self._daemon = Daemon(
                wanted,
                self._addresses,
                self._secret,
                lambda data: self._say(DaemonOutput(data)),
                lambda code: self._say(DaemonEnded(code)),
            )
        except (DaemonError, OSError, ValueError) as exc:
            self._say(DaemonOutput(f"{exc}\n".encode()))
            self._say(DaemonEnded(127))
        else:
            self._daemon.register(self._selector)

    def _fail(self, failure: Failed) -> None:
        """Tell the driver, once; its answer is the end of the job."""
        if not self._failed_at:
            self._failed_at = time.monotonic()
            self._say(failure)

    def _pass_on(self, stream: int, data: bytes) -> None:
        self._unshown += len(data)
        for begin in range(0, len(data), PART):
            self._say(Output(stream, data[begin : begin + PART]))

    def _say(self, message: FromTask) -> None:
        if self._driver.open:
            self._driver.send(encode(message))
