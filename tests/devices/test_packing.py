"""Compare the packing kernels, compiled for the CPU, with numpy and the host kernels."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pyhvd import _fusion
from pyhvd.arrays import address
from pyhvd.devices import pack_plan, packing
from pyhvd.devices.pack_plan import ALIGNMENT, EACH, LARGE, THREADS, lay_out, make_tiles
from pyhvd.devices.packing import KernelPacker, kernel_type
from pyhvd.dtypes import BY_CODE, Code, ReduceOp
from tests.devices.fake import FakeDevice, FakeEvent
from tests.devices.kernels_on_cpu import SOURCE, compiler_of, needs_compiler

Array = np.ndarray[Any, Any]

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {code: BF16 if code is Code.BFLOAT16 else np.dtype(BY_CODE[code].name) for code in Code}
SCALED = [code for code in Code if BY_CODE[code].scalable]
GUARD = 0xA5
"""The bytes around tensors and buffers, which must not change."""


def aligned_bytes(nbytes: int, shift: int = 0) -> Array:
    """Memory ``shift`` bytes after a multiple of 16, with guards on both sides."""
    raw = np.full(nbytes + 64 + shift, GUARD, np.uint8)
    start = 16 + -address(raw) % 16 + shift
    return raw[start : start + nbytes]


def guards_hold(part: Array) -> bool:
    raw = part.base
    assert isinstance(raw, np.ndarray)
    start = address(part) - address(raw)
    return bool((raw[:start] == GUARD).all() and (raw[start + part.nbytes :] == GUARD).all())


def tensor(values: Array, shift: int) -> Array:
    """A copy, ``shift`` elements after a multiple of 16 bytes."""
    part = aligned_bytes(values.nbytes, shift * values.itemsize)
    part[:] = values.view(np.uint8)
    return part.view(values.dtype)


def bits(code: Code, count: int, seed: int) -> Array:
    """Any bits, including NaNs, subnormals and infinities."""
    rng = np.random.default_rng([seed, code])
    raw = rng.integers(0, 2 if code is Code.BOOL else 256, count * DTYPES[code].itemsize, np.uint8)
    return raw.view(DTYPES[code])


def words(numbers: Sequence[int]) -> Array:
    return np.array(numbers, np.int64)


def finish(device: FakeDevice) -> None:
    """Wait for the default stream's queued work."""
    event = device.make_event()
    device.record(event, 0)
    device.synchronize(event)


class Packed:
    """Tensors of the given counts, which the kernels pack into a buffer."""

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
        self.device = FakeDevice(seed=len(counts))
        self.packer = KernelPacker(self.device, compiler_of(self.device))
        self.code = code
        self.counts = words(counts)
        self.offsets, self.total = lay_out(counts, BY_CODE[code].itemsize)
        shifts = shifts or [0] * len(counts)
        self.tensors = [v if v is None else tensor(v, s) for v, s in zip(values, shifts, strict=True)]
        self.memory = aligned_bytes(self.total * BY_CODE[code].itemsize)
        self.packer.pack(
            address(self.memory), self.offsets, self._addresses(), self.counts, code, op, factor, 0
        )
        finish(self.device)
        assert guards_hold(self.memory)

    def _addresses(self) -> Array:
        return words([0 if each is None else address(each) for each in self.tensors])

    @property
    def parts(self) -> list[Array]:
        """The part of the buffer of each tensor."""
        buffer = self.memory.view(DTYPES[self.code])
        return [buffer[o : o + n] for o, n in zip(self.offsets, self.counts, strict=True)]

    def gaps(self) -> Array:
        """Return the buffer's bytes that belong to no tensor."""
        mine = np.zeros(self.memory.nbytes, bool)
        item = BY_CODE[self.code].itemsize
        for offset, count in zip(self.offsets, self.counts, strict=True):
            mine[offset * item : (offset + count) * item] = True
        return self.memory[~mine]

    def unpack(self, factor: float = 1.0) -> None:
        """Unpack the buffer into the same tensors."""
        self.packer.unpack(
            address(self.memory),
            self.offsets,
            self._addresses(),
            self.counts,
            self.code,
            factor,
            0,
        )
        finish(self.device)
        for each in self.tensors:
            assert each is None or guards_hold(each)


def same_bits(got: Array, want: Array) -> None:
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


def same_numbers(got: Array, want: Array) -> None:
    """Compare bits; any NaN equals any other."""
    real = got.real.dtype
    got, want = got.view(real), want.view(real)
    word = f"u{real.itemsize}"
    wrong = np.flatnonzero(~((got != got) & (want != want)) & (got.view(word) != want.view(word)))
    assert not wrong.size, f"at {wrong[:4]}: got {got[wrong[:4]]}, want {want[wrong[:4]]}"


