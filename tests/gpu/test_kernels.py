"""The kernels on a GPU against the host's: the tests of ``tests/devices`` on real hardware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pyhvd import _fusion
from pyhvd.arrays import address
from pyhvd.devices.pack_plan import lay_out
from pyhvd.dtypes import BY_CODE, Code, ReduceOp
from tests.devices.test_packing import (
    DTYPES,
    SCALED,
    bits,
    same_bits,
    same_numbers,
    scaled,
    words,
)

Array = np.ndarray[Any, Any]


class OnGpu:
    """Tensors on the device, packed into a buffer on the device."""

    def __init__(
        self,
        values: Sequence[Array | None],
        counts: Sequence[int],
        code: Code,
        *,
        factor: float = 1.0,
        op: ReduceOp = ReduceOp.SUM,
        shifts: Sequence[int] = (),
    ) -> None:
        import cupy

        from pyhvd.devices.cupy_device import cuda_device

        self.device = cuda_device(0)
        self.stream = self.device.make_stream()
        self.packer = self.device.packer()
        self.code, self.counts = code, words(counts)
        self.offsets, total = lay_out(counts, BY_CODE[code].itemsize)
        item = BY_CODE[code].itemsize
        shifts = shifts or [0] * len(counts)
        self.held: list[Any] = []
        ptrs = []
        for value, shift in zip(values, shifts, strict=True):
            raw = b"" if value is None else value.tobytes()
            held = cupy.zeros(len(raw) + shift * item + 1, np.uint8)
            part = held[shift * item : shift * item + len(raw)]
            if raw:
                part.set(np.frombuffer(raw, np.uint8))
            self.held.append(part)
            ptrs.append(0 if value is None else int(held.data.ptr) + shift * item)
        self.ptrs = words(ptrs)
        self.buffer = cupy.full(total * BY_CODE[code].itemsize + 1, 0xA5, np.uint8)
        cupy.cuda.Device().synchronize()
        self.packer.pack(
            int(self.buffer.data.ptr),
            self.offsets,
            self.ptrs,
            self.counts,
            code,
            op,
            factor,
            self.stream,
        )
        self.finish()

    def finish(self) -> None:
        event = self.device.make_event()
        self.device.record(event, self.stream)
        self.device.synchronize(event)

    @property
    def parts(self) -> list[Array]:
        buffer = self.buffer.get()
        assert buffer[-1] == 0xA5
        whole = buffer[:-1].view(DTYPES[self.code])
        return [whole[o : o + n] for o, n in zip(self.offsets, self.counts, strict=True)]

    def unpack(self, factor: float = 1.0) -> list[Array]:
        self.packer.unpack(
            int(self.buffer.data.ptr),
            self.offsets,
            self.ptrs,
            self.counts,
            self.code,
            factor,
            self.stream,
        )
        self.finish()
        return [held.get().view(DTYPES[self.code]) for held in self.held]


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_bits_go_in_and_out_as_they_are(code: Code) -> None:
    import cupy

    counts = [1, 0, 7, 64, 1000, 3, 300_000, 15, 2]
    values = [bits(code, n, i) for i, n in enumerate(counts)]
    packed = OnGpu(values, counts, code, shifts=[0, 1, 0, 1, 2, 3, 0, 1, 0])
    for part, value in zip(packed.parts, values, strict=True):
        same_bits(part, value)
    for held in packed.held:
        held.fill(0)
    cupy.cuda.get_current_stream().synchronize()  # pyhvd's streams do not wait for the default stream
    for got, value in zip(packed.unpack(), values, strict=True):
        same_bits(got, value)


@pytest.mark.parametrize("factor", [0.5, 1 / 3, -2.0, float("nan"), 1e30])
@pytest.mark.parametrize("code", SCALED, ids=lambda code: code.name)
def test_factors_act_as_on_the_host(code: Code, factor: float) -> None:
    counts = [33, 5000, 4]
    values = [bits(code, n, i) for i, n in enumerate(counts)]
    packed = OnGpu(values, counts, code, factor=factor, shifts=[0, 1, 0])
    parts = packed.parts
    with np.errstate(all="ignore"):
        for part, value in zip(parts, values, strict=True):
            same_numbers(part, scaled(value, code, factor))
        for got, part in zip(packed.unpack(factor), parts, strict=True):
            same_numbers(got, scaled(part, code, factor))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("code", [Code.FLOAT16, Code.FLOAT32, Code.INT64, Code.UINT8])
def test_a_missing_tensor_is_neutral(code: Code, op: ReduceOp) -> None:
    packed = OnGpu([None, bits(code, 3, 1), None], [9, 3, 70], code, op=op)
    for part, count in ((packed.parts[0], 9), (packed.parts[2], 70)):
        want = np.empty(count, DTYPES[code])
        _fusion.fill(address(want), count, code, op)
        same_bits(part, want)


def test_large_tensors() -> None:
    counts = [20_000_000, 9_000_001, 10]
    values = [bits(Code.FLOAT32, n, i) for i, n in enumerate(counts)]
    packed = OnGpu(values, counts, Code.FLOAT32, shifts=[0, 1, 0])
    for part, value in zip(packed.parts, values, strict=True):
        same_bits(part, value)
    for got, value in zip(packed.unpack(), values, strict=True):
        same_bits(got, value)
