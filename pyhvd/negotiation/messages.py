"""What ranks tell each other, and its wire form (MessagePack by msgspec, with a protocol version).

Owns: :class:`Request` (a rank has submitted something), :class:`Response` (what every rank is to do),
their lists; what passes beside them (:class:`StackRequest`, :class:`StackReport`); encode and decode. Knows
nothing of MPI, arrays or handles.

A slot is a place in the response cache. Slots are numbered by the coordinator alone, so that they mean
the same on every rank; a rank that submits a tensor exactly as the slot remembers it sends one bit.
"""

from __future__ import annotations

import enum

import msgspec

from pyhvd.common.stacks import ThreadStack
from pyhvd.errors import InternalError

PROTOCOL_VERSION = 3
GLOBAL_SET = 0

UNNAMED = "noname"
"""Marks the names that pyhvd gives itself; users' names do not have it between their dots."""

JOIN_NAME = f"join.{UNNAMED}"

HOST = "cpu"
"""The device of what lies in host memory, and of what has no tensor."""


class RequestType(enum.IntEnum):
    """Kind of a request; 0-7 are Horovod's codes."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    JOIN = 3
    ADASUM = 4
    ALLTOALL = 5
    BARRIER = 6
    REDUCESCATTER = 7
    ADD_PROCESS_SET = 9
    REMOVE_PROCESS_SET = 10


class ErrorKind(enum.IntEnum):
    """Which exception an error response becomes."""

    MISMATCH = 0
    RANK_FAILED = 1
    SHUT_DOWN = 2
    STALL = 3


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One rank's submission of one tensor.

    Attributes
    ----------
    type : int
        A :class:`RequestType`.
    name : str
        The tensor's name; verbs share names.
    dtype : int
        Wire code.
    shape : tuple of int
        Shape on this rank.
    op : int
        Reduce op, or -1.
    prescale, postscale : float
        Factors before and after the reduction.
    root : int
        Global rank of the root of a broadcast, or -1.
    device : str
        ``"cpu"`` or, for example, ``"cuda:0"``.
    group : str
        Name of the grouped call that this tensor belongs to, or empty.
    group_size : int
        Number of tensors in that call.
    ranks : tuple of int
        Members of a process set that is to be added, or the one id of a set that is to be removed.
    error : str
        Set when this rank refused the tensor locally: what it raised.
    traceback : str
        ... and from where.
    window : bool
        Whether it is reduced in place, without prescale, in shared memory; ranks may differ.
    """

    type: int
    name: str
    dtype: int = -1
    shape: tuple[int, ...] = ()
    op: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    device: str = HOST
    group: str = ""
    group_size: int = 0
    ranks: tuple[int, ...] = ()
    error: str = ""
    traceback: str = ""
    window: bool = False


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """Why a tensor, or the whole job, ended in an error.

    Attributes
    ----------
    kind : int
        An :class:`ErrorKind`.
    message : str
        The text of the exception.
    rank : int
        The global rank that caused it, or -1.
    per_rank : dict of int to str
        What each rank submitted (MISMATCH).
    missing : dict of str to list of int
        For each stalled tensor the ranks that have not submitted it (STALL).
    stacks : dict of int to str
        Where each missing rank stood, as text (STALL).
    sites : dict of int to str
        The line at which each rank submitted its tensor, where known (MISMATCH).
    traceback : str
        Of the exception that the rank failed of, where there was one (RANK_FAILED).
    """

    kind: int
    message: str
    rank: int = -1
    per_rank: dict[int, str] = {}
    missing: dict[str, list[int]] = {}
    stacks: dict[int, str] = {}
    sites: dict[int, str] = {}
    traceback: str = ""


class Response(msgspec.Struct, frozen=True, array_like=True):
    """What every rank of a process set does next with one tensor.

    Attributes
    ----------
    request : Request
        The agreed parameters. ``shape`` is the first live rank's; only dim 0 may differ between ranks.
    process_set : int
        Id of the process set.
    slot : int
        Cache slot in which every rank remembers this response, or -1.
    dims : tuple of int
        First dimension on each set rank (allgather, alltoall); 0 for joined ranks.
    joined : tuple of int
        Set ranks that have joined and submit nothing.
    error : ErrorInfo, optional
        The tensor fails with this on the global ranks in ``only`` (on all if ``only`` is empty).
    only : tuple of int
        Addressees of an error.
    value : int
        Last joined rank (JOIN) or the new set's id (ADD_PROCESS_SET).
    direct : bool
        Whether every rank reduces it in place in shared memory.
    since : int
        Number of the response list that gave the slot the meaning that it has now, for any of the ranks.
    """

    request: Request
    process_set: int = GLOBAL_SET
    slot: int = -1
    dims: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    error: ErrorInfo | None = None
    only: tuple[int, ...] = ()
    value: int = -1
    direct: bool = False
    since: int = 0


