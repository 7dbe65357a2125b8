"""The messages between ranks, and their wire form (MessagePack by msgspec, with a protocol version).

Owns: :class:`Request` (a rank submits a tensor), :class:`Response` (the ranks' next step), their lists, the
out-of-band messages (:class:`StackRequest`, :class:`StackReport`, :class:`StillWaiting`,
:class:`StillInRound`), encode and decode.
Knows nothing of MPI, arrays or handles.

A slot is a place in the response cache. Only the coordinator numbers slots, so that a slot means the same on
every rank. A rank that submits a tensor exactly as its slot holds it sends one bit.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

import msgspec

from pyhvd.common.stacks import ThreadStack
from pyhvd.dtypes import BY_CODE, INTEGERS, Code, ReduceOp, ReduceSpec
from pyhvd.errors import InternalError

PROTOCOL_VERSION = 6
GLOBAL_SET = 0
FOUNDING = -1
"""Instead of a set's id, in requests to make a set that its members alone submit, and their responses."""

UNNAMED = "noname"
"""Part of every name that pyhvd makes up; a user's name must not have it between its dots."""

JOIN_NAME = f"join.{UNNAMED}"
BARRIER_NAME = f"barrier.{UNNAMED}"

HOST = "cpu"
"""The device of arrays in host memory, and of requests without an array."""


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


def verb(request_type: int) -> str:
    """Return the public name of an operation."""
    return RequestType(request_type).name.lower()


def member_name(group: str, index: int, size: int) -> str:
    """Return the name of a tensor of a grouped call."""
    return f"{group}_{index + 1}of{size}"


class ErrorKind(enum.IntEnum):
    """The exception that an error response becomes."""

    MISMATCH = 0
    RANK_FAILED = 1
    SHUT_DOWN = 2
    STALL = 3
    HOST_LOST = 4
    """A RankFailedError, after which the ranks of the lost host cannot end the job."""
    WITHDRAWN = 5
    """Nothing was reduced, and the ranks submit the tensor again later."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One rank's submission of one tensor.

    Attributes
    ----------
    type : int
        A :class:`RequestType`.
    name : str
        The tensor's name; all operations share one namespace.
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
        Members of a process set to add, or the one id of a process set to remove.
    error : str
        The exception with which this rank refused the tensor; empty: it did not.
    traceback : str
        The traceback of that exception.
    window : bool
        Whether this rank has the tensor, and wants its result, in shared memory; ranks may differ.
    layout : str
        The order of the tensor's dimensions in memory, as in ``"0,2,3,1"``; empty for row-major.
    splits : int
        A digest of the splits of an alltoall, where ranks remember them; else 0. Another rank need not know
        them, but whether they are new.
    unattended : bool
        Whether no thread waits for the answer: then hang reports leave the tensor out; ranks may differ.
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
    layout: str = ""
    splits: int = 0
    unattended: bool = False

    def reduce_spec(self, size: int, *, sums_wide: bool = True) -> ReduceSpec:
        """Return how backends reduce the tensor; Average becomes a Sum divided by the size of the set.

        Joined ranks count in the divisor. Without ``sums_wide`` the backend rounds each partial sum of 16-bit
        floats to 16 bits. Their Average is divided before the sum then, which else could overflow.
        """
        spec = _reduce_spec(self.dtype, self.op, self.prescale, self.postscale, size)
        if sums_wide or self.op != ReduceOp.AVERAGE or self.dtype not in (Code.FLOAT16, Code.BFLOAT16):
            return spec
        return replace(spec, prescale=spec.prescale * spec.postscale, postscale=1.0)

    def kernel_terms(self, size: int) -> tuple[int, float]:
        """Return the kernels' op and their factor afterwards; -1 and 1.0 if nothing is reduced."""
        if self.op < 0:
            return -1, 1.0
        spec = self.reduce_spec(size)
        return spec.op, spec.postscale


@functools.lru_cache(maxsize=256)
def _reduce_spec(dtype: int, op: int, prescale: float, postscale: float, size: int) -> ReduceSpec:
    if op == ReduceOp.AVERAGE:
        op, postscale = ReduceOp.SUM, _quotient(postscale, size, exact=dtype in INTEGERS)
    return ReduceSpec(BY_CODE[dtype], ReduceOp(op), prescale, postscale)


