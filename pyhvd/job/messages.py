"""The messages between the driver and the tasks, after each has authenticated the other.

A message is one record of the channel, in MessagePack. msgspec checks types as it decodes: a message holds
data, never code. The tasks pass functions and results on as bytes; only ranks and the driver unpickle them.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pyhvd.job.process.exit_report import ExitReport
from pyhvd.transport.tcp.session import MAX_RECORD, ChannelError

PART = MAX_RECORD - 4096
"""Most bytes of data in one message; longer data travel in parts."""
OUTPUT_CREDIT = 1 << 18
"""A rank's writes block when this many bytes of its output have not been shown yet."""


class Task(msgspec.Struct, frozen=True, tag=True):
    """Task to driver, first: this task has started.

    Attributes
    ----------
    index : int
        Its partition.
    attempt : int
        Spark's id of this attempt. Spark may retry a task; the attempt with the largest id counts.
    host_hash : str
        See :func:`pyhvd.job.host_id.host_hash`.
    host : str
        Name of its host, for messages.
    """

    index: int
    attempt: int
    host_hash: str
    host: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: start this rank. The parts of its code were sent before; `pmi`: it speaks PMI-1."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    env: dict[str, str]
    executable: str | None = None
    pmi: bool = True


class Code(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: the next part of the pickled function, args and kwargs."""

    part: bytes


class Pmi(msgspec.Struct, frozen=True, tag=True):
    """A line of PMI-1 from the task's rank or to it."""

    line: str


class RankOutput(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: bytes that the rank wrote to its descriptor 1 or 2."""

    stream: int
    data: bytes


class OutputAck(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: `count` more bytes of the rank's output have been shown."""

    count: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: the rank failed.

    If it is `silent`, the rank reported nothing: its MPI may have ended it because another rank failed.
    """

    report: ExitReport
    silent: bool = False


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: the rank ended without error, and its result travels through Spark."""


class EnteringInit(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: the rank is about to call MPI_Init, where it waits for the other ranks."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Either way, each second: the sender is alive."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: kill the rank, if it runs, and end.

    If the driver has told its user already, do so `quietly`: Spark then shows no error of this task too.
    """

    reason: str
    quietly: bool = False


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Launch agent to driver, first: mpiexec wants to run its daemon, a shell command, on a host."""

    host: str
    command: str


class RankProxy(msgspec.Struct, frozen=True, tag=True):
    """Rank proxy to driver, first: mpiexec's daemon has started this proxy as a rank, and set its `env`."""

    host: str
    rank: int
    local_rank: int
    env: dict[str, str]


class Exit(msgspec.Struct, frozen=True, tag=True):
    """Driver to launch agent or rank proxy: exit with this code, as the process it represents did."""

    code: int


class StartDaemon(msgspec.Struct, frozen=True, tag=True):
    """Driver to the first task of a host: run mpiexec's daemon.

    Attributes
    ----------
    host, command : str
        As in :class:`Launch`.
    prefix : str
        Where the driver's MPI is installed; paths in the command begin with it.
    executable : str or None
        The ranks' Python; this host's MPI may be installed beside it.
    """

    host: str
    command: str
    prefix: str
    executable: str | None = None


class EndDaemon(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: end mpiexec's daemon, which still runs although all ranks have ended."""


class DaemonOutput(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: bytes that mpiexec's daemon wrote."""

    data: bytes


class DaemonEnded(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: mpiexec's daemon ended with this code; negative for a signal."""

    code: int


FromTask = (
    Task
    | Pmi
    | RankOutput
    | EnteringInit
    | Failed
    | Ended
    | Beat
    | Launch
    | RankProxy
    | DaemonOutput
    | DaemonEnded
)
FromDriver = Code | Start | Pmi | OutputAck | Beat | Stop | Exit | StartDaemon | EndDaemon

_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()
_from_task: msgspec.msgpack.Decoder[FromTask] = msgspec.msgpack.Decoder(FromTask)
_from_driver: msgspec.msgpack.Decoder[FromDriver] = msgspec.msgpack.Decoder(FromDriver)


def encode(message: FromTask | FromDriver) -> bytes:
    """Return a message as one record."""
    return _encoder.encode(message)


def decode_from_task(record: bytes) -> FromTask:
    """Return the message that a task sent; raise ChannelError if the record is not one."""
    return _decode(_from_task, record, "a task")


def decode_from_driver(record: bytes) -> FromDriver:
    """Return the message that the driver sent; raise ChannelError if the record is not one."""
    return _decode(_from_driver, record, "the driver")


def _decode(decoder: msgspec.msgpack.Decoder[_Message], record: bytes, sender: str) -> _Message:
    try:
        return decoder.decode(record)
    except msgspec.MsgspecError as exc:
        raise ChannelError(f"{sender} sent an invalid message: {exc}") from None


def parts(data: bytes) -> list[bytes]:
    """Cut data into parts that fit in one message each."""
    return [data[start : start + PART] for start in range(0, len(data), PART)]
