"""What pyhvd asks of a GPU and of the library that drives it, and what a device backend must do.

Owns: the protocols :class:`Device` and :class:`Packer`, which exist for CUDA and, on host memory, in the
tests; :class:`ArrayLibrary`, whose arrays they are; :class:`DeviceView`, an array on a device as the data
path sees it; :class:`DeviceBackend`. Knows nothing of ranks' agreement.

The rules of time, on which all that is asynchronous here rests:

- Whatever a :class:`Device` is told to do with a stream is put into that stream's queue; the call returns at
  once. The work of one stream runs in its order; that of two streams in any order, unless one of them waits
  for an event of the other.
- :meth:`Device.synchronize` alone blocks the calling thread, until one event has passed. Nothing waits for a
  whole device or a whole stream.
- Memory that queued work uses must stay alive, and must not be given to anybody else, until an event that was
  recorded behind that work has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import msgspec

from pyhvd.arrays import Bytes
from pyhvd.devices.pack_plan import Words
from pyhvd.dtypes import Code, DtypeInfo, ReduceOp

Stream = int
"""The library's handle of a stream (CUDA: the address of a ``cudaStream_t``; 0 is the default stream)."""

Event = Any
"""The library's own object for a moment in a stream."""


class Memory(Protocol):
    """Memory on a device; given back when nothing refers to it."""

    @property
    def ptr(self) -> int:
        """Address of the first byte."""

    @property
    def nbytes(self) -> int:
        """Number of bytes."""


class Span(NamedTuple):
    """Contiguous bytes on a device; whoever makes one keeps the memory alive."""

    ptr: int
    nbytes: int

    def part(self, first: int, nbytes: int) -> Span:
        """Return ``nbytes`` bytes of it, from byte ``first`` on."""
        return Span(self.ptr + first, nbytes)


class Device(Protocol):
    """One GPU of this process. Every method but :meth:`synchronize` only queues work, and returns at once.

    Attributes
    ----------
    index : int
        Its number in this process.
    name : str
        As ranks are told of it: ``"cuda:0"``.
    """

    index: int
    name: str

    def identity(self) -> str:
        """Return what is the same for two processes if, and only if, they use the same physical device."""

    def acting(self) -> AbstractContextManager[None]:
        """While entered, what the calling thread does is done to this device."""

    def make_stream(self) -> Stream:
        """Return a new stream, which lives as long as this object; it does not wait for the default one."""

    def current_stream(self) -> Stream:
        """Return the stream on which the calling thread's work on CuPy arrays is queued."""

    def make_event(self) -> Event:
        """Return a new event; one that has not been recorded has passed."""

    def record(self, event: Event, stream: Stream) -> None:
        """Let the event be the moment at which all that is in the stream's queue by now is done."""

    def mark(self, stream: Stream) -> Event:
        """Return a new event, recorded behind all that is in the stream's queue by now."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what comes into the stream's queue from now on wait for the event as it was last recorded."""

    def has_passed(self, event: Event) -> bool:
        """Return whether an event has passed."""

    def synchronize(self, event: Event) -> None:
        """Block the calling thread, without the GIL, until an event has passed."""

    def allocate(self, nbytes: int, stream: Stream) -> Memory:
        """Return memory for work of one stream, aligned to 256 bytes.

        Raises
        ------
        MemoryError
            There is not so much left.
        """

    def allocate_pinned(self, nbytes: int) -> Bytes:
        """Return page-locked host memory, which copies reach without a detour.

        Raises
        ------
        MemoryError
            There is not so much to be had.
        """

    def packer(self) -> Packer | None:
        """Return what moves many tensors by one kernel; None where there is nothing of the kind."""

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy between two addresses, each on this device or in page-locked host memory."""


class Packer(Protocol):
    """Moves many tensors by one kernel; its calls only queue work, as a :class:`Device`'s do."""

    def pack(
        self,
        buffer: int,
        offsets: Words,
        sources: Words,
        counts: Words,
        code: Code,
        wire: Code,
        op: ReduceOp,
        factor: float,
        stream: Stream,
    ) -> None:
        """Queue one kernel that gathers tensors in a buffer, and scales and casts them on the way.

        Parameters
        ----------
        buffer : int
            Address, aligned to 16 bytes.
        offsets : numpy.ndarray of int64
            Element of the buffer at which each tensor begins; see :func:`pyhvd.devices.pack_plan.lay_out`.
        sources : numpy.ndarray of int64
            Address of each tensor, aligned to its element; 0 stands for one that is not there, in whose place
            goes the neutral element of ``op``.
        counts : numpy.ndarray of int64
            Elements of each.
        code, wire : Code
            Element type of the tensors, and in the buffer.
        op : ReduceOp
            Says what is neutral.
        factor : float
            Multiplied onto each element, as the host kernels do it, before it is cast; 1.0 leaves its bits.
        stream : Stream
            Where it is queued.
        """

    def unpack(
        self,
        buffer: int,
        offsets: Words,
        targets: Words,
        counts: Words,
        wire: Code,
        code: Code,
        factor: float,
        stream: Stream,
    ) -> None:
        """Queue one kernel that does the reverse of :meth:`pack`; a target of 0 is left out."""


