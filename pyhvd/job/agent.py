"""One task of a job: it registers with the driver, starts its rank, and supervises it to its end.

It runs in Spark's Python worker, which later runs other tasks. So it runs no code of the user, loads no MPI,
and leaves nothing behind. Spark's collect carries the result, as the task's own.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec

from pyhvd.job.host_id import host_hash
from pyhvd.job.job_key import Secret
from pyhvd.job.messages import (
    OUTPUT_CREDIT,
    Beat,
    Code,
    DaemonEnded,
    DaemonOutput,
    EndDaemon,
    Ended,
    EnteringInit,
    Failed,
    FromTask,
    OutputAck,
    Pmi,
    RankOutput,
    Start,
    StartDaemon,
    Stop,
    Task,
    decode_from_driver,
    encode,
    parts,
)
from pyhvd.job.mpi.openmpi.daemon import Daemon, DaemonError
from pyhvd.job.process.exit_report import EXIT, ExitReport
from pyhvd.job.rank_process import RankProcess
from pyhvd.transport.tcp.connection import Address, connect
from pyhvd.transport.tcp.session import ChannelError

BEAT_S = 1.0
# A lost driver is silent. This is long enough for a suspended driver to find its ranks again.
_DRIVER_SILENT_S = 20.0
# How long to wait for the driver to end the job after a failure, or to receive the last messages.
_DRIVER_ANSWER_S = 5.0


class TaskStoppedError(RuntimeError):
    """A task of the job ended without a result; the driver's error says more."""


class _Dismissed(Exception):
    """The driver has ended the job, and needs no result."""


def run_task(
    addresses: Sequence[Address],
    secret: Secret,
    index: int,
    attempt: int,
    files: Mapping[str, int] = {},
    env: Mapping[str, str] = {},
) -> tuple[int, bytes] | None:
    """Run task `index` of the job; return its rank and the pickled result, None if the driver wants none.

    Parameters
    ----------
    addresses : sequence of (str, int)
        Where the driver listens.
    secret : Secret
        The job's key.
    index, attempt : int
        The task, and this attempt at it; a later attempt has a larger number.
    files : mapping of str to int
        Descriptors that the rank inherits; variables of these names hold their numbers.
    env : mapping of str to str
        The rank's variables, in addition to those that the driver sends.

    Raises
    ------
    TaskStoppedError
        The rank failed, the driver is gone, or the driver refused this attempt.
    ChannelError
        The driver cannot be reached, or does not hold the job's key.
    """
    task = _Task(addresses, secret, files, env)
    host = host_hash(os.environ.get("PYHVD_SPARK_HOST_SALT", ""))
    try:
        return task.run(Task(index, attempt, host, socket.gethostname()))
    except _Dismissed:
        return None
    finally:
        task.close()