def _quotient(postscale: float, size: int, *, exact: bool) -> float:
    """Return postscale / size; with ``exact`` the result is never rounded towards zero.

    Integers are truncated after the multiplication. If 1/49 were rounded down, the average of 49 ones would
    be 0.
    """
    factor = postscale / size
    if exact and abs(Fraction(factor) * size) < abs(Fraction(postscale)):
        return math.nextafter(factor, math.copysign(math.inf, factor))
    return factor


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
        Each rank's value (MISMATCH).
    missing : dict of str to list of int
        For each stalled tensor the ranks that have not submitted it (STALL).
    stacks : dict of int to str
        Each missing rank's stacks, as text (STALL).
    sites : dict of int to str
        The line at which each rank submitted its tensor, where known (MISMATCH).
    traceback : str
        Traceback of the exception that ended the rank, if there was one (RANK_FAILED).
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
    """The next step of every rank of a process set with one tensor.

    Attributes
    ----------
    request : Request
        The agreed parameters. ``shape`` is the first live rank's; only dim 0 may differ between ranks.
    process_set : int
        Id of the process set.
    slot : int
        Cache slot in which every rank keeps this response, or -1.
    dims : tuple of int
        First dimension on each set rank (allgather, alltoall); 0 for joined ranks.
    joined : tuple of int
        Set ranks that have joined and submit nothing.
    error : ErrorInfo, optional
        The tensor fails with this on the global ranks in ``only`` (on all if ``only`` is empty).
    only : tuple of int
        Ranks that get the error.
    value : int
        Last joined rank (JOIN) or the new set's id (ADD_PROCESS_SET).
    direct : bool
        Whether every rank has it, and wants its result, in shared memory.
    version : int
        Number of the response list that gave the slot its present meaning on any rank.
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
    version: int = 0


class TimelineOrder(msgspec.Struct, frozen=True, array_like=True):
    """An order to every rank to begin or end its timeline.

    Attributes
    ----------
    path : str
        File or directory to record in from now on; empty: stop recording.
    mark_cycles : bool
        Whether to mark cycles.
    job : str
        Identifies the files of this recording.
    """

    path: str = ""
    mark_cycles: bool = False
    job: str = ""


class Versioned(msgspec.Struct, frozen=True, array_like=True):
    """Base of what ranks send as a whole message: the sender's protocol version comes first."""

    version: int


class RequestList(Versioned, frozen=True):
    """Worker to coordinator: everything new on one rank.

    Attributes
    ----------
    seen : int
        Number of the last response list that this rank has processed: it gives the bits their meaning.
    bits : dict of int to bytes
        For each process set the little-endian bit vector of cache slots submitted again unchanged.
    requests : list of (int, Request)
        Process set id and request of each tensor that the cache does not hold.
    sites : list of str
        For each request the line that submitted it, empty if unknown; or an empty list.
    stop : ErrorInfo, optional
        Why this rank shuts down.
    """

    seen: int
    bits: dict[int, bytes] = {}
    requests: list[tuple[int, Request]] = []
    stop: ErrorInfo | None = None
    sites: list[str] = []


PackedRanks = tuple[int, bytes]
"""A bit vector of ranks: the number of zero bytes that come first, and the other bytes."""


class MergedPart(msgspec.Struct, frozen=True, array_like=True):
    """Part of a merged message: the same requests of several ranks.

    Attributes
    ----------
    ranks : (int, bytes)
        The ranks; see :func:`pack_ranks`.
    last : int
        The rank whose message came last.
    message : RequestList
        The requests of each of these ranks. A rank may have processed later lists than ``seen`` says.
    """

    ranks: PackedRanks
    last: int
    message: RequestList


class MergedList(Versioned, frozen=True):
    """A leader to the rank above it: everything new on the ranks below.

    The parts of one rank are in the order in which the rank sent them.
    """

    parts: list[MergedPart]

    @classmethod
    def of(cls, rank: int, message: RequestList) -> MergedList:
        """Return the message of one rank as a merged one."""
        return cls(PROTOCOL_VERSION, [MergedPart(pack_ranks(1 << rank), rank, message)])


class Tuning(msgspec.Struct, frozen=True, array_like=True):
    """The knobs that may change while a job runs; a point in autotuning's search.

    Attributes
    ----------
    fusion_threshold : int
        Most bytes in one fused batch.
    cycle_time_ms : float
        Longest time (ms) that submissions gather while no thread waits.
    chunk_size : int
        Bytes of a chunk in a shared window.
    staging_size : int
        Bytes of a piece in other transports.
    """

    fusion_threshold: int
    cycle_time_ms: float
    chunk_size: int
    staging_size: int


class ResponseList(Versioned, frozen=True):
    """Coordinator to every rank: the next steps, in this order.

    1. ``tuning`` takes effect.
    2. The ``cached`` slots run, by process set and slot.
    3. The ``responses`` run, in order.
    4. ``timeline`` begins or ends a recording.
    """

    seq: int
    cached: dict[int, bytes] = {}
    responses: list[Response] = []
    stop: ErrorInfo | None = None
    tuning: Tuning | None = None
    timeline: TimelineOrder | None = None


class RelayedList(Versioned, frozen=True):
    """A response list for a leader, and for some of the ranks below it.

    Attributes
    ----------
    ranks : (int, bytes)
        Who gets the list; see :func:`pack_ranks`.
    payload : bytes
        The encoded :class:`ResponseList`.
    """

    ranks: PackedRanks
    payload: bytes


class StackRequest(Versioned, frozen=True, array_like=False, tag=1):
    """Rank 0 to a rank that others wait for: send the stacks of your threads, under this number."""

    number: int


class StackReport(Versioned, frozen=True, array_like=False, tag=2):
    """The answer to a :class:`StackRequest`.

    Attributes
    ----------
    waits : bool
        Whether a thread of the program is inside of pyhvd.
    """

    number: int
    threads: list[ThreadStack]
    waits: bool = False


