"""Clocks of ranks: the true offset and the mapped times are within the stated uncertainty."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pyhvd.arrays import Bytes
from pyhvd.observe.trace.clocks import ClockMap, ClockReading, measure
from pyhvd.transport.fabric import Fabric

SECOND = 1_000_000_000


class Wires:
    """A network of two ranks with chosen delays; two threads in lockstep play a fabric's allgather.

    Each rank has its own true time, which its actions advance. It leaves when the other's message arrives.
    """

    def __init__(self, delays: list[tuple[int, int]], late: list[int], offset: int) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self._delays = delays
        self._late = late
        self._sent: list[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint8]]]] = [
            (0, np.zeros(0, np.uint8))
        ] * 2
        self.now = [1000, 1000]
        self.offset = [0, offset]

    def clock(self, rank: int) -> Callable[[], int]:
        return lambda: self.now[rank] + self.offset[rank]

    def play(self, rank: int, rounds: int) -> ClockReading:
        return measure(cast(Fabric, _End(self, rank)), self.clock(rank), rounds)

    def allgather(self, rank: int, turn: int, send: Bytes, recv: Bytes) -> None:
        self._sent[rank] = (self.now[rank], send.copy())
        self._barrier.wait()
        delay = self._delays[turn % len(self._delays)][rank]
        arrived = self._sent[1 - rank][0] + delay
        recv[: len(send)], recv[len(send) :] = self._sent[0][1], self._sent[1][1]
        self.now[rank] = max(self.now[rank], arrived) + 10
        self._barrier.wait()
        self.now[rank] += self._late[turn % len(self._late)] if rank else 5


class _End:
    size = 2

    def __init__(self, wires: Wires, rank: int) -> None:
        self.rank = rank
        self._wires = wires
        self._turn = 0

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        self._wires.allgather(self.rank, self._turn, send, recv)
        self._turn += 1


@settings(max_examples=40, deadline=None)
@given(
    delays=st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=6),
    late=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    offset=st.integers(-(10**15), 10**15),
)
def test_the_true_offset_is_within_the_uncertainty(
    delays: list[tuple[int, int]], late: list[int], offset: int
) -> None:
    wires = Wires(delays, late, offset)
    readings: dict[int, ClockReading] = {}
    threads = [
        threading.Thread(target=lambda r=rank: readings.__setitem__(r, wires.play(r, 8)), daemon=True)
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (readings[0].offset, readings[0].uncertainty) == (0, 0)
    assert abs(readings[1].offset - offset) <= readings[1].uncertainty + 1


@given(
    ahead=st.integers(-(10**15), 10**15),
    drift=st.floats(-1e-4, 1e-4),
    length=st.integers(SECOND // 100, 10**4 * SECOND),
    where=st.floats(0, 1),
    errors=st.tuples(st.integers(-5000, 5000), st.integers(-5000, 5000)),
)
def test_times_come_back_within_the_uncertainty(
    ahead: int, drift: float, length: int, where: float, errors: tuple[int, int]
) -> None:
    def shows(time: float) -> float:
        return time + ahead + drift * time

    readings = []
    for moment, error in zip((0, length), errors, strict=True):
        at = round(shows(moment))
        readings.append(ClockReading(at, at - moment + error, 5000))
    clock = ClockMap(*readings)
    time = where * length
    # Two ns of rounding, and the precision of floats of this size.
    assert (
        abs(clock.to_root(shows(time)) - time) <= clock.uncertainty * (1 + 1e-3) + 2 + 1e-15 * abs(ahead) * 4
    )
    assert clock.drift == pytest.approx(drift * 1e6, abs=(clock.drift_uncertainty or 0.0) * 1.01 + 1e-3)


def test_one_reading_is_kept_and_says_nothing_of_drift() -> None:
    clock = ClockMap(ClockReading(100, 40, 7))
    assert clock.to_root(1_000_100) == 1_000_060
    assert clock.drift is None
    assert clock.drift_uncertainty is None
    assert clock.uncertainty == 7


def test_order_is_kept() -> None:
    clock = ClockMap(ClockReading(0, 500, 1), ClockReading(SECOND, -500, 1))
    times = [clock.to_root(at) for at in range(0, SECOND, SECOND // 100)]
    assert times == sorted(times)
