"""Collectives on device memory by an MPI that takes addresses on devices: a CUDA-aware one.

What only moves bytes - allgather, broadcast, alltoall - is given to MPI as it lies on the device. Reductions
go through the host, as in :mod:`pyhvd.backends.gpu.staged`: there are no kernels on the device that add up, and
MPI's own sums would be in an order of its own.

Only messages between two ranks are used, never a collective of MPI's: some of those look into the memory
themselves, and messages are what the trial has tried out.

MPI knows nothing of streams. So before it is given an address, pyhvd's background thread waits until the
communication stream has come so far; when MPI is done with a receive, the contents are there for every
stream.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyhvd.arrays import Bytes, address
from pyhvd.backends.base import Backend
from pyhvd.backends.gpu.device_transport import refuse_together
from pyhvd.backends.gpu.staged import StagedBackend
from pyhvd.devices.base import Device, DeviceBackend, DeviceViews, Packer, Span, Stream
from pyhvd.transport.fabric import Block, Fabric

TRIAL_S = 20.0
"""Seconds that a trial's messages may take."""

TRIAL_SIZES = (64, 256 * 1024)
"""Bytes: MPI sends short messages in another way than long ones."""

_kept: list[Any] = []
"""Memory to which MPI may write as long as the process lives."""


class CudaMpiTransport:
    """Implements :class:`pyhvd.backends.gpu.device_transport.DeviceTransport`."""

    name = "CUDA-aware MPI"
    shares = True
    remark = ", and reductions through the host"

    def version(self, device: Device, fabric: Fabric) -> str:  # noqa: ARG002 - any device will do
        """Return MPI's name and version.

        Raises
        ------
        RuntimeError
            It does not say that it takes memory on devices.
        """
        return fabric.takes_devices()

    def open(self, host: Backend, device: Device, stream: Stream, packer: Packer | None) -> DeviceBackend:
        """Return a process set's backend, when a trial has gone well; collective.

        Raises
        ------
        Refused
            It has not, on some rank.
        """
        try_out(host.fabric, device, stream)
        return CudaMpiBackend(host, device, stream, packer)


