"""The messages between the driver and the agents, after each has authenticated the other.

A message is one record of the channel, in MessagePack. msgspec checks types as it decodes: a message holds
data, never code. Agents pass functions and results on as bytes; only ranks and the driver unpickle them.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated, TypeVar

import msgspec

from pyhvd._version import __version__
from pyhvd.job.process.exit_report import ExitReport
from pyhvd.transport.tcp.session import MAX_RECORD, ChannelError

PART = MAX_RECORD - 4096
"""Most bytes of data in one message; longer data travel in parts."""
INPUT_CREDIT = 1 << 18
"""Most bytes of rank 0's stdin that the driver has sent and rank 0 has not taken."""
OUTPUT_CREDIT = 1 << 18
"""A rank's writes block when this many bytes of its output have not been shown yet."""
TOKEN = 16
"""Bytes of a token by which an agent knows that it has reached another one."""
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN, max_length=TOKEN)]
RESULT_CREDIT = 1 << 22
"""Most bytes of a rank's result that its agent has sent and the driver has not received."""


class StoreOrder(msgspec.Struct, frozen=True):
    """Where the commits of a job are stored.

    Attributes
    ----------
    url : str
        The folder, as fsspec names it.
    job : str
        Letters and digits that tell jobs apart.
    key : bytes
        The job's secret, by which it knows its own commits.
    every : int
        Each `every`-th commit is stored; those that ranks wait for are stored in any case.
    env : list of (bytes, bytes)
        Variables that file systems read, such as credentials.
    """

    url: str
    job: str
    key: bytes
    every: int = 1
    env: list[tuple[bytes, bytes]] = []


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Agent of a host to driver, first: the versions of its pyhvd and its Python, and its wall-clock time.

    `commit` is the number of the newest commit that it holds, in an elastic job. `task` is the
    number by which its starter tells it from the job's others: in Spark, the id of its task.
    """

    pyhvd: str
    python: str
    clock: float
    commit: int = 0
    task: int = -1


def hello() -> Hello:
    """Return this process's versions and time."""
    return Hello(__version__, ".".join(map(str, sys.version_info[:3])), time.time())


