"""Ranks as threads, each with a fake device, a communication stream and a fake NCCL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pyhvd.backends.gpu.nccl import NcclBackend
from pyhvd.backends.gpu.nccl_init import open_nccl
from pyhvd.devices.base import DeviceContext, DeviceView, Stream
from pyhvd.dtypes import Code
from pyhvd.transport.inprocess import ThreadFabric, ThreadGroup
from tests.devices.fake import FakeArray, FakeLibrary, dtype_of
from tests.devices.fake_nccl import FakeNccl, PeerDevice

Array = np.ndarray[Any, Any]

LIBRARY = FakeLibrary()


class ByHost:
    """Stands in for staging through the host: records its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.rank = self.size = self.stream = 0
        self.name = self.failure = ""
        self.sums_wide = True

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.asked.append(name)


class Rank:
    """One rank: its device, its communication stream, and its backend."""

    def __init__(self, nccl: FakeNccl, group: ThreadGroup, rank: int, seed: int, timeout: float) -> None:
        self.rank, self.size = rank, group.size
        self.device = PeerDevice(seed=seed * 10 + rank)
        self.stream: Stream = self.device.make_stream()
        fabric = ThreadFabric(group, rank)
        library = nccl.rank(self.device)
        self.by_host: Any = ByHost()
        self.context = DeviceContext(self.device, self.stream, self.device)
        self.nccl: NcclBackend = open_nccl(fabric, self.context, library, lambda: self.by_host, timeout)

    def array(self, values: Any, shift: int = 0) -> DeviceView:
        """Put values on the device, ``shift`` elements after a multiple of 256 bytes."""
        fixed = np.asarray(values)
        with self.device.using(self.stream):
            behind = shift * fixed.dtype.itemsize
            memory = self.device.allocate(fixed.nbytes + behind + 1, self.stream)
            array = FakeArray(self.device, memory, fixed.shape, fixed.dtype, first=behind).set(fixed)
            return LIBRARY.adopt(array, writing=True)

    def look(self, view: DeviceView) -> Array:
        """Wait for the communication stream's queued work; return the contents."""
        with self.device.using(self.stream):
            owner: FakeArray = view.owner
            return owner.get()

    def finish(self) -> None:
        event = self.device.make_event()
        self.device.record(event, self.stream)
        self.device.synchronize(event)


def on_ranks(
    size: int,
    work: Callable[[Rank], Any],
    *,
    nccl: FakeNccl | None = None,
    seed: int = 0,
    timeouts: Sequence[float] | None = None,
) -> list[Any]:
    """Run a function on each rank's thread; return the results or exceptions."""
    nccl = nccl or FakeNccl()
    group = ThreadGroup(size, 30.0)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Rank(nccl, group, rank, seed, timeouts[rank] if timeouts else 30.0))
        except Exception as exc:
            results[rank] = exc

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "a rank hangs"
    return results


def good(results: Sequence[Any]) -> Sequence[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def numbers(code: Code, shape: tuple[int, ...], rank: int, seed: int = 0) -> Array:
    """Return small integers: their reductions are exact in every dtype."""
    rng = np.random.default_rng([seed, rank, code])
    if code is Code.BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    values = rng.integers(0, 3, shape).astype(dtype_of(code))
    return values * 1j if code in (Code.COMPLEX64, Code.COMPLEX128) else values
