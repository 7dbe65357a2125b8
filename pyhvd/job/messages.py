"""What the driver and the tasks say to each other, once each has proved to the other who it is.

A message is one record of the channel in MessagePack, by msgspec, which checks types as it decodes: data
only, never code. Functions and results pass through the tasks as bytes that only the ranks and the driver
unpickle.
"""

from __future__ import annotations

import msgspec

from pyhvd.transport.tcp.session import MAX_RECORD, ChannelError

PART = MAX_RECORD - 4096
"""Most bytes of a part of something long."""
OUTPUT_CREDIT = 1 << 18
"""A rank has to wait with more output when so many bytes of it have not been shown yet."""


class Register(msgspec.Struct, frozen=True, tag=True):
    """Task to driver, first: here I am."""

    index: int
    attempt: int
    host_hash: str
    host: str
    pid: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: become this rank. The parts of the code come before it.

    Attributes
    ----------
    pmi : bool
        Whether the rank speaks PMI-1, to its task.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    env: dict[str, str]
    executable: str | None = None
    pmi: bool = True


class Code(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: the next part of the pickled function, args and kwargs."""

    part: bytes


class Pmi(msgspec.Struct, frozen=True, tag=True):
    """A line of PMI-1, from the task's rank or to it; with a stand-in, from mpiexec's daemon or to it."""

    line: str


class Output(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: what the rank wrote to its descriptor 1 or 2."""

    stream: int
    data: bytes


class OutputAck(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: so many more bytes of the rank's output have been shown."""

    count: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: the rank did not end well.

    Attributes
    ----------
    kind : str
        One of the kinds of :mod:`pyhvd.job.process.exit_report`.
    cause : str
        One line.
    traceback : str
        The rank's own, when it raised.
    when : float
        time.time() of the failure.
    code : int
        The rank's exit code.
    silent : bool
        Whether the rank said nothing: its MPI may have ended it for what has become of another rank.
    """

    kind: str
    cause: str
    traceback: str
    when: float
    code: int = 1
    silent: bool = False


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: the rank has ended well, and the result goes through Spark."""


class EnteringInit(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: the rank is about to call MPI_Init, and to wait for the others there."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Either way: I am alive. Said each second."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: kill the rank, if there is one, and end.

    Attributes
    ----------
    reason : str
        Why.
    quietly : bool
        Whether the driver has told its user already, so that Spark need not show an error of this task too.
    """

    reason: str
    quietly: bool = False


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Launch agent to driver, first: mpiexec wants this shell command on this host.

    Attributes
    ----------
    host : str
        As mpiexec knows it.
    command : str
        mpiexec's daemon and its arguments.
    """

    host: str
    command: str


class RankProxy(msgspec.Struct, frozen=True, tag=True):
    """Stand-in to driver, first: mpiexec's daemon has started me as this rank.

    Attributes
    ----------
    host : str
        As mpiexec knows it.
    rank, local_rank : int
        As mpiexec numbers them.
    env : mapping of str to str
        What mpiexec wants to have in the rank's environment.
    pmi : bool
        Whether the rank will speak PMI-1.
    """

    host: str
    rank: int
    local_rank: int
    env: dict[str, str]
    pmi: bool


class Exit(msgspec.Struct, frozen=True, tag=True):
    """Driver to launch agent or stand-in: what you stand for has ended, with this code; so should you."""

    code: int


class StartDaemon(msgspec.Struct, frozen=True, tag=True):
    """Driver to the first task of a host: run mpiexec's daemon.

    Attributes
    ----------
    host : str
        As mpiexec knows it.
    command : str
        For the shell.
    prefix : str
        Where the driver's MPI is installed, whose paths are in the command.
    executable : str or None
        The ranks' Python, beside which this host's MPI may be.
    """

    host: str
    command: str
    prefix: str
    executable: str | None = None


class EndDaemon(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: all ranks have ended, but not mpiexec's daemon, which should have by itself."""


class DaemonOutput(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: what mpiexec's daemon wrote."""

    data: bytes


class DaemonEnded(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: mpiexec's daemon has ended, with this code; negative for a signal."""

    code: int


FromTask = (
    Register
    | Pmi
    | Output
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

_encoder = msgspec.msgpack.Encoder()
_from_task = msgspec.msgpack.Decoder(FromTask)
_from_driver = msgspec.msgpack.Decoder(FromDriver)


def encode(message: FromTask | FromDriver) -> bytes:
    """Return a message as one record."""
    return _encoder.encode(message)


def decode_from_task(record: bytes) -> FromTask:
    """Return what a task said; ChannelError if it is none of the messages."""
    try:
        message: FromTask = _from_task.decode(record)
    except msgspec.MsgspecError as exc:
        raise ChannelError(f"a task sent what is no message: {exc}") from None
    return message


def decode_from_driver(record: bytes) -> FromDriver:
    """Return what the driver said; ChannelError if it is none of the messages."""
    try:
        message: FromDriver = _from_driver.decode(record)
    except msgspec.MsgspecError as exc:
        raise ChannelError(f"the driver sent what is no message: {exc}") from None
    return message


def parts(data: bytes) -> list[bytes]:
    """Cut something long."""
    return [data[start : start + PART] for start in range(0, len(data), PART)]