class _Task:
    def __init__(
        self,
        addresses: Sequence[Address],
        secret: Secret,
        files: Mapping[str, int],
        env: Mapping[str, str],
    ) -> None:
        self._driver = connect(addresses, secret.reveal())
        self._addresses = addresses
        self._secret = secret
        self._files = files
        self._env = env
        self._selector = selectors.DefaultSelector()
        self._code: list[bytes] = []
        self._process: RankProcess | None = None
        self._daemon: Daemon | None = None
        self._rank = -1
        self._told_end = False
        self._unacknowledged = 0  # bytes of the rank's output
        self._failed_at = 0.0
        self._next_beat = 0.0
        self._silent_since = time.monotonic()  # the driver does not count as silent from an earlier time

    def run(self, registration: Task) -> tuple[int, bytes]:
        self._send(registration)
        self._selector.register(self._driver, selectors.EVENT_READ, self._receive)
        while True:
            self._turn()
            process = self._process
            if process is not None and process.failure is not None:
                self._fail(process.failure)
            elif process is not None and process.ended and process.result is not None:
                if not self._told_end:
                    self._told_end = True
                    self._send(Ended())
                if self._daemon is None or self._daemon.ended:  # the daemon serves other ranks too
                    self._driver.finish(_DRIVER_ANSWER_S)
                    return self._rank, process.result
            if self._failed_at and time.monotonic() > self._failed_at + _DRIVER_ANSWER_S:
                raise TaskStoppedError(f"rank {self._rank} failed")

    def close(self) -> None:
        """Close everything, even if one part raises."""
        with ExitStack() as stack:
            stack.callback(self._driver.close)
            stack.callback(self._selector.close)
            if self._daemon is not None:
                stack.callback(self._daemon.close)
            if self._process is not None:
                stack.callback(self._process.close)

    def _turn(self) -> None:
        """Wait for events, at most half a beat, and handle them."""
        before = time.monotonic()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._driver.wants_write else 0)
        self._selector.modify(self._driver, wanted, self._receive)
        if self._process is not None:
            self._process.hold_output(self._unacknowledged >= OUTPUT_CREDIT or self._driver.full)
        if self._daemon is not None:
            self._daemon.hold_output(self._driver.full)
        for key, _ in self._selector.select(BEAT_S / 2):
            key.data()
        now = time.monotonic()
        if now > before + 2 * BEAT_S:
            self._silent_since = now  # this process was stopped: the driver may have been speaking
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._send(Beat())
        if now > max(self._driver.heard, self._silent_since) + _DRIVER_SILENT_S:
            raise TaskStoppedError(f"the driver has been silent for {_DRIVER_SILENT_S:g} s")

    def _receive(self) -> None:
        self._driver.pump_out()
        for record in self._driver.pump_in():
            message = decode_from_driver(record)
            if isinstance(message, Stop):
                if message.quietly:
                    raise _Dismissed
                raise TaskStoppedError(f"the driver has ended this task: {message.reason}")
            if isinstance(message, Code):
                self._code.append(message.part)
            elif isinstance(message, Pmi) and self._process is not None:
                self._process.answer_pmi(message.line)
            elif isinstance(message, OutputAck):
                self._unacknowledged -= message.count
            elif isinstance(message, Start):
                self._start_rank(message)
            elif isinstance(message, StartDaemon):
                self._start_daemon(message)
            elif isinstance(message, EndDaemon) and self._daemon is not None:
                self._daemon.end()
        if not self._driver.open:
            raise TaskStoppedError("the driver is gone")

    def _start_rank(self, start: Start) -> None:
        if self._process is not None:
            raise ChannelError("the driver started this task's rank twice")
        self._rank = start.rank
        start = msgspec.structs.replace(start, env={**start.env, **self._env})
        code = b"".join(self._code)
        self._code.clear()
        try:
            self._process = RankProcess(
                start,
                code,
                on_pmi=lambda line: self._send(Pmi(line)),
                on_enter=lambda: self._send(EnteringInit()),
                on_output=self._send_output,
                files=self._files,
            )
        except (OSError, ValueError) as exc:
            self._fail(Failed(ExitReport(start.rank, EXIT, 1, f"could not be started: {exc}")))
        else:
            self._process.register(self._selector)

    def _start_daemon(self, wanted: StartDaemon) -> None:
        if self._daemon is not None:
            raise ChannelError("the driver started mpiexec's daemon twice")
        try:
            self._daemon = Daemon(
                wanted,
                self._addresses,
                self._secret,
                lambda data: self._send(DaemonOutput(data)),
                lambda code: self._send(DaemonEnded(code)),
            )
        except (DaemonError, OSError, ValueError) as exc:
            self._send(DaemonOutput(f"{exc}\n".encode()))
            self._send(DaemonEnded(127))
        else:
            self._daemon.register(self._selector)

    def _fail(self, failure: Failed) -> None:
        """Report the failure to the driver, once; the driver then ends the job."""
        if not self._failed_at:
            self._failed_at = time.monotonic()
            self._send(failure)

    def _send_output(self, stream: int, data: bytes) -> None:
        self._unacknowledged += len(data)
        for part in parts(data):
            self._send(RankOutput(stream, part))

    def _send(self, message: FromTask) -> None:
        if self._driver.open:
            self._driver.send(encode(message))
