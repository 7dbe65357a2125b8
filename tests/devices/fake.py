"""A device made of host memory, whose streams run as late, and in any order, as streams may.

1. Queued work runs at a synchronization, or earlier: after each call, a seeded generator may run some of it.
   Code that forgets to wait for an event reads stale values under some seed.
2. Unreferenced memory is overwritten in the order of its stream, as a pool would reuse it. Code that frees
   memory too early therefore reads wrong values.

Read the contents of a :class:`FakeArray` only by :meth:`FakeArray.get`, which waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pyhvd.arrays import Array, Bytes, address
from pyhvd.devices.base import DeviceView, Memory, Stream
from pyhvd.devices.pack_plan import ALIGNMENT, Words
from pyhvd.devices.streams import Lease
from pyhvd.dtypes import BY_CODE, Code, ReduceOp, lookup

SCRIBBLE = 0xDB


class FakeEvent:
    """An event: its number of recordings, and the last one that has passed."""

    def __init__(self) -> None:
        self.recorded = 0
        self.passed = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """An entry of a stream's queue: later entries wait for an event's recording."""

    event: FakeEvent
    number: int


Work = Callable[[], None] | Wait


class PoolBlock:
    """A block of the pool of a fake device."""

    def __init__(self, device: FakeDevice, memory: Bytes, stream: Stream) -> None:
        self._device, self._memory, self._stream = device, memory, stream

    def __del__(self) -> None:
        self._device.reclaim(self._memory, self._stream)


class FakeDevice:
    """See the module's docstring; implements :class:`pyhvd.devices.base.Device` and ``Packer``.

    Parameters
    ----------
    index : int
        The device's number.
    seed : int
        Seed of the order in which work runs.
    identity : str
        Ranks share a device if their devices have the same identity.
    """

    def __init__(self, index: int = 0, seed: int = 0, identity: str = "") -> None:
        self.index = self.id = index
        self.name = f"cuda:{index}"
        self._identity = identity or f"fake {index}"
        self._draw = random.Random(seed)
        self._eagerness = self._draw.choice((0, 0, 1, 4))
        self._rank: dict[Stream, float] = {}
        self._streams: dict[Stream, deque[Work]] = {0: deque()}
        self._lock = threading.RLock()
        self._here = threading.local()
        self._kept: list[Bytes] = []  # addresses stay valid: a fault is a wrong number, not a crash
        self.allocated = 0
        self.limit = 1 << 62
        self.packs = True
        self.capturing: set[Stream] = set()
        self.synchronized = 0
        self.reclaimed: set[int] = set()

    # -- Device --------------------------------------------------------------------------------------

    def identity(self) -> str:
        return self._identity

    def take_thread(self) -> None:
        pass

    def make_stream(self) -> Stream:
        with self._lock:
            stream = 0x100 * len(self._streams)  # 1 and 2 are CUDA's handles of its default streams
            self._streams[stream] = deque()
            return stream

    def current_stream(self) -> Stream:
        return getattr(self._here, "stream", 0)

    def is_capturing(self, stream: Stream) -> bool:
        return stream in self.capturing

    def make_event(self) -> FakeEvent:
        return FakeEvent()

    def record(self, event: FakeEvent, stream: Stream) -> None:
        with self._lock:
            event.recorded += 1
            number = event.recorded

            def passes() -> None:
                event.passed = max(event.passed, number)

            self._queue(stream, passes)

    def mark(self, stream: Stream) -> FakeEvent:
        event = self.make_event()
        self.record(event, stream)
        return event

    def wait(self, stream: Stream, event: FakeEvent) -> None:
        self._queue(stream, Wait(event, event.recorded))

    def has_passed(self, event: FakeEvent) -> bool:
        with self._lock:
            self._stir()
            if self._draw.random() < 0.5:
                self._step()  # a late device still makes progress: repeated polling sees the end
            return event.passed >= event.recorded

    def synchronize(self, event: FakeEvent) -> None:
        with self._lock:
            self.synchronized += 1
            while event.passed < event.recorded:
                assert self._step(), "a deadlock: streams wait for each other"

    def allocate(self, nbytes: int, stream: Stream) -> Memory:
        with self._lock:
            if self.allocated + nbytes > self.limit:
                raise MemoryError(f"{nbytes} bytes more than the device has")
            self.allocated += nbytes
            memory = np.full(nbytes + 256, SCRIBBLE, np.uint8)
            first = -address(memory) % 256
            aligned = memory[first : first + nbytes]
            return Memory(address(aligned), nbytes, PoolBlock(self, aligned, stream))

    def allocate_pinned(self, nbytes: int) -> Bytes:
        memory = np.full(nbytes, SCRIBBLE, np.uint8)
        self._kept.append(memory)
        return memory

    def packer(self) -> FakeDevice:
        if not self.packs:
            raise RuntimeError("this device has no kernels")
        return self

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        def run() -> None:
            ctypes.memmove(target, source, nbytes)

        self._queue(stream, run)

    # -- Packer --------------------------------------------------------------------------------------

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
        assert buffer % ALIGNMENT == 0
        table = list(zip(offsets.tolist(), sources.tolist(), counts.tolist(), strict=True))
        item = BY_CODE[code].itemsize

        def run() -> None:
            for offset, source, count in table:
                out = elements(buffer + offset * item, count, code)
                if source:
                    out[:] = scaled(elements(source, count, code), factor, code).astype(out.dtype)
                else:
                    out[:] = neutral(op, code)

        self._queue(stream, run)

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
        table = list(zip(offsets.tolist(), targets.tolist(), counts.tolist(), strict=True))
        item = BY_CODE[code].itemsize

        def run() -> None:
            for offset, target, count in table:
                if target:
                    values = scaled(elements(buffer + offset * item, count, code), factor, code)
                    out = elements(target, count, code)
                    out[:] = values.astype(out.dtype)

        self._queue(stream, run)

    # -- for tests -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Make a stream the calling thread's current one."""
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def hold_up(self, stream: Stream) -> Callable[[], None]:
        """Make a stream's later work wait until the returned function is called."""
        gate = FakeEvent()
        gate.recorded = 1
        self.wait(stream, gate)

        def open_gate() -> None:
            with self._lock:
                gate.passed = 1

        return open_gate

    def run_on(self) -> None:
        """Run all work that does not wait for held-up work."""
        with self._lock:
            while self._step():
                pass

    def queued(self) -> int:
        """Return the number of queued pieces of work."""
        with self._lock:
            return sum(len(queue) for queue in self._streams.values())

    def call(self, work: Callable[[], None], stream: Stream) -> None:
        """Queue a piece of work."""
        self._queue(stream, work)

    def reclaim(self, memory: Bytes, stream: Stream) -> None:
        """Free memory that nothing refers to."""
        with self._lock:
            self.allocated -= len(memory)
            self._kept.append(memory)
            self.reclaimed.add(address(memory))
            self._streams[stream].append(lambda: memory.fill(SCRIBBLE))

    # -- what runs when ------------------------------------------------------------------------------

    def _queue(self, stream: Stream, work: Work) -> None:
        with self._lock:
            self._streams[stream].append(work)
            self._stir()

    def _stir(self) -> None:
        """Run some queued work, or none."""
        for _ in range(self._draw.randint(0, self._eagerness)):
            self._step()

    def _step(self) -> bool:
        """Run one queue entry of a stream that does not wait; return whether there was one.

        The generator prefers some streams for a while, so that the others fall far behind.
        """
        ready = [stream for stream, queue in self._streams.items() if self._may_run(queue)]
        if not ready:
            return False
        if self._draw.random() < 1 / 16:
            self._rank.clear()
        first = max(ready, key=lambda stream: self._rank.setdefault(stream, self._draw.random()))
        work = self._streams[first].popleft()
        if not isinstance(work, Wait):
            work()
        return True

    @staticmethod
    def _may_run(queue: deque[Work]) -> bool:
        if not queue:
            return False
        first = queue[0]
        return not isinstance(first, Wait) or first.event.passed >= first.number


