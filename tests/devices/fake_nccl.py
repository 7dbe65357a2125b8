"""Fake NCCL on devices in host memory, by the names of ``cupy.cuda.nccl``, for ranks that are threads.

A collective queues three entries on a stream:

1. The rank deposits its input.
2. The stream waits until all ranks have deposited theirs.
3. The rank takes its output.

As with the real NCCL, only the device's synchronization blocks.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pyhvd.arrays import Array
from pyhvd.dtypes import Code
from tests.devices.fake import FakeDevice, FakeEvent, Wait, elements

PATIENCE_S = 30.0

_CODES = {
    0: Code.INT8,
    1: Code.UINT8,
    2: Code.INT32,
    3: Code.UINT32,
    4: Code.INT64,
    5: Code.UINT64,
    6: Code.FLOAT16,
    7: Code.FLOAT32,
    8: Code.FLOAT64,
    9: Code.BFLOAT16,
}


class NcclError(RuntimeError):
    """The library's error."""


class PeerDevice(FakeDevice):
    """A fake device whose streams may wait for other ranks' devices."""

    def __init__(self, index: int = 0, seed: int = 0, identity: str = "") -> None:
        super().__init__(index, seed, identity)
        # A late device makes progress without a caller, since other devices wait for it.
        self._eagerness = max(self._eagerness, 1)

    def synchronize(self, event: FakeEvent) -> None:
        """Wait, and run other work meanwhile."""
        self.synchronized += 1
        end = time.monotonic() + PATIENCE_S
        while event.passed < event.recorded:
            with self._lock:
                moved = self._step()
            if not moved:
                assert time.monotonic() < end, "a deadlock: a stream waits for a call that no rank makes"
                time.sleep(1e-4)


class Gathering:
    """The state that the ranks of a communicator share: their buffers, by number of the collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.laid: dict[Any, dict[int, Any]] = {}
        self.complete: set[Any] = set()
        self.waits: dict[int, dict[Any, FakeEvent]] = {rank: {} for rank in range(size)}
        self.ended: set[int] = set()
        self.error = ""
        self.joined: list[FakeDevice] = []
        self.all_there = threading.Barrier(size)

    def event(self, key: Any, rank: int) -> FakeEvent:
        """Return a rank's event, which passes when all ranks have published, or the rank has aborted."""
        with self.lock:
            found = self.waits[rank].setdefault(key, FakeEvent())
            found.recorded = 1
            found.passed = int(key in self.complete or rank in self.ended)
            return found

    def lay(self, key: Any, rank: int, what: Any, expected: int) -> None:
        """Publish a rank's buffer; the last one wakes all ranks."""
        with self.lock:
            parts = self.laid.setdefault(key, {})
            assert rank not in parts
            parts[rank] = what
            if len(parts) == expected:
                self.complete.add(key)
                for waits in self.waits.values():
                    if key in waits:
                        waits[key].passed = 1

    def abort(self, rank: int) -> None:
        """Make a rank's waits end, not those of its peers: they must abort, too."""
        with self.lock:
            self.ended.add(rank)
            for event in self.waits[rank].values():
                event.passed = 1


class FakeNccl:
    """The fake library, shared by all ranks of a job.

    Parameters
    ----------
    devices : list of FakeDevice
        The device of each rank.
    old : bool
        Whether an id is a tuple of numbers, as before CuPy 14.
    """

    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = 0, 1, 2, 3
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
    NcclError = NcclError

    @staticmethod
    def get_version() -> int:
        return 23203

    def __init__(self, old: bool = False) -> None:
        self._old = old
        self._lock = threading.Lock()
        self._ids = itertools.count(200)
        self._gatherings: dict[Any, Gathering] = {}
        self._group = threading.local()
        self.refuses: dict[int, Exception] = {}
        self.calls: list[tuple[int, str]] = []
        self.fails_at: dict[int, str] = {}
        self.destroyed: list[int] = []
        self.aborted: list[int] = []

    def rank(self, device: FakeDevice) -> Any:
        """Return the library of the rank with this device."""
        return _Rank(self, device)

    def new_id(self) -> Any:
        with self._lock:
            number = next(self._ids)
        text = bytes([number, 0, 255, *range(125)])
        return tuple(np.frombuffer(text, np.int8).tolist()) if self._old else text

    def gathering(self, made: Any, size: int) -> Gathering:
        assert len(made) == 128
        with self._lock:
            return self._gatherings.setdefault(made, Gathering(size))


class _Rank:
    def __init__(self, whole: FakeNccl, device: FakeDevice) -> None:
        self._whole, self._device = whole, device
        self._depth = 0
        self._waiting: list[Callable[[], list[Any]]] = []
        self.get_unique_id = whole.new_id
        for name in dir(FakeNccl):
            if name.startswith("NCCL_"):
                setattr(self, name, getattr(FakeNccl, name))

    def NcclCommunicator(self, size: int, made: Any, rank: int) -> FakeCommunicator:  # noqa: N802
        if rank in self._whole.refuses:
            raise self._whole.refuses[rank]
        gathering = self._whole.gathering(made, size)
        gathering.all_there.wait(PATIENCE_S)
        return FakeCommunicator(self._whole, self, gathering, rank, self._device)

    def groupStart(self) -> None:  # noqa: N802
        self._depth += 1

    def groupEnd(self) -> None:  # noqa: N802
        self._depth -= 1
        assert self._depth >= 0
        if not self._depth:
            # A group acts as one call: all deposits come before all waits.
            queued = [start() for start in self._waiting]
            self._waiting = []
            for rest in queued:
                for step in rest:
                    step()

    def put(self, start: Callable[[], list[Any]]) -> None:
        self._waiting.append(start)
        if not self._depth:
            self._depth += 1
            self.groupEnd()


