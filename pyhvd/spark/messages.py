"""What the driver and the tasks say to each other, once each has proved to the other who it is.

A message is one record of the channel in MessagePack, by msgspec, which checks types as it decodes: data
only, never code. Functions and results pass through the tasks as bytes that only the ranks and the driver
unpickle.
"""

from __future__ import annotations

import msgspec

from pyhvd.net.session import MAX_RECORD, ChannelError

PART = MAX_RECORD - 4096
"""Most bytes of a part of something long."""


class Register(msgspec.Struct, frozen=True, tag=True):
    """Task to driver, first: here I am."""

    index: int
    attempt: int
    host_hash: str
    host: str
    pid: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: become this rank. The parts of the code come before it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    env: dict[str, str]
    executable: str | None = None


class Code(msgspec.Struct, frozen=True, tag=True):
    """Driver to task: the next part of the pickled function, args and kwargs."""

    part: bytes


class Pmi(msgspec.Struct, frozen=True, tag=True):
    """A line of PMI-1, from the task's rank or to it."""

    line: str


class Output(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: what the rank wrote to its descriptor 1 or 2."""

    stream: int
    data: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: the rank did not end well.

    Attributes
    ----------
    kind : str
        One of the kinds of :mod:`pyhvd.run.report`.
    cause : str
        One line.
    traceback : str
        The rank's own, when it raised.
    when : float
        time.time() of the failure.
    code : int
        The rank's exit code.
    """

    kind: str
    cause: str
    traceback: str
    when: float
    code: int = 1


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Task to driver: the rank has ended well, and the result goes through Spark."""


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


FromTask = Register | Pmi | Output | Failed | Ended | Beat
FromDriver = Code | Start | Pmi | Beat | Stop

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