def scaled(values: Array, code: Code, factor: float) -> Array:
    """Pack by the host's kernels."""
    out = np.empty_like(values)
    _fusion.scale(address(out), address(values), len(values), code, factor)
    return out


tensors = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 3)), min_size=1, max_size=30)


@needs_compiler
@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_bits_go_in_and_out_as_they_are(code: Code) -> None:
    counts = [1, 0, 7, 64, 1000, 3, 8192, 15, 2]
    values = [bits(code, n, i) for i, n in enumerate(counts)]
    packed = Packed(values, counts, code, shifts=[0, 1, 0, 1, 2, 3, 0, 1, 0])
    for part, value in zip(packed.parts, values, strict=True):
        same_bits(part, value)
    assert not packed.gaps().any()
    for each in packed.tensors:
        assert each is not None
        each.view(np.uint8)[:] = 0
    packed.unpack()
    for each, value in zip(packed.tensors, values, strict=True):
        assert each is not None
        same_bits(each, value)


@needs_compiler
@settings(max_examples=60)
@given(tensors=tensors, data=st.data())
def test_any_tensors_anywhere(tensors: list[tuple[int, int]], data: st.DataObject) -> None:
    counts, shifts = [n for n, _ in tensors], [s for _, s in tensors]
    joined = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    values = [None if i in joined else bits(Code.INT32, n, i) for i, n in enumerate(counts)]
    packed = Packed(values, counts, Code.INT32, op=ReduceOp.MIN, shifts=shifts)
    for part, value, count in zip(packed.parts, values, counts, strict=True):
        same_bits(part, np.full(count, np.iinfo(np.int32).max, np.int32) if value is None else value)
    packed.memory.view(np.int32)[:] += 1
    packed.unpack()
    for each, value in zip(packed.tensors, values, strict=True):
        if each is not None and value is not None:
            same_bits(each, value + np.int32(1))


@needs_compiler
@pytest.mark.parametrize("code", SCALED, ids=lambda code: code.name)
@pytest.mark.parametrize("factor", [0.5, 1 / 3, -2.0, float("nan"), 1e30])
def test_factors_act_as_in_the_kernels_of_the_host(code: Code, factor: float) -> None:
    counts = [33, 500, 4]
    values = [bits(code, n, i) for i, n in enumerate(counts)]
    packed = Packed(values, counts, code, factor=factor, shifts=[0, 1, 0])
    with np.errstate(all="ignore"):
        for part, value in zip(packed.parts, values, strict=True):
            same_numbers(part, scaled(value, code, factor))
    before = [part.copy() for part in packed.parts]
    packed.unpack(factor)
    for each, part in zip(packed.tensors, before, strict=True):
        assert each is not None
        same_numbers(each, scaled(part, code, factor))


@needs_compiler
@pytest.mark.parametrize("half", [Code.FLOAT16, Code.BFLOAT16], ids=lambda code: code.name)
@pytest.mark.parametrize("factor", [0.5, 1.5, 1 / 3, 1025 / 1024])  # some products are ties
def test_every_16_bit_float_is_rounded_as_on_the_host(half: Code, factor: float) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[half])
    (got,) = Packed([every], [1 << 16], half, factor=factor).parts
    with np.errstate(all="ignore"):
        same_numbers(got, scaled(every, half, factor))


@needs_compiler
@pytest.mark.parametrize(
    ("code", "op"),
    [(c, o) for c in Code for o in ReduceOp if o in BY_CODE[c].ops - {ReduceOp.ADASUM, ReduceOp.AVERAGE}],
    ids=lambda value: value.name,
)
def test_a_missing_tensor_is_neutral(code: Code, op: ReduceOp) -> None:
    packed = Packed([None, bits(code, 3, 1), None], [9, 3, 70], code, op=op)
    for part, count in ((packed.parts[0], 9), (packed.parts[2], 70)):
        want = np.empty(count, DTYPES[code])
        _fusion.fill(address(want), count, code, op)
        same_bits(part, want)
    packed.unpack()  # nothing is written without a tensor


@needs_compiler
def test_large_tensors_take_the_short_way() -> None:
    """Each thread has several vectors; the second tensor is misaligned, and the third is small."""
    counts = [4 * LARGE, 4 * LARGE // 2, 10]
    values = [bits(Code.FLOAT32, n, i) for i, n in enumerate(counts)]
    packed = Packed(values, counts, Code.FLOAT32, shifts=[0, 1, 0])
    for part, value in zip(packed.parts, values, strict=True):
        same_bits(part, value)
    packed.memory.view(np.uint32)[:] ^= 1
    packed.unpack()
    for each, value in zip(packed.tensors, values, strict=True):
        assert each is not None
        same_bits(each.view(np.uint32), value.view(np.uint32) ^ 1)


@needs_compiler
def test_blocks_of_ranks_with_gaps_between_them() -> None:
    """A reducescatter has offsets with gaps, which do not start at 0."""
    device = FakeDevice()
    packer = KernelPacker(device, compiler_of(device))
    memory = aligned_bytes(4 * 4096)
    values = [bits(Code.FLOAT32, n, n) for n in (5, 100, 1)]
    offsets, counts = words([8, 512, 2048]), words([5, 100, 1])
    addresses = words([address(value) for value in values])
    packer.pack(address(memory), offsets, addresses, counts, Code.FLOAT32, ReduceOp.SUM, 1.0, 0)
    finish(device)
    buffer = memory.view(np.float32)
    assert (memory[:32] == GUARD).all()
    for offset, value in zip(offsets, values, strict=True):
        same_bits(buffer[offset : offset + len(value)], value)


@settings(max_examples=100)
@given(
    counts=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 20_000)), max_size=40),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)