class FakeCommunicator:
    """One rank's communicator."""

    def __init__(
        self, whole: FakeNccl, library: _Rank, gathering: Gathering, rank: int, device: FakeDevice
    ) -> None:
        self._whole, self._library, self._gathering = whole, library, gathering
        self._rank, self._device = rank, device
        self._numbers = itertools.count()
        self._pairs: dict[Any, itertools.count[int]] = {}
        self._unended = 0

    # -- collectives, by the library's names ------------------------------------------------------------

    def allReduce(self, send: int, recv: int, count: int, kind: int, op: int, stream: int) -> None:  # noqa: N802
        self._collective("allReduce", send, count, kind, stream, lambda p: _put(recv, _fold(p, op), kind))

    def reduce(self, send: int, recv: int, count: int, kind: int, op: int, root: int, stream: int) -> None:
        def take(parts: list[Array]) -> None:
            if self._rank == root:
                _put(recv, _fold(parts, op), kind)

        self._collective(f"reduce to {root}", send, count, kind, stream, take)

    def reduceScatter(  # noqa: N802
        self, send: int, recv: int, count: int, kind: int, op: int, stream: int
    ) -> None:
        mine = slice(self._rank * count, (self._rank + 1) * count)

        def take(parts: list[Array]) -> None:
            _put(recv, _fold([part[mine] for part in parts], op), kind)

        self._collective("reduceScatter", send, count * self._gathering.size, kind, stream, take)

    def allGather(self, send: int, recv: int, count: int, kind: int, stream: int) -> None:  # noqa: N802
        self._collective(
            "allGather", send, count, kind, stream, lambda p: _put(recv, np.concatenate(p), kind)
        )

    def broadcast(self, send: int, recv: int, count: int, kind: int, root: int, stream: int) -> None:
        self._collective(
            f"broadcast from {root}", send, count, kind, stream, lambda p: _put(recv, p[root], kind)
        )

    def send(self, ptr: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._called("send")
        key = self._pair(self._rank, peer)

        def lay() -> None:
            self._unended -= 1
            self._gathering.lay(key, 0, _get(ptr, count, kind), 1)

        def start() -> list[Any]:
            self._unended += 1
            self._device.call(lay, stream)
            return []

        self._library.put(start)

    def recv(self, ptr: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._called("recv")
        key = self._pair(peer, self._rank)

        def take() -> None:
            self._unended -= 1
            if self._rank in self._gathering.ended:
                return
            what = self._gathering.laid[key][0]
            assert len(what) == count, "sender and receiver pass different lengths"
            _put(ptr, what, kind)

        def start() -> list[Any]:
            self._unended += 1
            event = self._gathering.event(key, self._rank)
            return [
                lambda: self._device._queue(stream, Wait(event, 1)),
                lambda: self._device.call(take, stream),
            ]

        self._library.put(start)

    # -- the end --------------------------------------------------------------------------------------

    def check_async_error(self) -> None:
        if self._gathering.error:
            raise NcclError(self._gathering.error)

    def abort(self) -> None:
        self._whole.aborted.append(self._rank)
        self._gathering.error = self._gathering.error or "NCCL_ERROR_REMOTE_ERROR: a peer has aborted"
        self._gathering.abort(self._rank)

    def destroy(self) -> None:
        assert not self._unended, "a communicator is freed while the device works for it"
        self._whole.destroyed.append(self._rank)

    # -- how ------------------------------------------------------------------------------------------

    def _collective(
        self,
        name: str,
        send: int,
        count: int,
        kind: int,
        stream: int,
        take: Callable[[list[Array]], None],
    ) -> None:
        self._called(name)
        gathering, rank, key = self._gathering, self._rank, next(self._numbers)

        def finish() -> None:
            self._unended -= 1
            if rank in gathering.ended:
                return
            parts = gathering.laid[key]
            names = {given[0] for given in parts.values()}
            assert names == {(name, count, kind)}, f"the ranks call different collectives: {names}"
            take([parts[r][1] for r in range(gathering.size)])

        def start() -> list[Any]:
            self._unended += 1
            event = gathering.event(key, rank)
            self._device.call(
                lambda: gathering.lay(
                    key, rank, ((name, count, kind), _get(send, count, kind)), gathering.size
                ),
                stream,
            )
            return [
                lambda: self._device._queue(stream, Wait(event, 1)),
                lambda: self._device.call(finish, stream),
            ]

        self._library.put(start)

    def _called(self, name: str) -> None:
        if self._whole.fails_at.get(self._rank) == name:
            raise NcclError("NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error")
        self._whole.calls.append((self._rank, name))

    def _pair(self, sender: int, receiver: int) -> tuple[int, int, int]:
        number = next(self._pairs.setdefault((sender, receiver), itertools.count()))
        return sender, receiver, number


def _get(ptr: int, count: int, kind: int) -> Array:
    return elements(ptr, count, _CODES[kind]).copy()


def _put(ptr: int, values: Array, kind: int) -> None:
    elements(ptr, len(values), _CODES[kind])[:] = values


def _fold(parts: list[Array], op: int) -> Array:
    """Reduce from the last rank to the first: like NCCL, not in the order of the host.

    As NCCL does, it rounds each partial sum to the dtype of the parts.
    """
    how = (np.add, np.multiply, np.maximum, np.minimum)[op]
    with np.errstate(all="ignore"):  # the gaps between tensors may hold any value
        result = parts[-1]
        for part in reversed(parts[:-1]):
            result = how(result, part)
        return result.astype(parts[0].dtype)
