"""Stage device memory through page-locked host memory: copy down, work on the host, copy up, in pieces.

Each direction has two slots of page-locked memory and a stream, as GPUs have a copy engine per direction.
While the host works on one piece, the next one is copied down and the last one up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from pyhvd.arrays import Bytes, address
from pyhvd.devices.base import Device, Event, Stream

SLOTS = 2


class StagedCopy(NamedTuple):
    """A copy between byte ``first`` of a slot and an address on the device."""

    first: int
    ptr: int
    nbytes: int


@dataclass(slots=True)
class TransferPiece:
    """One piece of a transfer; a rank that has joined makes no copies."""

    work: Callable[[Bytes, Bytes], None]
    """``work(down, up)`` reads the slot that was copied down, and fills the slot to copy up."""
    down_bytes: int
    up_bytes: int
    down: list[StagedCopy] = field(default_factory=list)
    up: list[StagedCopy] = field(default_factory=list)


class _Direction:
    """One direction: a stream, and slots of page-locked memory, each with the event of its last copy."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stream: Stream = device.make_stream()
        self.events: list[Event] = [device.make_event() for _ in range(SLOTS)]
        self._memory: list[Bytes | None] = [None] * SLOTS

    def slot(self, number: int, nbytes: int) -> Bytes:
        """Return a slot's memory; its last copy must be done."""
        memory = self._memory[number]
        if memory is None or len(memory) < nbytes:
            memory = self._memory[number] = self._device.allocate_pinned(max(nbytes, 4096))
        return memory[:nbytes]

    def settle(self, number: int) -> None:
        """Block the calling thread until the last copy of a slot is done."""
        self._device.synchronize(self.events[number])

    def queue(self, number: int, moves: Iterable[tuple[int, int, int]]) -> None:
        """Queue copies of a slot: (target, source, bytes)."""
        for target, source, nbytes in moves:
            self._device.copy(target, source, nbytes, self.stream)
        self._device.record(self.events[number], self.stream)


class Pipeline:
    """Runs the steps of transfers: after the work that ``stream`` has queued, and before its later work."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        self._down = _Direction(device)
        self._up = _Direction(device)

    def run(self, steps: Iterable[TransferPiece]) -> None:
        """Run a transfer: its work on the host is done at the return, and all copies are queued.

        Steps must not overlap on the device, except that a step may write what it reads.
        """
        with self._between():
            fetched: tuple[int, TransferPiece] | None = None
            for turn, step in enumerate(steps):
                self._fetch(turn % SLOTS, step)
                if fetched is not None:
                    self._work(*fetched)
                fetched = turn % SLOTS, step
            if fetched is not None:
                self._work(*fetched)

    @contextmanager
    def _between(self) -> Iterator[None]:
        """Order the copies after the stream's queued work, and before its later work."""
        device = self._device
        before = device.mark(self._stream)
        device.wait(self._down.stream, before)  # copies up follow copies down
        yield
        after = device.mark(self._up.stream)
        device.wait(self._stream, after)

    def _fetch(self, number: int, step: TransferPiece) -> None:
        slot = address(self._down.slot(number, step.down_bytes))
        self._down.queue(number, [(slot + move.first, move.ptr, move.nbytes) for move in step.down])

    def _work(self, number: int, step: TransferPiece) -> None:
        self._down.settle(number)
        self._up.settle(number)
        up = self._up.slot(number, step.up_bytes)
        step.work(self._down.slot(number, step.down_bytes), up)
        slot = address(up)
        self._up.queue(number, [(move.ptr, slot + move.first, move.nbytes) for move in step.up])
