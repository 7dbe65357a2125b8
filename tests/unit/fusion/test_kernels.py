"""Every kernel compared with numpy bit by bit; a NaN matches any NaN.

The comparison therefore covers subnormals, signed zeros, infinities and the order of a sum.
"""

from __future__ import annotations

import itertools
import math
import threading
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from pyhvd import _fusion
from pyhvd.dtypes import BY_CODE, Code, ReduceOp

Array = np.ndarray[Any, Any]

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {code: BF16 if code is Code.BFLOAT16 else np.dtype(BY_CODE[code].name) for code in Code}
BITWISE = {ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor}
HALVES = (Code.FLOAT16, Code.BFLOAT16)
FLOATS = (*HALVES, Code.FLOAT32, Code.FLOAT64)
COMPLEX = (Code.COMPLEX64, Code.COMPLEX128)
INTEGERS = tuple(code for code in Code if DTYPES[code].kind in "iu")
PAIRS = [(code, op) for code in Code for op in ReduceOp if op in BY_CODE[code].ops - {ReduceOp.ADASUM}]
SIZES = (0, 1, 7, 64, 1000, 4099)
SCALABLE = tuple(code for code in Code if BY_CODE[code].scalable)

quick = settings(max_examples=60, deadline=None)
each_pair = pytest.mark.parametrize(("code", "op"), PAIRS, ids=lambda value: value.name)


@pytest.fixture(autouse=True)
def _no_float_warnings() -> Any:
    with np.errstate(all="ignore"):
        yield


