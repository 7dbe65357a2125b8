"""Staging, compared with numpy, on a fake device that delays and reorders the queued work of its streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pyhvd.arrays import Array, Bytes
from pyhvd.devices.pack_plan import ALIGNMENT, lay_out
from pyhvd.devices.staging_pipeline import Pipeline, StagedCopy, TransferPiece
from tests.devices.fake import FakeArray, FakeDevice, fake_array

PIECE = 16


def doubled(device: FakeDevice, source: FakeArray, target: FakeArray) -> Array:
    """Double an array's bytes on the host, by a pipeline of the communication stream; return the result."""
    stream, caller = device.make_stream(), device.current_stream()
    ready, arrived = device.make_event(), device.make_event()
    device.record(ready, caller)
    device.wait(stream, ready)

    def double(down: Bytes, up: Bytes) -> None:
        up[:] = down * 2

    def steps() -> Iterator[TransferPiece]:
        total = source.memory.nbytes
        for first in range(0, total, PIECE):
            n = min(PIECE, total - first)
            yield TransferPiece(
                double, n, n, [StagedCopy(0, source.ptr + first, n)], [StagedCopy(0, target.ptr + first, n)]
            )

    Pipeline(device, stream).run(steps())
    device.record(arrived, stream)
    device.wait(caller, arrived)
    return target.get()


@given(seed=st.integers(0, 1 << 30), length=st.integers(0, 200), inplace=st.booleans())
def test_every_piece_is_copied_down_changed_and_copied_up(seed: int, length: int, inplace: bool) -> None:
    device = FakeDevice(seed=seed)
    values = np.arange(length, dtype=np.uint8)
    source = fake_array(device, values)
    target = source if inplace else fake_array(device, np.zeros(length, np.uint8))
    assert doubled(device, source, target).tolist() == (values * 2).tolist()
    if not inplace:
        assert source.get().tolist() == values.tolist()


class Forgetful(FakeDevice):
    """A device that skips the n-th wait or synchronization, as if the caller had forgotten it."""

    forgets = ("", -1)

    def _forget(self, what: str) -> bool:
        kind, left = self.forgets
        if what != kind:
            return False
        self.forgets = (kind, left - 1)
        return left == 0

    def wait(self, stream: int, event: Any) -> None:
        if not self._forget("wait"):
            super().wait(stream, event)

    def synchronize(self, event: Any) -> None:
        if not self._forget("synchronize"):
            super().synchronize(event)


def _goes_wrong(what: str, number: int) -> bool:
    for seed in range(60):
        device = Forgetful(seed=seed)
        values = np.arange(3 * PIECE, dtype=np.uint8)
        # When the transfer begins, work on the caller's stream may still have to write the values.
        source = fake_array(device, np.full(len(values), 77, np.uint8))
        source.set(values)
        target = fake_array(device, np.zeros(len(values), np.uint8))
        device.forgets = (what, number)
        if doubled(device, source, target).tolist() != (values * 2).tolist():
            return True
    return False


# The transfer has three pieces, and each direction has two slots. Its waits, in order:
#   0. the communication stream waits for the caller's stream, which writes the input;
#   1. the stream down waits for the communication stream;
#   2. the communication stream waits for the stream up;
#   3. the caller's stream waits for the communication stream.
# Its synchronizations, in order:
#   0, 2, 4. for each piece: its copy down has ended;
#   1, 3, 5. for each piece: the last copy up from its slot has ended. The first two pieces have no such copy.
@pytest.mark.parametrize(
    ("what", "number"), [("wait", n) for n in range(4)] + [("synchronize", n) for n in (0, 2, 4, 5)]
)
def test_each_wait_and_synchronization_is_needed(what: str, number: int) -> None:
    assert _goes_wrong(what, number)


def test_the_page_locked_memory_is_bounded() -> None:
    device = FakeDevice()
    taken: list[int] = []
    inner = device.allocate_pinned

    def allocate_pinned(nbytes: int) -> Bytes:
        taken.append(nbytes)
        return inner(nbytes)

    device.allocate_pinned = allocate_pinned  # type: ignore[method-assign]
    values = fake_array(device, np.zeros(10_000, np.uint8))
    doubled(device, values, values)
    assert len(taken) == 4, "two slots each way"


@given(st.lists(st.integers(0, 100), min_size=1), st.sampled_from([1, 2, 4, 8, 16]))
def test_tensors_do_not_overlap_and_are_aligned(counts: list[int], item: int) -> None:
    offsets, total = lay_out(counts, item)
    ends = [*offsets[1:].tolist(), total]
    for offset, count, end in zip(offsets.tolist(), counts, ends, strict=True):
        assert offset * item % ALIGNMENT == 0
        assert offset + count <= end < offset + count + ALIGNMENT // item