class CudaMpiBackend(StagedBackend):
    """See the module's docstring; implements :class:`pyhvd.devices.base.DeviceBackend`."""

    carrier = "CUDA_MPI"

    def allgather(
        self, sources: DeviceViews, targets: Sequence[Span], counts: Sequence[Sequence[int]]
    ) -> None:
        """Concatenate; ``counts[i][r]`` is the number of bytes that rank r gives to tensor i."""
        self._catch_up()
        starts = [list(itertools.accumulate(each, initial=0)) for each in counts]
        given = [source.span for source in sources if source is not None]
        for i, source in enumerate(sources):
            if source is not None and source.nbytes:
                self._device.copy(
                    targets[i].ptr + starts[i][self.rank], source.ptr, source.nbytes, self.stream
                )
        self._trade(
            [(r, span) for r in self._others for span in given],
            [
                (r, target.part(starts[i][r], counts[i][r]))
                for r in reversed(self._others)
                for i, target in enumerate(targets)
            ],
        )

    def broadcast(self, buffer: Span, root: int) -> None:
        """Copy the root's bytes to every rank: in each round, who has them gives them to one more."""
        self._catch_up()
        place = (self.rank - root) % self.size
        reach = 1
        while reach < self.size:
            send, recv = [], []
            if place < reach and place + reach < self.size:
                send = [((self.rank + reach) % self.size, buffer)]
            elif reach <= place < 2 * reach:
                recv = [((self.rank - reach) % self.size, buffer)]
            self._trade(send, recv)
            reach *= 2

    def alltoall(
        self, send: Span, send_counts: Sequence[int], recv: Span, recv_counts: Sequence[int]
    ) -> None:
        """Exchange blocks of uneven size, which lie one behind the other; counts in bytes."""
        self._catch_up()
        out, into = _parts(send, send_counts), _parts(recv, recv_counts)
        if send_counts[self.rank]:
            self._device.copy(into[self.rank].ptr, out[self.rank].ptr, send_counts[self.rank], self.stream)
        self._trade([(r, out[r]) for r in self._others], [(r, into[r]) for r in reversed(self._others)])

    @property
    def _others(self) -> list[int]:
        """The other ranks, each in another order, so that they do not all begin with the same one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _catch_up(self) -> None:
        """Block until the communication stream has come so far: sources are there, and targets are free."""
        self._device.synchronize(self._device.mark(self.stream))

    def _trade(self, send: Sequence[tuple[int, Span]], recv: Sequence[tuple[int, Span]]) -> None:
        self._host.fabric.trade(_blocks(send), _blocks(recv))


def try_out(fabric: Fabric, device: Device, stream: Stream) -> None:
    """Send from each device to each other one, and look at what has arrived; collective over the set.

    An MPI that takes an address on a device for one in host memory ends the process: nothing can be done
    about that here.

    Raises
    ------
    Refused
        On some rank it did not work, or took more than :data:`TRIAL_S`.
    """
    trial: _Trial | None = None
    error = ""
    try:
        trial = _Trial(fabric, device, stream)
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"
    refuse_together(fabric, error)  # whoever does not take part would hold up the others
    assert trial is not None
    try:
        trial.run()
    except Exception as exc:
        _kept.append(trial)
        error = f"{type(exc).__name__}: {exc}"
    refuse_together(fabric, error)


class _Trial:
    """A block of this rank's own on the device, and room for those of others."""

    def __init__(self, fabric: Fabric, device: Device, stream: Stream) -> None:
        self._fabric, self._device, self._stream = fabric, device, stream
        self._bytes = sum(TRIAL_SIZES)
        self._room = device.allocate(2 * self._bytes, stream)
        self._pinned = device.allocate_pinned(self._bytes)
        self._out = _parts(Span(self._room.ptr, self._bytes), TRIAL_SIZES)
        self._into = _parts(Span(self._room.ptr + self._bytes, self._bytes), TRIAL_SIZES)
        self._pinned[:] = _pattern(fabric.rank, self._bytes)
        device.copy(self._out[0].ptr, address(self._pinned), self._bytes, stream)
        device.synchronize(device.mark(stream))

    def run(self) -> None:
        """Send to, and receive from, every other rank, one at a time.

        Raises
        ------
        TimeoutError
            Some message has not come through.
        ValueError
            What has arrived is not what was sent.
        """
        wrong: list[int] = []
        size, me = self._fabric.size, self._fabric.rank
        for step in range(1, size):
            to, source = (me + step) % size, (me - step) % size
            self._fabric.trade(
                _blocks([(to, span) for span in self._out]),
                _blocks([(source, span) for span in self._into]),
                TRIAL_S,
            )
            self._device.copy(address(self._pinned), self._into[0].ptr, self._bytes, self._stream)
            self._device.synchronize(self._device.mark(self._stream))
            if not np.array_equal(self._pinned, _pattern(source, self._bytes)):
                wrong.append(source)
        if wrong:
            raise ValueError(f"what came from rank {wrong[0]} of the set is not what was sent")


def _pattern(rank: int, nbytes: int) -> Bytes:
    """Return a rank's own bytes."""
    return ((np.arange(nbytes) * 7 + rank * 31 + 1) % 251).astype(np.uint8)


def _parts(span: Span, sizes: Sequence[int]) -> list[Span]:
    """Cut bytes into blocks that lie one behind the other."""
    firsts = itertools.accumulate(sizes, initial=0)
    return [span.part(first, size) for first, size in zip(firsts, sizes, strict=False)]


def _blocks(spans: Sequence[tuple[int, Span]]) -> list[Block]:
    """Return bytes on the device as a fabric takes them: addresses and lengths, into which nobody looks."""
    return [
        (rank, np.ctypeslib.as_array((ctypes.c_uint8 * span.nbytes).from_address(span.ptr)))
        for rank, span in spans
        if span.nbytes
    ]