def dtype_of(code: Code) -> npt.DTypeLike:
    """Return the dtype of a code, of numpy or ml_dtypes."""
    return ml_dtypes.bfloat16 if code == Code.BFLOAT16 else BY_CODE[code].name


def elements(ptr: int, count: int, code: Code) -> Array:
    """Return the memory at an address as an array."""
    raw: Any = (ctypes.c_uint8 * (count * BY_CODE[code].itemsize)).from_address(ptr)
    array: Array = np.frombuffer(raw, dtype_of(code))
    return array


def scaled(values: Array, factor: float, code: Code) -> Array:
    """Return values times a factor, with the arithmetic of the host kernels."""
    if factor == 1.0:
        return values
    if code in (Code.FLOAT16, Code.BFLOAT16, Code.FLOAT32):
        return (values.astype(np.float32) * np.float32(factor)).astype(values.dtype)
    if code in (Code.FLOAT64, Code.COMPLEX128):
        return values * factor
    if code == Code.COMPLEX64:
        return values * np.float32(factor)
    return np.trunc(values.astype(np.float64) * factor).astype(values.dtype)


def neutral(op: ReduceOp, code: Code) -> Any:
    """Return the op's identity element."""
    if op == ReduceOp.PRODUCT:
        return 1
    if op == ReduceOp.BAND:
        return True if code == Code.BOOL else np.invert(np.zeros((), dtype_of(code)))
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 0
    dtype = np.dtype(dtype_of(code))
    if dtype.kind == "b":
        return op == ReduceOp.MIN
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if op == ReduceOp.MIN else np.iinfo(dtype).min
    return np.inf if op == ReduceOp.MIN else -np.inf