class Again(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent of a host: end what is left of the job, and say :class:`Hello` for the next one."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent of a host, in an elastic job: let the ranks commit and end at their next check.

    If the job `suspends`, no other generation follows, and the commit must be stored.
    """

    generation: int
    suspends: bool = False


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent of a host, in answer to :class:`Hello`: what the agent shall own, and look for.

    Attributes
    ----------
    index : int
        The agent's number.
    slots : int
        How many ranks it shall own.
    directory : str
        Where the ranks shall run.
    script : str
        The file that they shall run, relative to the directory; empty if they run no file.
    function : bool
        Whether they run a function, whose results the agent sends.
    again : bool
        Whether the agent waits for another job at the end.
    elastic : bool
        Whether it holds what the ranks commit.
    preemption_command : str
        A shell command that succeeds when the host will be taken away; empty without one.
    store : StoreOrder, optional
        Where the agent stores what the ranks commit; None if another one does, or none.
    """

    index: int
    slots: int
    directory: str
    script: str
    function: bool = False
    again: bool = False
    elastic: bool = False
    preemption_command: str = ""
    store: StoreOrder | None = None


class Interface(msgspec.Struct, frozen=True, array_like=True):
    """One address of a network interface that is up.

    Attributes
    ----------
    name : str
        The interface.
    cidr : str
        The address and the length of its subnet's prefix: ``10.0.0.1/24``.
    speed : int
        In Mbit/s; 0 if unknown.
    bridge : bool
        Whether it is a bridge.
    """

    name: str
    cidr: str
    speed: int = 0
    bridge: bool = False


class HostNetwork(msgspec.Struct, frozen=True):
    """How a host is connected.

    Attributes
    ----------
    namespace : str
        Hosts with the same one have the same interfaces; empty if unknown.
    interfaces : list of Interface
        In the kernel's order.
    rdma : list of str
        The active RDMA ports, such as ``mlx5_0:1``.
    """

    namespace: str = ""
    interfaces: list[Interface] = []
    rdma: list[str] = []


class Facts(msgspec.Struct, frozen=True):
    """What a host has for its ranks.

    Attributes
    ----------
    mpi : str
        Family of its MPI; empty if there is none.
    mpi_name : str
        The MPI's name and version, or why there is none.
    has_directory : bool
        Whether the ranks can enter their directory.
    script : str
        SHA-256 of the script's file; empty if there is none.
    network : HostNetwork
        Its network interfaces.
    """

    mpi: str
    mpi_name: str
    has_directory: bool
    script: str
    network: HostNetwork = msgspec.field(default_factory=HostNetwork)


class Member(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: this agent is ready to start ranks.

    Attributes
    ----------
    index : int
        Its number: in Spark, that of its partition.
    attempt : int
        Spark may retry a task, which is an agent; the attempt with the largest number counts.
    host_hash : str
        See :func:`pyhvd.common.kernel.host_hash`.
    host : str
        Name of its host, for messages.
    slots : int
        How many ranks it shall own.
    facts : Facts or None
        What its host has; None in Spark.
    """

    index: int
    attempt: int
    host_hash: str
    host: str
    slots: int = 1
    facts: Facts | None = None


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: listen on a free port of each address, and send the token to whoever connects.

    This ends the sockets of an earlier probe. `probe` is the number of this one. The ports are from the first
    to the last of `ports`; 0 is any port.
    """

    probe: int
    token: Token
    addresses: list[str]
    ports: tuple[int, int] = (0, 0)


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: the port of each address of :class:`Listen`; 0 where it cannot listen."""

    probe: int
    ports: list[int]


class Target(msgspec.Struct, frozen=True, array_like=True):
    """An address at which another agent listens, and the token that it sends."""

    address: str
    port: int
    token: Token


class Dial(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: connect to each target, and read its token."""

    probe: int
    targets: list[Target]


class Dialed(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: the target of this number was reached, or an `error` says why it was not."""

    probe: int
    target: int
    error: str = ""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: start this rank. The parts of its code were sent before; `pmi`: it speaks PMI-1.

    Of `defaults`, the rank gets the variables that neither its host nor the user has set.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    env: dict[str, str]
    executable: str | None = None
    pmi: bool = True
    defaults: dict[str, str] = {}


class CodePart(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: the next part of what its ranks run, such as a pickled function with its arguments."""

    part: bytes


class NextCall(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: let these living ranks make a call, whose parts were sent before; none ends them."""

    ranks: list[int]


class Pmi(msgspec.Struct, frozen=True, tag=True):
    """A line of PMI-1 from a rank or to it."""

    rank: int
    line: str


class PmiValues(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: values that ranks have put, by which the agent answers its ranks; none ever changes.

    `world` is PMI's name of the ranks' world.
    """

    world: str
    values: dict[str, str]


class RankOutput(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: bytes that a rank wrote to its descriptor 1 or 2."""

    rank: int
    stream: int
    data: bytes


class OutputAck(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: `count` more bytes of a rank's output have been shown."""

    rank: int
    count: int


class Input(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: the next bytes for the stdin of rank 0; none at their end."""

    data: bytes


class InputAck(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: rank 0 has taken `count` more bytes of its stdin, or will take none of them."""

    count: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: a rank failed.

    If it is `silent`, the rank reported nothing: its MPI may have ended it because another rank failed. The
    `exception` is the pickled one that its function raised; empty if there is none, or it cannot be sent.
    """

    report: ExitReport
    silent: bool = False
    exception: bytes = b""


class ResultPart(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: the next part of what a rank's function returned, pickled; the last before Ended."""

    rank: int
    data: bytes


class ResultAck(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: `count` more bytes of a rank's result have been received."""

    rank: int
    count: int


class Answered(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: the result of a living rank's call has been sent; the rank waits for another call."""

    rank: int


class Logged(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: a value, pickled, that a living rank hands to the driver during a call."""

    rank: int
    data: bytes


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: a rank ended without error. In Spark its result travels with Spark's task.

    `left` says that it has made room for another generation of an elastic job.
    """

    rank: int
    left: bool = False


class EnteringInit(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: a rank is about to call MPI_Init, where it waits for the other ranks."""

    rank: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Either way, each second, and twice from an agent of an elastic job: the sender is alive.

    In an elastic job an agent says the number of the newest `commit` that it holds, and why its host
    `leaves`, if it does. A driver says with how much `patience` (s) an agent shall wait for its next beat; 0
    changes nothing.
    """

    commit: int = 0
    leaves: str = ""
    patience: float = 0.0


class Remark(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: a line for the user, about the agent's host."""

    text: str


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent, before the ranks start: take the newest stored commit."""


class Restored(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: the number of the newest commit that it holds now; 0 and why if there is none.

    The store is `empty` if it was read, and has no commit of the job.
    """

    commit: int
    problem: str = ""
    empty: bool = False


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: kill the ranks that run, and end.

    If the driver has told its user already, do so `quietly`: Spark then shows no error of this task.
    """

    reason: str
    quietly: bool = False


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: send this signal to each rank."""

    number: int


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Launch agent to driver, first: mpiexec wants to run its daemon, a shell command, on a host."""

    host: str
    command: str


class RankProxy(msgspec.Struct, frozen=True, tag=True):
    """Rank proxy to the agent beside the daemon, and on to the driver: the daemon set `env` for this rank."""

    rank: int
    local_rank: int
    env: dict[str, str]


class Exit(msgspec.Struct, frozen=True, tag=True):
    """Driver to launch agent, and to the rank proxies of an agent: exit with this code."""

    code: int


class StartDaemon(msgspec.Struct, frozen=True, tag=True):
    """Driver to the first agent of a host: run mpiexec's daemon.

    Attributes
    ----------
    command : str
        As in :class:`Launch`.
    prefix : str
        Where the driver's MPI is installed; paths in the command begin with it.
    executable : str or None
        The ranks' Python; this host's MPI may be installed beside it.
    """

    command: str
    prefix: str
    executable: str | None = None


class EndDaemon(msgspec.Struct, frozen=True, tag=True):
    """Driver to agent: end mpiexec's daemon, which still runs although all ranks have ended."""


class DaemonOutput(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: bytes that mpiexec's daemon wrote."""

    data: bytes


class DaemonEnded(msgspec.Struct, frozen=True, tag=True):
    """Agent to driver: mpiexec's daemon ended with this code; negative for a signal."""

    code: int


# About the agent and its host; about its ranks; about the daemon and the programs of mpiexec.
_OfHost = Hello | Member | Listening | Dialed | Beat | Remark | Restored
_OfRanks = EnteringInit | Pmi | RankOutput | InputAck | ResultPart | Answered | Logged | Failed | Ended
_OfDaemon = RankProxy | DaemonOutput | DaemonEnded
FromAgent = _OfHost | _OfRanks | _OfDaemon
FromProgram = Launch | RankProxy
_ForHost = Again | Prepare | Listen | Dial | Beat | Restore | Leave | Stop
_ForRanks = CodePart | Start | NextCall | Pmi | PmiValues | Input | OutputAck | ResultAck | Signal
_ForDaemon = StartDaemon | EndDaemon | Exit
FromDriver = _ForHost | _ForRanks | _ForDaemon

_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_from_program: msgspec.msgpack.Decoder[FromProgram] = msgspec.msgpack.Decoder(FromProgram)
_from_driver: msgspec.msgpack.Decoder[FromDriver] = msgspec.msgpack.Decoder(FromDriver)


def encode(message: FromAgent | FromDriver | FromProgram) -> bytes:
    """Return a message as one record."""
    return _encoder.encode(message)


def decode_from_agent(record: bytes) -> FromAgent:
    """Return the message that an agent sent; raise ChannelError if the record is not one."""
    return _decode(_from_agent, record, "an agent")


def decode_from_program(record: bytes) -> FromProgram:
    """Return the message of a launch agent or rank proxy; raise ChannelError if the record is not one."""
    return _decode(_from_program, record, "a program of mpiexec")


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
