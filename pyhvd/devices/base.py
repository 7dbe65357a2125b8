"""The interfaces of devices, array libraries and device backends.

Owns the protocols :class:`Device` and :class:`Packer`, which CUDA implements and, on host memory, the tests;
:class:`ArrayLibrary`; :class:`DeviceView`, an array on a device; and :class:`DeviceBackend`. Knows nothing of
negotiation.

All asynchronous work follows these rules:

1. A :class:`Device` queues work on a stream and returns at once. The work of one stream runs in order. The
   work of two streams runs in any order, unless one waits for an event of the other.
2. Only :meth:`Device.synchronize` blocks the calling thread, until one event has passed. No thread waits for
   a whole device or stream.
3. Memory that queued work uses must stay allocated, and unused by others, until an event recorded after that
   work has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from pyhvd.arrays import Bytes
from pyhvd.devices.fusion_buffer import FusionBuffer
from pyhvd.devices.pack_plan import Words
from pyhvd.dtypes import Code, DtypeInfo, ReduceOp, ReduceSpec

Stream = int
"""The handle of a stream (CUDA: the address of a ``cudaStream_t``; 0 is the default stream)."""

Event = Any
"""The library's object for a point in a stream's work."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Memory on a device, from address ``ptr`` on; it is freed when nothing refers to ``owner``."""

    ptr: int
    nbytes: int
    owner: object


class Span(NamedTuple):
    """Contiguous bytes on a device; does not keep the memory alive."""

    ptr: int
    nbytes: int

    def part(self, first: int, nbytes: int) -> Span:
        """Return ``nbytes`` bytes from byte ``first`` on."""
        return Span(self.ptr + first, nbytes)


class Device(Protocol):
    """One GPU of this process. Only :meth:`synchronize` blocks; other methods queue work and return."""

    index: int
    """Its number in this process."""

    name: str
    """The name in messages between ranks: ``"cuda:0"``."""

    def identity(self) -> str:
        """Return a text that is equal in two processes if, and only if, they use the same physical device."""

    def take_thread(self) -> None:
        """Make this the current device of the calling thread, one of pyhvd's own, until the thread ends.

        The thread's calls do not invalidate captures of graphs on other threads.
        """

    def make_stream(self) -> Stream:
        """Return a new stream, which lives as long as this object; it ignores the default stream."""

    def current_stream(self) -> Stream:
        """Return the stream on which the calling thread's work on CuPy arrays is queued.

        Raises
        ------
        ValueError
            It is CUDA's per-thread default stream.
        """

    def is_capturing(self, stream: Stream) -> bool:
        """Return whether work queued on a stream becomes part of a graph, and does not run."""

    def make_event(self) -> Event:
        """Return a new event; an event that is not recorded counts as passed."""

    def record(self, event: Event, stream: Stream) -> None:
        """Record the event: it passes when all work queued on the stream so far is done."""

    def mark(self, stream: Stream) -> Event:
        """Return a new event, recorded on the stream."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make the stream's later work wait for the event's last recording."""

    def has_passed(self, event: Event) -> bool:
        """Return whether an event has passed."""

    def synchronize(self, event: Event) -> None:
        """Block the calling thread, without the GIL, until an event has passed."""

    def allocate(self, nbytes: int, stream: Stream) -> Memory:
        """Return memory for one stream's work, aligned to 256 bytes.

        Raises
        ------
        MemoryError
            The device has too little free memory.
        """

    def allocate_pinned(self, nbytes: int) -> Bytes:
        """Return page-locked host memory.

        Raises
        ------
        MemoryError
            The host has too little page-locked memory.
        """

    def packer(self) -> Packer:
        """Return the device's packer, whose kernels are loaded.

        Raises
        ------
        RuntimeError
            The device has no kernels; the text says why.
        """

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy between two addresses, each on this device or in page-locked host memory."""


class Packer(Protocol):
    """Moves many tensors by one kernel; calls queue work and return."""

    def pack(
        self,
        buffer: int,
        offsets: Words,
        sources: Words,
        counts: Words,
        code: Code,
        op: ReduceOp,
        factor: float,
        stream: Stream,
    ) -> None:
        """Queue one kernel that copies tensors into a buffer, scaled.

        It may write zeros from the end of a tensor to the next multiple of 16 bytes.

        Parameters
        ----------
        buffer : int
            Address, aligned to 16 bytes.
        offsets : numpy.ndarray of int64
            First element of each tensor in the buffer; see :func:`pyhvd.devices.pack_plan.lay_out`.
        sources : numpy.ndarray of int64
            Address of each tensor, aligned to its element. 0 is a missing tensor; the kernel writes the
            identity element of ``op``.
        counts : numpy.ndarray of int64
            Elements of each.
        code : Code
            Element type.
        op : ReduceOp
            Defines the identity element.
        factor : float
            Multiplies each element, like the host kernels; 1.0 keeps its bits.
        stream : Stream
            The kernel's stream.
        """

    def unpack(
        self,
        buffer: int,
        offsets: Words,
        targets: Words,
        counts: Words,
        code: Code,
        factor: float,
        stream: Stream,
    ) -> None:
        """Queue one kernel that does the reverse of :meth:`pack`; skip targets of address 0."""


@dataclass(slots=True)
class DeviceContext:
    """This rank's device, its stream and its fusion buffer.

    Attributes
    ----------
    device : Device
        The device of this rank.
    stream : Stream
        The communication stream.
    packer : Packer or None
        Packs many tensors by one kernel.
    no_packer : str
        Why there is no packer.
    buffer : FusionBuffer
        Where tensors are packed.
    """

    device: Device
    stream: Stream
    packer: Packer | None
    no_packer: str = ""
    buffer: FusionBuffer = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = FusionBuffer(self.device, self.stream)

    @classmethod
    def open(cls, device: Device) -> DeviceContext:
        """Return the context of a device, with a new stream, for the calling thread; see ``take_thread``."""
        device.take_thread()
        packer, why = None, ""
        try:
            packer = device.packer()
        except RuntimeError as exc:
            why = str(exc)
        return cls(device, device.make_stream(), packer, why)


class ArrayLibrary(Protocol):
    """Makes results in the caller's library."""

    def empty_like(self, view: DeviceView, shape: tuple[int, ...]) -> DeviceView:
        """Return a new array's view, allocated for the stream ``view.stream``; any thread may call it."""

    def follow(self, view: DeviceView, arrived: Event) -> None:
        """Make the calling thread's current stream, not the thread, wait for a view's contents."""

    def receive(self, view: DeviceView, arrived: Event) -> Any:
        """Return a result as an array of the library, after :meth:`follow`.

        If the current stream is not ``view.stream``, the memory outlives the array: the pool gets it back
        after the work that the current stream has queued when the array is dropped.
        """

    def copy_home(self, view: DeviceView, stream: Stream) -> None:
        """Queue the copy from a contiguous array back into the caller's array (``view.home``)."""