class FakeArray:
    """A library's array on a :class:`FakeDevice`."""

    def __init__(
        self,
        device: FakeDevice,
        memory: Memory,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        strides: tuple[int, ...] | None = None,
        first: int = 0,
    ) -> None:
        self.device, self.memory, self.shape, self.dtype = device, memory, shape, np.dtype(dtype)
        self.ptr = memory.ptr + first
        self.strides = strides

    def _numpy(self) -> Array:
        raw: Any = (ctypes.c_uint8 * self.memory.nbytes).from_address(self.memory.ptr)
        first = self.ptr - self.memory.ptr
        return np.ndarray(self.shape, self.dtype, raw, first, self.strides)

    def set(self, values: Any) -> FakeArray:
        """Queue a write of values on the current stream."""
        fixed = np.array(values, self.dtype)

        def run() -> None:
            self._numpy()[...] = fixed

        self.device.call(run, self.device.current_stream())
        return self

    def get(self) -> Array:
        """Wait for the current stream's queued work; return the contents."""
        found: list[Array] = []
        self.device.call(lambda: found.append(self._numpy().copy()), self.device.current_stream())
        event = self.device.make_event()
        self.device.record(event, self.device.current_stream())
        self.device.synchronize(event)
        return found[0]

    def astype(self, dtype: npt.DTypeLike) -> FakeArray:
        """Return a copy in another dtype."""
        nbytes = int(np.prod(self.shape)) * np.dtype(dtype).itemsize
        stream = self.device.current_stream()
        result = FakeArray(self.device, self.device.allocate(nbytes, stream), self.shape, dtype)

        def run() -> None:
            result._numpy()[...] = self._numpy().astype(dtype)

        self.device.call(run, stream)
        return result

    def every_other(self) -> FakeArray:
        """Return a view of every other element of dimension 0."""
        strides = np.empty(self.shape, self.dtype).strides
        shape = (-(-self.shape[0] // 2), *self.shape[1:])
        return FakeArray(self.device, self.memory, shape, self.dtype, (2 * strides[0], *strides[1:]))


def fake_array(device: FakeDevice, values: Any, dtype: npt.DTypeLike | None = None) -> FakeArray:
    """Return a new array; the current stream writes its values later."""
    fixed = np.array(values, dtype)
    memory = device.allocate(fixed.nbytes, device.current_stream())
    return FakeArray(device, memory, fixed.shape, fixed.dtype).set(fixed)


class FakeLibrary:
    """Takes and returns :class:`FakeArray`; implements :class:`pyhvd.devices.base.ArrayLibrary`."""

    def takes(self, tensor: Any) -> bool:
        return isinstance(tensor, FakeArray)

    def adopt(self, tensor: FakeArray, *, writing: bool) -> DeviceView:
        device, stream = tensor.device, tensor.device.current_stream()
        info = lookup(tensor.dtype)
        owner, home = tensor, None
        if tensor.strides is not None:
            nbytes = int(np.prod(tensor.shape)) * tensor.dtype.itemsize
            owner = FakeArray(device, device.allocate(nbytes, stream), tensor.shape, tensor.dtype)
            self._assign(owner, tensor, stream)
            home = tensor
        return DeviceView(owner.ptr, tensor.shape, info, device, self, stream, owner, home=home)

    def empty_like(self, view: DeviceView, shape: tuple[int, ...]) -> DeviceView:
        device = view.on
        assert isinstance(device, FakeDevice)
        dtype = np.dtype(dtype_of(view.info.code))
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        owner = FakeArray(device, device.allocate(nbytes, view.stream), shape, dtype)
        return DeviceView(owner.ptr, shape, view.info, device, self, view.stream, owner)

    def follow(self, view: DeviceView, arrived: FakeEvent) -> None:
        view.on.wait(view.on.current_stream(), arrived)

    def receive(self, view: DeviceView, arrived: FakeEvent) -> FakeArray:
        self.follow(view, arrived)
        lease = Lease(view)
        lease.use_on(view.on.current_stream())
        owner: FakeArray = view.owner
        memory = Memory(owner.memory.ptr, owner.memory.nbytes, (owner.memory, lease))
        return FakeArray(owner.device, memory, owner.shape, owner.dtype)

    def copy_home(self, view: DeviceView, stream: Stream) -> None:
        self._assign(view.home, view.owner, stream)

    @staticmethod
    def _assign(target: FakeArray, source: FakeArray, stream: Stream) -> None:
        def run() -> None:
            target._numpy()[...] = source._numpy()

        target.device.call(run, stream)