class ArrayLibrary(Protocol):
    """Whose arrays are taken, and handed back."""

    def empty_like(self, view: DeviceView, shape: tuple[int, ...]) -> DeviceView:
        """Return new memory for a result, allocated for the stream ``view.stream``; from any thread."""

    def follow(self, view: DeviceView, arrived: Event) -> None:
        """Let what the calling thread queues from now on wait until a view's contents have arrived.

        The stream on which such work is queued waits; the thread does not.
        """

    def receive(self, view: DeviceView, arrived: Event) -> Any:
        """Return a result as an array of the library, after :meth:`follow`.

        Where that stream is another one than ``view.stream``, the memory stays the array's until that stream
        has done what it has in its queue when the array is let go of.
        """

    def copy_home(self, view: DeviceView, stream: Stream) -> None:
        """Queue the copy from a contiguous array back into the caller's own (``view.home``)."""


class DeviceView(msgspec.Struct, eq=False):
    """A contiguous array on a device, as the data path sees it.

    Attributes
    ----------
    ptr : int
        Address of the first byte.
    shape : tuple of int
        Its shape.
    info : DtypeInfo
        Its row of the dtype table.
    on : Device
        Where it is.
    library : ArrayLibrary
        Whose array it is.
    stream : Stream
        The caller's: what was queued there before the submission has to be done first.
    owner : object
        The array in the caller's library; keeps the memory alive.
    ready : Event or None
        Passes when the contents may be read, and the memory written; see
        :func:`pyhvd.devices.streams.mark_ready`.
    home : object or None
        The caller's own array where ``owner`` is a contiguous copy of it.
    origin : object or None
        The library's own object for ``stream``, where that must be kept for the stream to live.
    """

    ptr: int
    shape: tuple[int, ...]
    info: DtypeInfo
    on: Device
    library: ArrayLibrary
    stream: Stream
    owner: Any
    ready: Event = None
    home: Any = None
    origin: Any = None

    @property
    def device(self) -> str:
        """Name of the device."""
        return self.on.name

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.nbytes // self.info.itemsize

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        nbytes = self.info.itemsize
        for extent in self.shape:
            nbytes *= extent
        return nbytes

    def first_rows(self, rows: int) -> DeviceView:
        """Return a view of the first rows of dimension 0."""
        return msgspec.structs.replace(self, shape=(rows, *self.shape[1:]))

    @property
    def span(self) -> Span:
        """The memory."""
        return Span(self.ptr, self.nbytes)


DeviceViews = Sequence[DeviceView | None]


class DeviceBackend(Protocol):
    """Runs agreed collectives on device memory, for one process set.

    Ranks are set ranks. Every method queues its work on ``stream``, behind what is there, and returns when
    the host's part is done; the caller sees to it that the stream has waited for the inputs, and records an
    event behind. Methods are called in the same order on every rank. None stands for a rank that has joined;
    where memory is given as a span, such a rank has some too. Adasum is not among them: it goes by the host.

    Attributes
    ----------
    name : str
        Prefix of the names of its phases (``NCCL_BCAST``).
    stream : Stream
        The communication stream.
    """

    rank: int
    size: int
    name: str
    stream: Stream

    def allreduce(
        self,
        sources: DeviceViews,
        targets: DeviceViews,
        counts: Sequence[int],
        info: DtypeInfo,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce tensors that ride together."""

    def reducescatter(
        self,
        sources: DeviceViews,
        targets: DeviceViews,
        shapes: Sequence[tuple[int, ...]],
        info: DtypeInfo,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce, and leave each rank its own rows of dimension 0."""

    def allgather(
        self, sources: DeviceViews, targets: Sequence[Span], counts: Sequence[Sequence[int]]
    ) -> None:
        """Concatenate; ``counts[i][r]`` is the number of bytes that rank r gives to tensor i."""

    def broadcast(self, buffer: Span, root: int) -> None:
        """Copy the root's bytes to every rank."""

    def alltoall(
        self, send: Span, send_counts: Sequence[int], recv: Span, recv_counts: Sequence[int]
    ) -> None:
        """Exchange blocks of uneven size, which lie one behind the other; counts in bytes."""

    def check(self) -> None:
        """Look whether anything that is queued has failed; not collective.

        Raises
        ------
        TransportError
            It has. What is queued has been ended, so that its events pass.
        """

    def abort(self, why: str) -> None:
        """End what is queued, so that its events pass; what comes fails. Not collective; from any thread."""

    def close(self) -> None:
        """Give up what the backend holds; collective. What was queued has passed."""