class TimelineOrder(msgspec.Struct, frozen=True, array_like=True):
    """What every rank is to do with its timeline.

    Attributes
    ----------
    path : str
        Record there from now on; empty: record no longer.
    mark_cycles : bool
        Whether to mark cycles.
    job : str
        Tells this recording's files from others.
    """

    path: str = ""
    mark_cycles: bool = False
    job: str = ""


class RequestList(msgspec.Struct, frozen=True, array_like=True):
    """Worker to coordinator: all that is new on one rank.

    Attributes
    ----------
    seen : int
        Sequence number of the last response list this rank has processed: it says what the bits mean.
    bits : dict of int to bytes
        For each process set the little-endian bit vector of cache slots submitted again unchanged.
    requests : list of (int, Request)
        Process set id and request of what the cache does not hold.
    sites : list of str
        For each of the requests the line at which it was submitted, or an empty text; or nothing at all.
    stop : ErrorInfo, optional
        This rank shuts down, and why.
    """

    version: int
    seen: int
    bits: dict[int, bytes] = {}
    requests: list[tuple[int, Request]] = []
    stop: ErrorInfo | None = None
    sites: list[str] = []


class Tuning(msgspec.Struct, frozen=True, array_like=True):
    """The knobs that may change while a job runs; a place in autotuning's search.

    Attributes
    ----------
    fusion_threshold : int
        Most bytes that ride together.
    cycle_time_ms : float
        Longest time (ms) that submissions gather while nobody waits.
    chunk_size : int
        Bytes of a chunk in a shared window.
    staging_size : int
        Bytes of tensors that go in one piece elsewhere.
    """

    fusion_threshold: int
    cycle_time_ms: float
    chunk_size: int
    staging_size: int


class ResponseList(msgspec.Struct, frozen=True, array_like=True):
    """Coordinator to every rank: what to do, in this order: cached slots by set and slot, then responses.

    ``tuning``, if there is one, holds from this list on, its own responses included.
    An order to begin or end a timeline comes last.
    """

    version: int
    seq: int
    cached: dict[int, bytes] = {}
    responses: list[Response] = []
    stop: ErrorInfo | None = None
    tuning: Tuning | None = None
    timeline: TimelineOrder | None = None


class StackRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Rank 0 to a rank that others wait for: say where your threads stand, under this number."""

    version: int
    number: int


class StackReport(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """... and its answer."""

    version: int
    number: int
    threads: list[ThreadStack]


OutOfBand = StackRequest | StackReport
"""What passes beside the lists, and has no place in their order."""

# A byte that MessagePack never uses: the lists, which are many, pay nothing for being told from these.
_OUT_OF_BAND = 0xC1

_encoder = msgspec.msgpack.Encoder()
_out_of_band_decoder = msgspec.msgpack.Decoder(OutOfBand)
_request_decoder = msgspec.msgpack.Decoder(RequestList)
_response_decoder = msgspec.msgpack.Decoder(ResponseList)


def encode(message: RequestList | ResponseList) -> bytes:
    """Return the wire form of a list of requests or responses."""
    return _encoder.encode(message)


def encode_out_of_band(message: OutOfBand) -> bytes:
    """Return the wire form of what passes beside the lists."""
    return bytes((_OUT_OF_BAND,)) + _encoder.encode(message)


def is_out_of_band(data: bytes | bytearray) -> bool:
    """Return whether a message, which is not empty, is none of the lists."""
    return data[0] == _OUT_OF_BAND


def decode_out_of_band(data: bytes | bytearray) -> OutOfBand:
    """Read what :func:`encode_out_of_band` wrote; raises InternalError if it is not that."""
    try:
        message: OutOfBand = _out_of_band_decoder.decode(memoryview(data)[1:])
    except msgspec.DecodeError as exc:
        raise InternalError(f"undecodable message of {len(data)} bytes: {exc}") from exc
    _check_version(message.version)
    return message


def decode_requests(data: bytes | bytearray | memoryview) -> RequestList:
    """Read a worker's message; raises InternalError if it is not one of this protocol version."""
    try:
        message = _request_decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise InternalError(f"undecodable request list of {len(data)} bytes: {exc}") from exc
    _check_version(message.version)
    return message


def decode_responses(data: bytes | bytearray | memoryview) -> ResponseList:
    """Read the coordinator's message; raises InternalError if it is not one of this protocol version."""
    try:
        message = _response_decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise InternalError(f"undecodable response list of {len(data)} bytes: {exc}") from exc
    _check_version(message.version)
    return message


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise InternalError(
            f"a rank speaks protocol version {version}, this one {PROTOCOL_VERSION}:"
            " install the same pyhvd on every rank"
        )


def bits_to_bytes(bits: int) -> bytes:
    """Return a bit vector held in an int as little-endian bytes."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def bytes_to_bits(data: bytes) -> int:
    """Return little-endian bytes as a bit vector held in an int."""
    return int.from_bytes(data, "little")


def iter_bits(bits: int) -> list[int]:
    """Return the positions of the set bits, lowest first."""
    positions = []
    while bits:
        low = bits & -bits
        positions.append(low.bit_length() - 1)
        bits ^= low
    return positions