class StillWaiting(Versioned, frozen=True, array_like=False, tag=3):
    """To rank 0: this rank has long waited for cached tensors; ``slots`` has bit vectors, by process set.

    With several hosts, rank 0 cannot see the ranks' marks on the other hosts.
    """

    slots: dict[int, bytes]


class StillInRound(Versioned, frozen=True, array_like=False, tag=4):
    """To rank 0: this rank has long waited in the round of a backward pass; see :mod:`pyhvd.engine.rounds`.

    Attributes
    ----------
    process_set : int
        The round's process set.
    prefix : str
        How the names of the round's tensors begin.
    """

    process_set: int
    prefix: str


class WaitQuestion(Versioned, frozen=True, array_like=False, tag=5):
    """To rank 0: tell, under this number, what waits for which ranks, and where those stand.

    Attributes
    ----------
    waits_in : str
        What the asking rank waits in, if the coordinator does not know of that; empty: nothing such.
    seconds : float
        For how long.
    missing : list of int
        The ranks that it waits for.
    """

    number: int
    waits_in: str = ""
    seconds: float = 0.0
    missing: list[int] = []


class WaitAnswer(Versioned, frozen=True, array_like=False, tag=6):
    """The answer to a :class:`WaitQuestion`; the text is empty if nothing waits, or without stall checks."""

    number: int
    text: str


Aside = StackRequest | StackReport | StillInRound | WaitQuestion | WaitAnswer
"""Out-of-band messages that do not concern the coordinator."""

OutOfBand = Aside | StillWaiting
"""Messages that pass beside the lists, and have no place in their order: maps, while the lists are arrays."""

_ARRAY = 0x90
"""The least first byte of an array in MessagePack; that of a map with few keys is less."""

M = TypeVar("M", bound=Versioned)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Versioned) -> bytes:
    """Return the wire form of a message."""
    return _encoder.encode(message)


def is_out_of_band(data: bytes | bytearray) -> bool:
    """Return whether a message, which must not be empty, is an out-of-band one."""
    return data[0] < _ARRAY


def _decode(
    decoder: msgspec.msgpack.Decoder[M], kind: str, data: bytes | bytearray | memoryview, source: int
) -> M:
    """Read a message of a rank; raise InternalError if it is none of this kind and protocol version."""
    try:
        message = decoder.decode(data)
    except msgspec.MsgspecError as exc:
        raise InternalError.unreadable(source, f"a {kind}", len(data), exc) from None
    if message.version != PROTOCOL_VERSION:
        raise InternalError(
            f"rank {source} uses protocol version {message.version}, this rank {PROTOCOL_VERSION}:"
            " install the same pyhvd on every rank"
        )
    return message


_out_of_band_decoder: msgspec.msgpack.Decoder[OutOfBand] = msgspec.msgpack.Decoder(OutOfBand)
# Called with the data and the rank that has sent them.
decode_out_of_band = functools.partial(_decode, _out_of_band_decoder, "message")
decode_requests = functools.partial(_decode, msgspec.msgpack.Decoder(RequestList), "request list")
decode_merged = functools.partial(_decode, msgspec.msgpack.Decoder(MergedList), "merged request list")
decode_relayed = functools.partial(_decode, msgspec.msgpack.Decoder(RelayedList), "relayed response list")
decode_responses = functools.partial(_decode, msgspec.msgpack.Decoder(ResponseList), "response list")


def bits_to_bytes(bits: int) -> bytes:
    """Return a bit vector as little-endian bytes."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def bytes_to_bits(data: bytes | bytearray) -> int:
    """Return little-endian bytes as a bit vector."""
    return int.from_bytes(data, "little")


_FEW = 4


def iter_bits(bits: int) -> list[int]:
    """Return the positions of the set bits, lowest first, in a time linear in their highest."""
    positions = []
    if bits.bit_count() < _FEW:
        while bits:
            positions.append(lowest_bit(bits))
            bits &= bits - 1
        return positions
    text = f"{bits:b}"[::-1]
    at = text.find("1")
    while at >= 0:
        positions.append(at)
        at = text.find("1", at + 1)
    return positions


def bits_of(positions: Iterable[int]) -> int:
    """Return the bit vector with these bits set, in a time linear in their number and in their highest."""
    data = bytearray()
    for position in positions:
        place = position >> 3
        if place >= len(data):
            data.extend(bytes(place + 1 - len(data)))
        data[place] |= 1 << (position & 7)
    return bytes_to_bits(data)


def lowest_bit(bits: int) -> int:
    """Return the position of the lowest set bit."""
    return (bits & -bits).bit_length() - 1


def pack_ranks(ranks: int) -> PackedRanks:
    """Return the wire form of a bit vector of ranks, which must not be empty."""
    zeros = lowest_bit(ranks) // 8
    return zeros, bits_to_bytes(ranks >> 8 * zeros)


def unpack_ranks(packed: PackedRanks) -> int:
    """Return a bit vector of ranks from its wire form."""
    zeros, data = packed
    return bytes_to_bits(data) << 8 * zeros