def test_every_vector_is_found_in_its_tile(counts: list[int], itemsize: int) -> None:
    offsets, total = lay_out(counts, itemsize)
    made = make_tiles(offsets, words(range(1, len(counts) + 1)), words(counts), itemsize)
    held = [i for i, count in enumerate(counts) if count]
    entries = made.table[: made.firsts].view(pack_plan._ENTRY)
    firsts = made.table[made.firsts :].view(np.int32)
    assert list(entries["address"]) == [i + 1 for i in held]
    assert made.vectors * ALIGNMENT == total * itemsize
    each = THREADS * EACH[made.suffix]
    assert made.blocks == len(firsts) - 1 == -(-made.vectors // each)
    owners = np.repeat(np.arange(len(held)), [-(-counts[i] * itemsize // ALIGNMENT) for i in held])
    for block in range(made.blocks):
        in_tile = owners[block * each : (block + 1) * each]
        assert firsts[block] == in_tile[0]
        assert firsts[block + 1] >= in_tile[-1]


def test_many_vectors_are_several_for_each_thread() -> None:
    for vectors, suffix in ((LARGE - 1, "small"), (LARGE, "large")):
        made = make_tiles(words([0]), words([16]), words([vectors * 4]), 4)
        assert (made.suffix, made.blocks) == (suffix, -(-vectors // (THREADS * EACH[suffix])))


def test_nothing_is_launched_for_empty_tensors() -> None:
    def never(name: str) -> packing.Launch:
        raise AssertionError

    packer = KernelPacker(FakeDevice(), never)
    none = words([0, 0]), words([0, 64]), words([0, 0])
    packer.pack(0, *none, Code.FLOAT32, ReduceOp.SUM, 1.0, 0)


class LateDevice(FakeDevice):
    """Runs no work until a thread waits; counts tables."""

    tables = 0

    def _stir(self) -> None:
        pass

    def has_passed(self, event: FakeEvent) -> bool:
        return event.passed >= event.recorded

    def allocate_pinned(self, nbytes: int) -> Array:
        self.tables += 1
        return super().allocate_pinned(nbytes)


def test_tables_are_used_again_once_their_kernels_have_run() -> None:
    device = LateDevice()
    launched: list[str] = []

    def compile_nothing(name: str) -> packing.Launch:
        return lambda name, blocks, arguments, stream: launched.append(name)

    packer = KernelPacker(device, compile_nothing)

    def unpack() -> None:
        packer.unpack(0, words([0]), words([64]), words([3]), Code.FLOAT32, 1.0, 0)

    unpack()
    unpack()
    assert device.tables == 2  # the first table's kernel may still read it
    finish(device)
    unpack()
    unpack()
    assert device.tables == 2
    finish(device)
    waited = device.synchronized
    for _ in range(packing.KEPT_TABLES + 2):
        unpack()
    assert (device.tables, device.synchronized) == (packing.KEPT_TABLES + 2, waited), "nobody waits"
    finish(device)
    for _ in range(packing.KEPT_TABLES + 1):  # with two kernels queued, a further table is needed
        unpack()
    assert device.tables == packing.KEPT_TABLES + 3
    assert launched == ["pyhvd_unpack_small"] * (2 * packing.KEPT_TABLES + 7)


def test_a_dtype_without_arithmetic_is_not_scaled() -> None:
    with pytest.raises(ValueError, match=r"^bool cannot be multiplied by 2\.0$"):
        kernel_type(Code.BOOL, 2.0)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc to compile the kernels for GPUs")
@pytest.mark.parametrize("name", ["FLOAT16", "BFLOAT16", "FLOAT32", "FLOAT64"])
def test_subnormals_survive_a_compiler_that_flushes_them(tmp_path: Path, name: str) -> None:
    target = tmp_path / "kernels.ptx"
    flags = ("-x", "cu", "-ptx", "-ftz=true", "--std=c++14", f"-DPYHVD_TYPE={name}")
    command = ["nvcc", *flags, str(SOURCE), "-o", str(target)]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    assert ".ftz" not in target.read_text()