def unaligned(array: Array) -> Array:
    """Return a copy at an odd address."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = 1 - raw.ctypes.data % 2
    copy = raw[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def values(code: Code, count: int, seed: int) -> Array:
    """Return random values: a third are arbitrary bits, and so all special values; the rest are moderate."""
    rng = np.random.default_rng([seed, int(code)])
    dtype = DTYPES[code]
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    bits = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    if code in INTEGERS:
        return bits
    tame = rng.normal(size=count) + (1j * rng.normal(size=count) if code in COMPLEX else 0)
    return np.where(rng.random(count) < 1 / 3, bits, tame.astype(dtype))


def addresses(*arrays: Array) -> Array:
    return np.array([array.ctypes.data for array in arrays], np.int64)


def parts(array: Array) -> Array:
    """Return complex numbers as pairs of reals."""
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def same(got: Array, want: Array) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    got, want = parts(np.ascontiguousarray(got)), parts(np.ascontiguousarray(want))
    word = f"u{got.dtype.itemsize}"
    both_nan = (got != got) & (want != want)
    wrong = np.flatnonzero(~both_nan & (got.view(word) != want.view(word)))
    assert wrong.size == 0, f"at {wrong[:5]}: got {got[wrong[:5]]}, want {want[wrong[:5]]}"


def wide(code: Code) -> np.dtype[Any]:
    return np.dtype(np.float32) if code in HALVES else DTYPES[code]


def want_scaled(array: Array, factor: float) -> Array:
    """Return an array times a factor, computed by numpy; not for 16-bit floats."""
    if factor == 1.0:
        return array.copy()
    if array.dtype.kind in "iu":
        info = np.iinfo(array.dtype)
        products = (array.astype(np.float64) * factor).tolist()
        whole = [0 if math.isnan(x) else info.max if x > info.max else max(x, info.min) for x in products]
        return np.array([min(int(x), info.max) for x in whole], array.dtype)
    real = parts(array)
    scaled: Array = real * real.dtype.type(factor)
    return scaled.view(array.dtype)


def combine(op: ReduceOp, x: Array, y: Array) -> Array:
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if x.dtype.kind == "f":
            # numpy does not define which zero it returns; the kernels return -0.0 for MIN and +0.0 for MAX.
            lower = op is ReduceOp.MIN
            zeros = np.signbit(x) | np.signbit(y) if lower else np.signbit(x) & np.signbit(y)
            result = np.minimum(x, y) if lower else np.maximum(x, y)
            return np.where((x == 0) & (y == 0), np.where(zeros, -0.0, 0.0).astype(x.dtype), result)
        return np.minimum(x, y) if op is ReduceOp.MIN else np.maximum(x, y)
    if op in BITWISE:
        both: Array = BITWISE[op](x, y)
        return both
    if op is not ReduceOp.PRODUCT:
        return x + y
    if x.dtype.kind == "c":
        real = x.real * y.real - x.imag * y.imag
        imag = x.real * y.imag + x.imag * y.real
        return np.stack([real, imag], axis=-1).reshape(-1).view(x.dtype)
    return x * y


def want_reduced(code: Code, op: ReduceOp, sources: list[Array], factor: float) -> Array:
    if len(sources) == 1 and factor == 1.0:
        return sources[0].copy()
    result = sources[0].astype(wide(code))
    for source in sources[1:]:
        result = combine(op, result, source.astype(wide(code)))
    return want_scaled(result, factor).astype(DTYPES[code])


def reduced(
    code: Code, op: ReduceOp, sources: list[Array], factor: float = 1.0, out: Array | None = None
) -> Array:
    target = np.empty_like(sources[0]) if out is None else out
    _fusion.reduce(target.ctypes.data, addresses(*sources), target.size, int(code), int(op), factor)
    return target


def cast(array: Array, source: Code, target: Code) -> Array:
    result = unaligned(np.zeros(array.size, DTYPES[target]))
    _fusion.cast(result.ctypes.data, int(target), array.ctypes.data, int(source), array.size)
    return result


# ---- reduce


@each_pair
def test_reduce(code: Code, op: ReduceOp) -> None:
    factors = (1.0, 0.3, -2.5) if BY_CODE[code].scalable else (1.0,)
    for p, count, factor in itertools.product((1, 2, 3, 5), SIZES, factors):
        sources = [values(code, count, seed) for seed in range(p)]
        same(reduced(code, op, sources, factor), want_reduced(code, op, sources, factor))


@each_pair
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_reduce_into_any_source_at_odd_addresses(code: Code, op: ReduceOp, p: int) -> None:
    factor = 0.25 if BY_CODE[code].scalable else 1.0
    plain = [values(code, 4099, seed) for seed in range(p)]
    want = want_reduced(code, op, plain, factor)
    for k in range(p):
        sources = [unaligned(array) for array in plain]
        same(reduced(code, op, sources, factor, out=sources[k]), want)
        for j in set(range(p)) - {k}:
            assert sources[j].tobytes() == plain[j].tobytes(), "another source was written to"


@each_pair
def test_reduce_one_array_with_itself_in_place(code: Code, op: ReduceOp) -> None:
    array = values(code, 1000, 3)
    want = want_reduced(code, op, [array, array], 1.0)
    same(reduced(code, op, [array, array], out=array), want)


@pytest.mark.parametrize("code", [c for c in Code if DTYPES[c].kind != "b"], ids=lambda c: c.name)
@given(data=st.data())
@quick
def test_reduce_any_bits(code: Code, data: st.DataObject) -> None:
    ops = sorted(BY_CODE[code].ops - {ReduceOp.ADASUM})
    op = data.draw(st.sampled_from(ops))
    factor = data.draw(st.sampled_from([1.0, 0.5, 1 / 3, -7.0, 0.0, math.inf]))
    word = np.dtype(f"u{parts(np.empty(0, DTYPES[code])).dtype.itemsize}")
    count, p = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    lanes = count * DTYPES[code].itemsize // word.itemsize
    sources = [data.draw(hnp.arrays(word, lanes)).view(DTYPES[code]) for _ in range(p)]
    same(reduced(code, op, sources, factor), want_reduced(code, op, sources, factor))


@pytest.mark.parametrize("code", FLOATS, ids=lambda c: c.name)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda o: o.name)
def test_min_and_max_do_not_depend_on_the_order(code: Code, op: ReduceOp) -> None:
    special = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0**-20], DTYPES[code])
    sources = [np.array(column) for column in np.stack(np.meshgrid(*[special] * 3)).reshape(3, -1)]
    first = reduced(code, op, sources)
    for order in itertools.permutations(sources):
        same(reduced(code, op, list(order)), first)
    assert np.array_equal(np.isnan(first), np.isnan(np.stack(sources).astype(np.float64)).any(axis=0))


def test_half_sums_round_once() -> None:
    # 2048 + 1 is no float16: rounded after each step, the sum would stay at 2048.
    sources = [np.array([x], np.float16) for x in (2048, 1, 1)]
    assert reduced(Code.FLOAT16, ReduceOp.SUM, sources)[0] == 2050
    # The sum alone would be infinite, its half is not.
    sources = [np.array([65504], np.float16)] * 2
    assert reduced(Code.FLOAT16, ReduceOp.SUM, sources, 0.5)[0] == 65504


def test_products_are_not_fused_with_sums() -> None:
    # Fused operations would leave a rounding error in the real part. Many elements reach the vector loop.
    array = np.full(100, complex(1 + 2.0**-12, 1 + 2.0**-12), np.complex64)
    assert not reduced(Code.COMPLEX64, ReduceOp.PRODUCT, [array, array]).real.any()


@pytest.mark.parametrize("op", sorted(BY_CODE[Code.BOOL].ops), ids=lambda o: o.name)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_any_nonzero_byte_is_true(op: ReduceOp, p: int) -> None:
    rng = np.random.default_rng(p)
    raw = [(rng.integers(0, 256, 700) * (rng.random(700) < 0.7)).astype(np.uint8) for _ in range(p)]
    truth = np.stack(raw) != 0
    want = truth.any(axis=0) if op in (ReduceOp.MAX, ReduceOp.BOR) else truth.all(axis=0)
    if op is ReduceOp.BXOR:
        want = np.logical_xor.reduce(truth)
    assert np.array_equal(reduced(Code.BOOL, op, raw), want.astype(np.uint8))


# ---- fill


@each_pair
def test_neutral_changes_no_bit(code: Code, op: ReduceOp) -> None:
    dtype = DTYPES[code]
    if code in HALVES:
        array = np.arange(65536, dtype=np.uint16).view(dtype)
    elif code in COMPLEX and op is ReduceOp.PRODUCT:
        array = np.array([1 + 2j, -3.5j, 0, 1e-3], dtype)  # see fill: not for infinities
    else:
        array = values(code, 4099, 1)
    neutral = unaligned(values(code, array.size, 2))
    _fusion.fill(neutral.ctypes.data, neutral.size, int(code), int(op))
    for sources in ([array, neutral], [neutral, array], [neutral, array, neutral]):
        got = reduced(code, op, sources)
        if code in COMPLEX and op is ReduceOp.PRODUCT:
            assert np.array_equal(got, array)
        else:
            same(got, array)


def test_neutral_of_a_sum_is_minus_zero() -> None:
    array = np.ones(3, np.complex128)
    _fusion.fill(array.ctypes.data, 3, int(Code.COMPLEX128), int(ReduceOp.AVERAGE))
    assert np.signbit(array.view(np.float64)).all()
    assert not array.any()


# ---- scale


@pytest.mark.parametrize("code", SCALABLE, ids=lambda c: c.name)
def test_scale(code: Code) -> None:
    for count, factor in itertools.product(SIZES, (1.0, 1 / 3, -1.5, 1e30, 0.0, math.nan, -math.inf)):
        source = unaligned(values(code, count, 5))
        want = source.copy() if factor == 1.0 else want_scaled(source.astype(wide(code)), factor)
        target = unaligned(np.zeros_like(source))
        _fusion.scale(target.ctypes.data, source.ctypes.data, count, int(code), factor)
        same(target, want.astype(DTYPES[code]))
        _fusion.scale(source.ctypes.data, source.ctypes.data, count, int(code), factor)
        assert source.tobytes() == target.tobytes(), "in place differs"


@pytest.mark.parametrize("code", INTEGERS, ids=lambda c: c.name)
def test_integers_truncate_and_saturate(code: Code) -> None:
    info = np.iinfo(DTYPES[code])
    array = np.array([7, info.max, info.min, 0, 1], info.dtype)

    def scaled(factor: float) -> list[int]:
        result = np.empty_like(array)
        _fusion.scale(result.ctypes.data, array.ctypes.data, array.size, int(code), factor)
        return list(map(int, result))

    assert scaled(0.5)[0] == 3
    assert scaled(-0.5)[0] == (-3 if info.min else 0)
    assert scaled(2.0)[1:3] == [info.max, info.min]
    assert scaled(-2.0)[1:3] == [info.min, info.max if info.min else 0]
    assert scaled(math.inf) == [info.max, info.max, info.min, 0, info.max]  # 0 * inf is NaN
    assert scaled(math.nan) == [0] * 5
    assert scaled(1.0) == [7, info.max, info.min, 0, 1]


def test_sums_and_products_of_integers_wrap() -> None:
    for code in INTEGERS:
        top = np.full(3, np.iinfo(DTYPES[code]).max, DTYPES[code])
        same(reduced(code, ReduceOp.SUM, [top, top]), top + top)
        same(reduced(code, ReduceOp.PRODUCT, [top, top]), top * top)


# ---- cast


def nearest(x: float, target: np.dtype[Any]) -> Array:
    """Return the nearest value of a type; of two equally near values, the even one."""
    if math.isnan(x) or math.isinf(x):
        return np.array(x).astype(target)
    ladder = np.arange(0, 0x8000, dtype=np.uint16).view(target).astype(np.float64)
    finite = ladder[np.isfinite(ladder)]
    high = int(np.searchsorted(finite, abs(x)))
    steps = [Fraction(float(step)) for step in finite[max(high - 1, 0) : high + 1]]
    if high == finite.size:  # past the largest: infinity takes the place of the next step
        steps.append(2 * steps[0] - Fraction(float(finite[-2])))
    first = max(high - 1, 0)
    distances = [(abs(abs(Fraction(x)) - step), (first + k) % 2, first + k) for k, step in enumerate(steps)]
    bits = min(distances)[2] | (0x8000 if math.copysign(1, x) < 0 else 0)
    return np.array(bits, np.uint16).view(target)


def near_ties(target: np.dtype[Any]) -> Array:
    """Return values halfway between neighbours, and one float64 step to either side."""
    ladder = np.arange(0, 0x7C00 if target != BF16 else 0x7F80, 37, dtype=np.uint16)
    ladder = np.append(ladder, [1, 2, 3, 0x3FF, 0x400, 0x401, 0x7F, 0x80, 0x81]).astype(np.uint16)
    low, high = ladder.view(target).astype(np.float64), (ladder + 1).view(target).astype(np.float64)
    ties = (low + high)[np.isfinite(high)] / 2
    return np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf), -ties])


@pytest.mark.parametrize("code", HALVES, ids=lambda c: c.name)
@pytest.mark.parametrize("other", [Code.FLOAT32, Code.FLOAT64], ids=lambda c: c.name)
def test_cast_every_half(code: Code, other: Code) -> None:
    array = np.arange(65536, dtype=np.uint16).view(DTYPES[code])
    widened = cast(array, code, other)
    same(widened, array.astype(DTYPES[other]))
    same(cast(widened, other, code), array)


@pytest.mark.parametrize("code", HALVES, ids=lambda c: c.name)
def test_cast_float32_to_half(code: Code) -> None:
    rng = np.random.default_rng(8)
    array = np.concatenate(
        [
            rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32),
            (rng.normal(size=200_000) * 2.0 ** rng.integers(-30, 20, 200_000)).astype(np.float32),
            near_ties(DTYPES[code]).astype(np.float32),
            np.array([65504, 65519.996, 65520, 2.0**-24, 2.0**-25, -(2.0**-25), 3.4e38], np.float32),
        ]
    )
    same(cast(array, Code.FLOAT32, code), array.astype(DTYPES[code]))


@pytest.mark.parametrize("code", HALVES, ids=lambda c: c.name)
def test_cast_float64_to_half_rounds_once(code: Code) -> None:
    dtype = DTYPES[code]
    array = np.concatenate(
        [
            near_ties(dtype),
            [
                0.0,
                -0.0,
                math.nan,
                math.inf,
                -math.inf,
                1e300,
                -1e300,
                5e-324,
                1e-300,
                65519.9999999999,
                65520.0,
            ],
            [3.3961775292304957e38, np.nextafter(3.3961775292304957e38, 0), 3.3895313892515355e38, 2.0**-134],
        ]
    )
    same(cast(array, Code.FLOAT64, code), np.array([nearest(x, dtype) for x in array.tolist()]))


@pytest.mark.parametrize("code", HALVES, ids=lambda c: c.name)
@given(array=hnp.arrays(np.uint64, st.integers(1, 30)))
@quick
def test_cast_any_float64_to_half(code: Code, array: Array) -> None:
    # Arbitrary bits, and the same values scaled into the range of the 16-bit floats.
    x = array.view(np.float64)
    x = np.concatenate([x, np.where(np.isfinite(x), np.frexp(x)[0] * 2.0 ** (array % 50 - 30.0), x)])
    want = np.array([nearest(value, DTYPES[code]) for value in x.tolist()])
    same(cast(x, Code.FLOAT64, code), want)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FLOATS, 2)), ids=lambda c: c.name)
def test_cast_sizes_and_odd_addresses(source: Code, target: Code) -> None:
    for count in SIZES:
        array = unaligned(values(source, count, 4))
        middle = array.astype(np.float32) if source in HALVES else array
        if source is Code.FLOAT64 and target is Code.BFLOAT16:  # ml_dtypes rounds twice here
            want = np.array([nearest(x, BF16) for x in array[:64].tolist()], BF16)
            same(cast(array, source, target)[:64], want)
        else:
            same(cast(array, source, target), middle.astype(DTYPES[target]))


@pytest.mark.parametrize("path", _fusion._f16_paths())
def test_float16_paths_agree(path: str) -> None:
    rng = np.random.default_rng(9)
    halves = np.arange(65536, dtype=np.uint16)
    floats = np.concatenate(
        [
            rng.integers(0, 2**32, 300_000, dtype=np.uint32),
            near_ties(np.dtype(np.float16)).astype(np.float32).view(np.uint32),
            np.arange(0x7F800000, 0x7F900000, 97, dtype=np.uint32),
        ]
    )
    for count in (halves.size, 1, 7, 9, 31):
        got, want = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        _fusion._f16_widen(path, got.ctypes.data, halves[-count:].ctypes.data, count)
        _fusion._f16_widen("portable", want.ctypes.data, halves[-count:].ctypes.data, count)
        assert np.array_equal(got, want)  # NaN included
    for count in (floats.size, 1, 7, 9, 31):
        small, expected = np.zeros(count, np.uint16), np.zeros(count, np.uint16)
        _fusion._f16_narrow(path, small.ctypes.data, floats[:count].ctypes.data, count)
        _fusion._f16_narrow("portable", expected.ctypes.data, floats[:count].ctypes.data, count)
        assert np.array_equal(small, expected)


def test_isa_is_the_best_path() -> None:
    assert _fusion.isa() == _fusion._f16_paths()[-1]


# ---- pack and unpack


@each_pair
def test_pack_and_unpack(code: Code, op: ReduceOp) -> None:
    factor = 0.5 if BY_CODE[code].scalable and op is not ReduceOp.MIN else 1.0
    counts = np.array([3, 0, 1000, 1, 64, 4099], np.int64)
    pieces = [unaligned(values(code, int(count), k)) for k, count in enumerate(counts)]
    ptrs = addresses(*pieces)
    ptrs[[2, 1]] = 0  # joined
    neutral = np.empty(1000, DTYPES[code])
    _fusion.fill(neutral.ctypes.data, 1000, int(code), int(op))
    want = [neutral if k == 2 else scaled_copy(code, piece, factor) for k, piece in enumerate(pieces)]

    buffer = unaligned(np.zeros(int(counts.sum()), DTYPES[code]))
    _fusion.pack(buffer.ctypes.data, ptrs, counts, int(code), int(op), factor)
    assert buffer.tobytes() == b"".join(array.tobytes() for array in want)

    kept = pieces[2].tobytes()
    for piece in (*pieces[:2], *pieces[3:]):
        piece[:] = np.zeros_like(piece)
    _fusion.unpack(buffer.ctypes.data, ptrs, counts, int(code))
    assert pieces[2].tobytes() == kept, "a skipped piece was written to"
    for k in (0, 3, 4, 5):
        assert pieces[k].tobytes() == want[k].tobytes()


def scaled_copy(code: Code, array: Array, factor: float) -> Array:
    result = np.empty_like(array)
    _fusion.scale(result.ctypes.data, array.ctypes.data, array.size, int(code), factor)
    return result


def test_pack_nothing() -> None:
    empty = np.empty(0, np.int64)
    _fusion.pack(0, empty, empty, int(Code.FLOAT32))
    _fusion.unpack(0, empty, empty, int(Code.FLOAT32))


def test_threads() -> None:
    """Large calls release the GIL, and are correct when several threads run them at once."""
    results: dict[int, Array] = {}
    sources = [values(Code.FLOAT16, 50_000, seed) for seed in range(3)]

    def work(k: int) -> None:
        for _ in range(20):
            results[k] = reduced(Code.FLOAT16, ReduceOp.SUM, sources, 0.5)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = want_reduced(Code.FLOAT16, ReduceOp.SUM, sources, 0.5)
    assert len(results) == 4
    for got in results.values():
        same(got, want)
