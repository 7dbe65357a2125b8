"""Arrays of every kind that pyhvd accepts, and the errors for those that it rejects."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.arrays import TensorView, address, flat_bytes, view
from pyhvd.dtypes import Code
from pyhvd.errors import UnsupportedDtypeError
from pyhvd.testing import run_ranks

BASE = np.arange(24, dtype=np.float32).reshape(4, 6)

CONTIGUOUS: dict[str, Callable[[], Any]] = {
    "plain": lambda: BASE.copy(),
    "rows": lambda: BASE.copy()[1:3],
    "0-d": lambda: np.array(3.5),
    "empty": lambda: np.empty((0, 5), np.int32),
    "empty inside": lambda: np.empty((3, 0, 2), np.int8),
    "one column": lambda: BASE.copy()[:, :1][:1],
    "unaligned": lambda: np.frombuffer(bytearray(13), np.uint8)[1:].view(np.int32),
    "subclass": lambda: BASE.copy().view(np.recarray),
    "bfloat16": lambda: BASE.astype(ml_dtypes.bfloat16),
}
STRIDED: dict[str, Callable[[], Any]] = {
    "columns": lambda: BASE.copy()[:, ::2],
    "backwards": lambda: BASE.copy()[::-1],
    "transposed": lambda: BASE.copy().T,
    "fortran": lambda: np.asfortranarray(BASE),
    "moved axes": lambda: np.moveaxis(np.arange(24.0).reshape(2, 3, 4), 0, 2),
    "field": lambda: np.zeros(4, [("a", "i4"), ("b", "f8")])["b"],
    "strided bfloat16": lambda: BASE.astype(ml_dtypes.bfloat16)[:, 1::2],
}


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_a_contiguous_array_is_viewed_without_a_copy(kind: str) -> None:
    array = CONTIGUOUS[kind]()
    seen = view(array)
    assert seen.home is None
    assert type(seen.array) is np.ndarray
    assert seen.ptr == address(array)
    assert (seen.shape, seen.count, seen.nbytes) == (array.shape, array.size, array.nbytes)
    assert seen.device == "cpu"
    assert seen.bytes.tobytes() == np.asarray(array).tobytes()
    assert seen.array.dtype == array.dtype


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_writing_in_place_reaches_the_callers_memory(kind: str) -> None:
    array = CONTIGUOUS[kind]()
    target = view(array, writing=True)
    target.bytes[:] = 1
    target.copy_home()
    assert set(np.asarray(array).tobytes()) <= {1}


class Units(np.ndarray):
    """A class of a program."""


def derived(kind: str, folder: Path) -> Any:
    """Return an array of 2 x 3 ones of a class that derives from numpy's."""
    ones: Any = np.ones((2, 3), np.float32)
    if kind == "memmap":
        mapped: Any = np.memmap(folder / "mapped", np.float32, "w+", shape=(2, 3))
        mapped[:] = 1
        return mapped
    if kind == "slanted":
        return np.asfortranarray(ones).view(Units)
    return ones.view(np.matrix if kind == "matrix" else Units)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("kind", ["matrix", "memmap", "Units", "slanted"])
def test_arrays_of_derived_classes(kind: str, tmp_path: Path) -> None:
    """Results are plain arrays; in place it is the array itself."""

    def body() -> None:
        given = derived(kind, tmp_path)
        for name in ("first", "again", "again"):
            for compression in (hvd.Compression.none, hvd.Compression.fp16):
                result = hvd.allreduce(given, op=hvd.Sum, name=name, compression=compression)
                assert (type(result), result.dtype) == (np.ndarray, np.float32)
                assert result.tolist() == [[1.0] * 3] * 2
            assert type(hvd.allgather(given, name=f"{name}.rows")) is np.ndarray
            assert hvd.allreduce_(given, op=hvd.Sum, name=name, prescale_factor=2.0) is given
            assert np.asarray(given).tolist() == [[2.0] * 3] * 2
            given[...] = 1

    run_ranks(1, body)


class Masked(np.ma.MaskedArray):
    """A class of a program."""


def test_masked_arrays_are_refused_by_every_verb() -> None:
    masked: Any = np.ma.masked_array(np.ones((2, 3), np.float32), [[True, False, False]] * 2)

    def body() -> None:
        for array in (masked, masked.view(Masked), np.ma.masked_array(np.ones(3)), masked[0, 0]):
            for call in (
                partial(hvd.allreduce, array),
                partial(hvd.allreduce, array, compression=hvd.Compression.fp16),
                partial(hvd.allreduce_, array),
                partial(hvd.grouped_allreduce, [np.ones(2), array]),
                partial(hvd.allgather, array),
                partial(hvd.broadcast, array, 0),
                partial(hvd.alltoall, array),
                partial(hvd.reducescatter, array),
            ):
                with pytest.raises(TypeError, match=r"lose its mask: pass array\.filled\(value\)"):
                    call()
        with pytest.raises(TypeError, match=r"mask would be lost: pass splits\.filled\(0\)"):
            hvd.alltoall(np.ones(2), splits=np.ma.masked_array([2], [True]))

    run_ranks(1, body)


@pytest.mark.parametrize("kind", STRIDED)
def test_a_strided_array_is_copied_and_copied_home(kind: str) -> None:
    array = STRIDED[kind]()
    before = array.copy()
    seen = view(array)
    assert seen.array.flags.c_contiguous
    assert seen.array.tobytes() == np.ascontiguousarray(array).tobytes()
    seen.bytes[:] = 1
    assert array.tobytes() == before.tobytes(), "the input is untouched until it is asked for"
    seen.copy_home()
    assert set(np.ascontiguousarray(array).tobytes()) == {1}
    target = view(array, writing=True)
    assert target.home is not None


