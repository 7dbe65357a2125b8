"""The way through the host: device memory, page-locked memory, some work there, and back, a piece at a time.

Two slots of page-locked memory lie on each way. While the host works on one piece, the next one comes down
and the last one goes up, each way on a stream of its own, as GPUs have a copy engine for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from pyhvd.arrays import Bytes, address
from pyhvd.devices.base import Device, Event, Stream

SLOTS = 2


class Move(NamedTuple):
    """A copy between a slot, from byte ``first`` on, and an address on the device."""

    first: int
    ptr: int
    nbytes: int


@dataclass(slots=True)
class Step:
    """One piece of a transfer.

    Attributes
    ----------
    work : callable
        ``work(down, up)``: what the host does, with what has come down, and with what is to go up.
    down_bytes, up_bytes : int
        Lengths of the two.
    down, up : list of Move
        The copies; none for a rank that has joined.
    """

    work: Callable[[Bytes, Bytes], None]
    down_bytes: int
    up_bytes: int
    down: list[Move] = field(default_factory=list)
    up: list[Move] = field(default_factory=list)


class Way:
    """One direction: a stream, and two slots of page-locked memory, each with the event of its last copy."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stream: Stream = device.make_stream()
        self.events: list[Event] = [device.make_event() for _ in range(SLOTS)]
        self._memory: list[Bytes | None] = [None] * SLOTS

    def slot(self, number: int, nbytes: int) -> Bytes:
        """Return a slot's memory; the last copy has to have passed."""
        memory = self._memory[number]
        if memory is None or len(memory) < nbytes:
            memory = self._memory[number] = self._device.allocate_pinned(max(nbytes, 4096))
        return memory[:nbytes]

    def settle(self, number: int) -> None:
        """Block the calling thread until the last copy from, or to, a slot has been done."""
        self._device.synchronize(self.events[number])

    def queue(self, number: int, moves: Iterable[tuple[int, int, int]]) -> None:
        """Queue copies (target, source, bytes) of a slot."""
        for target, source, nbytes in moves:
            self._device.copy(target, source, nbytes, self.stream)
        self._device.record(self.events[number], self.stream)


class Pipeline:
    """See the module's docstring.

    Parameters
    ----------
    device : Device
        Whose memory it is.
    stream : Stream
        What is transferred is there when this stream has come to it; and it waits for what goes up.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        self._down = Way(device)
        self._up = Way(device)

    def run(self, steps: Iterable[Step]) -> None:
        """Carry out a transfer; when this returns, its work on the host is done, and its copies are queued.

        The steps' places on the device are apart from each other, or a step reads what it writes itself.
        """
        with self._between():
            ahead = iter(steps)
            step = next(ahead, None)
            if step is not None:
                self._fetch(0, step)
            turn = 0
            while step is not None:
                following = next(ahead, None)
                if following is not None:
                    self._fetch((turn + 1) % SLOTS, following)
                self._work(turn % SLOTS, step)
                step, turn = following, turn + 1

    @contextmanager
    def _between(self) -> Iterator[None]:
        """Behind what the communication stream has to do before, and before what it has to do next."""
        device = self._device
        before = device.mark(self._stream)
        device.wait(self._down.stream, before)  # what goes up comes behind what has come down
        yield
        after = device.mark(self._up.stream)
        device.wait(self._stream, after)

    def _fetch(self, number: int, step: Step) -> None:
        slot = address(self._down.slot(number, step.down_bytes))
        self._down.queue(number, [(slot + move.first, move.ptr, move.nbytes) for move in step.down])

    def _work(self, number: int, step: Step) -> None:
        self._down.settle(number)
        self._up.settle(number)
        up = self._up.slot(number, step.up_bytes)
        step.work(self._down.slot(number, step.down_bytes), up)
        slot = address(up)
        self._up.queue(number, [(move.ptr, slot + move.first, move.nbytes) for move in step.up])