class DeviceView(msgspec.Struct, eq=False):
    """A contiguous array on a device.

    Work that was queued on the caller's ``stream`` before the submission must be done first.
    """

    ptr: int
    shape: tuple[int, ...]
    info: DtypeInfo
    on: Device
    library: ArrayLibrary
    stream: Stream
    owner: Any
    """The array in the caller's library; keeps the memory alive."""
    ready: Event = None
    """Passes when the contents may be read and the memory may be written (``streams.mark_ready`` sets it)."""
    home: Any = None
    """The caller's array if ``owner`` is a contiguous copy of it."""
    origin: Any = None
    """The library's object for ``stream``, if the stream lives only as long as that object."""

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

    @property
    def layout(self) -> str:
        """Row-major, see :class:`pyhvd.arrays.TensorView`."""
        return ""

    def empty_like(self, shape: tuple[int, ...]) -> DeviceView:
        """Return new memory for a result, of the same dtype and in the same library."""
        return self.library.empty_like(self, shape)

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

    1. Ranks are set ranks, and call methods in the same order. Counts are bytes where not said otherwise.
    2. A method queues its work on ``stream``, and returns when the host's part is done. The caller makes the
       stream wait for the inputs, and records an event after the work.
    3. A view of None stands for a rank that has joined; such a rank has memory for every span.
    4. There is no Adasum, which runs on the host.
    5. ``name`` begins the names of its phases (``NCCL_BCAST``); ``stream`` is the communication stream.
    6. ``sums_wide``: the sum of 16-bit floats is rounded once, not at each addition.
    7. ``failure``: why queued work was aborted; empty if it was not. It is set before that work ends.
    """

    rank: int
    size: int
    name: str
    sums_wide: bool
    failure: str
    stream: Stream

    def allreduce_room(self, counts: Sequence[int], spec: ReduceSpec, *, joined: bool) -> int:
        """Return the bytes of the fusion buffer that an allreduce takes; the same on all ranks.

        ``joined``: some rank has joined.
        """

    def allreduce(
        self, sources: DeviceViews, targets: DeviceViews, counts: Sequence[int], spec: ReduceSpec
    ) -> None:
        """Reduce fused tensors; ``counts`` are elements."""

    def reducescatter_room(self, shapes: Sequence[tuple[int, ...]], spec: ReduceSpec, *, joined: bool) -> int:
        """Return the bytes of the fusion buffer that a reducescatter takes, as for an allreduce."""

    def reducescatter(
        self, sources: DeviceViews, targets: DeviceViews, shapes: Sequence[tuple[int, ...]], spec: ReduceSpec
    ) -> None:
        """Reduce; each rank gets its own rows of dimension 0."""

    def allgather(
        self, sources: DeviceViews, targets: Sequence[Span], counts: Sequence[Sequence[int]]
    ) -> None:
        """Concatenate the ranks' blocks; rank r's block of tensor i has ``counts[i][r]`` bytes."""

    def broadcast(self, buffer: Span, root: int) -> None:
        """Copy the root's bytes to all ranks."""

    def alltoall(
        self, send: Span, send_counts: Sequence[int], recv: Span, recv_counts: Sequence[int]
    ) -> None:
        """Send the r-th block of ``send`` to rank r; blocks are contiguous."""

    def check(self) -> None:
        """Raise an error if queued work has failed; not collective.

        Raises
        ------
        TransportError
            Queued work has failed; all of it has ended, so its events pass.
        """

    def abort(self, why: str) -> None:
        """Make later calls fail, begin to end the queued work, so its events pass, and return.

        Not collective; any thread may call it.
        """

    def close(self) -> None:
        """Free the backend's resources; collective. Queued work must be done."""


def refuse_overlap(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Raise ValueError if elements of an array that is to be written share memory; strides in any unit."""
    if any(extent > 1 and stride == 0 for extent, stride in zip(shape, strides, strict=True)):
        raise ValueError(
            "an in-place operation cannot write to an array whose elements share memory, such as a"
            " broadcast view: pass a copy"
        )