def test_read_only_arrays_can_be_sent_but_not_be_targets() -> None:
    array = BASE.copy()
    array.flags.writeable = False
    assert view(array).ptr == address(array)
    for target in (array, array[:, ::2], np.broadcast_to(np.float32(1), (3,)), memoryview_of(b"12345678")):
        with pytest.raises(ValueError, match="needs a writable array, and this one is read-only"):
            view(target, writing=True)


def memoryview_of(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (True, Code.BOOL), (3, Code.INT64), (2.5, Code.FLOAT64), (1j, Code.COMPLEX128),
        (np.float32(1), Code.FLOAT32), (np.uint8(7), Code.UINT8), (np.bool_(True), Code.BOOL),
        (ml_dtypes.bfloat16(1.5), Code.BFLOAT16), (np.complex64(2), Code.COMPLEX64),
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_are_0d_arrays(number: Any, code: Code) -> None:
    seen = view(number)
    assert (seen.shape, seen.info.code) == ((), code)
    assert seen.array[()] == number
    with pytest.raises(TypeError, match=re.escape(f"needs an array, not the scalar {number!r}")):
        view(number, writing=True)


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (np.array([object()]), "object"),
        (np.array(["text"]), "str128"),
        (np.array([b"text"]), "bytes32"),
        (np.zeros(2, [("a", "i4")]), "void32"),
        (np.zeros(2, "V4"), "void32"),
        (np.array(["2024-01-01"], "datetime64[D]"), "datetime64[D]"),
        (np.array([1], "timedelta64[s]"), "timedelta64[s]"),
        (np.zeros(2, np.longdouble), np.dtype(np.longdouble).name),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        (2**80, "object"),
        (np.str_("x"), "str32"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_dtypes_that_cannot_travel_are_named(array: Any, name: str) -> None:
    with pytest.raises(UnsupportedDtypeError, match=re.escape(f"dtype {name!r} cannot be reduced or sent")):
        view(array)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">c16"])
def test_the_other_byte_order_is_named(dtype: str) -> None:
    with pytest.raises(UnsupportedDtypeError, match=f"'{dtype}' is not in this machine's byte order"):
        view(np.zeros(2, dtype))
    assert view(np.zeros(2, ">u1")).count == 2, "one byte has no order"


@pytest.mark.parametrize("thing", [[1, 2], (1.0,), [[1], [2]]])
def test_lists_get_advice(thing: Any) -> None:
    text = f"expected a numpy array .*, not {type(thing).__name__}: convert it with numpy.asarray first"
    for normalise in (view, partial(view, writing=True)):
        with pytest.raises(TypeError, match=text):
            normalise(thing)


@pytest.mark.parametrize("thing", [None, "text", b"bytes", {"a": 1}, {1}, object(), range(3)])
def test_what_is_no_array(thing: Any) -> None:
    with pytest.raises(TypeError, match=f"expected a numpy array .*, not {type(thing).__name__}$"):
        view(thing)


def test_a_memmap_is_written_through(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data", np.float64, "w+", shape=(4,))
    seen = view(mapped, writing=True)
    assert type(seen.array) is np.ndarray
    seen.array[:] = [1, 2, 3, 4]
    mapped.flush()
    assert np.fromfile(tmp_path / "data", np.float64).tolist() == [1, 2, 3, 4]


class Foreign:
    """An array of another library, with the array interface."""

    def __init__(self, array: np.ndarray[Any, Any], **changes: Any) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


def test_the_array_interface_shares_memory() -> None:
    memory = np.arange(6.0)
    seen = view(Foreign(memory), writing=True)
    assert seen.ptr == address(memory)
    seen.array[0] = 42
    assert memory[0] == 42
    strided = view(Foreign(memory[::2]), writing=True)
    strided.array[:] = -1
    strided.copy_home()
    assert memory.tolist() == [-1, 1, -1, 3, -1, 5]
    with pytest.raises(ValueError, match="read-only"):
        view(Foreign(memory, data=(address(memory), True)), writing=True)


class Capsule:
    """An array of another library, with DLPack; ``device`` is (2, 0) for a GPU."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0), error: Exception | None = None) -> None:
        self._array, self._device, self._error = array, device, error

    def __dlpack__(self, **options: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def test_dlpack_on_the_host_is_viewed() -> None:
    memory = np.arange(6, dtype=np.int32)
    assert view(Capsule(memory)).ptr == address(memory)
    assert view(Capsule(memory[::2])).array.tolist() == [0, 2, 4]


@pytest.mark.parametrize("error", [BufferError("on a GPU"), RuntimeError("needs grad")])
def test_dlpack_that_cannot_be_viewed(error: Exception) -> None:
    with pytest.raises(TypeError, match=f"numpy cannot view this Capsule: {error}") as caught:
        view(Capsule(np.zeros(2), (2, 0), error))
    assert caught.value.__cause__ is error


def test_ctypes_arrays_are_no_arrays() -> None:
    with pytest.raises(TypeError, match="expected a numpy array"):
        view((ctypes.c_int * 3)())


def test_bytes_are_the_memory_itself() -> None:
    array = np.arange(4, dtype=np.uint16)
    flat_bytes(array)[:2] = 0xFF
    assert array[0] == 0xFFFF
    assert flat_bytes(np.empty((0, 3))).size == 0
    assert flat_bytes(np.array(1.0)).size == 8


def test_a_view_keeps_the_memory_alive() -> None:
    def made() -> TensorView:
        return view(np.full(1000, 7, np.int64))

    seen = made()
    assert seen.array.tolist() == [7] * 1000
