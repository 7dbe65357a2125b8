"""The trace ring of the C code: bounded, complete, and consistent with many writers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pyhvd.arrays import address
from pyhvd.native.shared_memory import FLAT, PACKING, REDUCING, Trace, Window, area_bytes
from pyhvd.observe.hooks import read_clock
from pyhvd.transport.shm import LINE, aligned

CHUNK = FLAT
_FLOAT32 = 7
_SUM = 1


class _Writer:
    """A window of one rank: each reduction writes one record for packing and one for reducing."""

    def __init__(self, trace: Trace) -> None:
        self._memory = np.empty(area_bytes(CHUNK) + LINE, np.uint8)
        self._window = Window(0, [aligned(address(self._memory))], CHUNK)
        self._window.attach(trace)
        self._window.clear()
        self._data = np.ones(4, np.float32)

    def write(self, times: int = 1) -> None:
        where = np.array([self._data.ctypes.data], np.int64)
        for _ in range(times):
            assert self._window.allreduce(where, where, np.array([0, 4]), _FLOAT32, _SUM, 1.0, 1.0)


def test_nothing_is_recorded_unless_somebody_records() -> None:
    trace = Trace()
    writer = _Writer(trace)
    writer.write()
    assert trace.take(10) == []
    trace.start(8)
    before = read_clock()
    writer.write()
    trace.stop()
    writer.write()
    records = trace.take(10)
    assert [record[0] for record in records] == [PACKING, REDUCING]
    for _, begin, end, number, *_ in records:
        assert before <= begin <= end <= read_clock()
        assert number == 1
    assert trace.take(10) == []


def test_a_full_ring_drops_and_counts() -> None:
    trace = Trace()
    writer = _Writer(trace)
    trace.start(4)
    writer.write(5)
    assert trace.dropped == 6
    assert [record[3] for record in trace.take(3)] == [0, 0, 1]
    writer.write()
    assert [record[3] for record in trace.take(100)] == [1, 5, 5]
    assert trace.dropped == 6


def test_the_number_of_cells_is_a_power_of_two() -> None:
    for cells in (0, 3):
        with pytest.raises(ValueError, match="power of two"):
            Trace().start(cells)


@pytest.mark.parametrize("cells", [16, 1 << 14])
def test_many_writers_and_a_reader(cells: int) -> None:
    trace = Trace()
    trace.start(cells)
    writers = [_Writer(trace) for _ in range(4)]
    times = 1000
    threads = [threading.Thread(target=each.write, args=(times,)) for each in writers]
    for thread in threads:
        thread.start()
    records = []
    while any(thread.is_alive() for thread in threads):
        records += trace.take(7)
    records += trace.take(1 << 20)
    assert len(records) + trace.dropped == 2 * times * len(writers)
    assert {record[0] for record in records} <= {PACKING, REDUCING}
    assert all(0 < begin <= end and number < times for _, begin, end, number, *_ in records)
    if not trace.dropped:
        for kind in (PACKING, REDUCING):
            numbers = sorted(record[3] for record in records if record[0] == kind)
            assert numbers == sorted(list(range(times)) * len(writers))
