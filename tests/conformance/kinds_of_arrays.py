"""Cases of array-like inputs: layouts, scalars, subclasses, and rejected objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import Cases
from tests.conformance.oracle import BF16, Array, inputs, reduced, rows, same

CASES = Cases()

LAYOUTS = ("every other", "transposed", "Fortran", "reversed", "column", "flipped both")


def laid_out(layout: str, contiguous: Array) -> Array:
    """Return an array equal to a 2-d array, in another memory layout."""
    n, m = contiguous.shape
    if layout == "every other":
        out = np.zeros((2 * n, 2 * m), contiguous.dtype)[::2, ::2]
    elif layout == "transposed":
        out = np.zeros((m, n), contiguous.dtype).T
    elif layout == "Fortran":
        out = np.zeros((n, m), contiguous.dtype, order="F")
    elif layout == "reversed":
        out = np.zeros((n, m), contiguous.dtype)[::-1]
    elif layout == "column":
        out = np.zeros((n, m, 3), contiguous.dtype)[:, :, 1]
    else:
        out = np.zeros((n, m), contiguous.dtype)[::-1, ::-1]
    out[...] = contiguous
    return out


@CASES.add_each(LAYOUTS)
def layouts(layout: str) -> None:
    size, rank = hvd.size(), hvd.rank()
    for name in ("float32", "bfloat16", "int8", "complex128"):
        parts = inputs(name, (4, 3), size)
        mine = laid_out(layout, parts[rank])
        strides = mine.strides
        want = reduced(hvd.Sum, parts)
        same(hvd.allreduce(mine, op=hvd.Sum), want, layout)
        same(hvd.allgather(mine), np.concatenate(parts), layout)
        same(hvd.broadcast(mine, size - 1), parts[-1], layout)
        same(hvd.reducescatter(mine, op=hvd.Sum), want[rows(4, size, rank)], layout)
        same(hvd.alltoall(mine, [1] * size)[0], np.stack([part[rank] for part in parts]), layout)
        same(np.ascontiguousarray(mine), parts[rank], "input")
        assert hvd.allreduce_(mine, op=hvd.Sum) is mine
        same(np.ascontiguousarray(mine), want, f"in place, {layout}")
        assert mine.strides == strides


@CASES.add()
def in_place_touches_the_view_alone() -> None:
    whole = np.full((6, 6), 7.0)
    inner = whole[1:5:2, 1:5]
    inner[...] = hvd.rank()
    assert hvd.broadcast_(inner, hvd.size() - 1) is inner
    want = np.full((6, 6), 7.0)
    want[1:5:2, 1:5] = hvd.size() - 1
    same(whole, want)
    group = [np.full((4, 4), hvd.rank())[:, ::2], np.full(5, hvd.rank())]
    got = hvd.grouped_allreduce_(group, op=hvd.Max)
    assert got[0] is group[0]
    assert got[1] is group[1]
    assert [int(array.min()) for array in group] == [hvd.size() - 1] * 2


@CASES.add()
def read_only_arrays() -> None:
    array = np.ones(3)
    array.flags.writeable = False
    assert hvd.allreduce(array, op=hvd.Sum).tolist() == [hvd.size()] * 3
    with pytest.raises(ValueError, match="read-only"):
        hvd.allreduce_(array)
    with pytest.raises(ValueError, match="read-only"):
        hvd.broadcast_(np.broadcast_to(np.ones(1), 3), 0)
    with pytest.raises(ValueError, match="read-only"):
        hvd.grouped_allreduce_([np.ones(2), array])
    assert array.tolist() == [1.0] * 3


@CASES.add()
def scalars() -> None:
    size = hvd.size()
    same(hvd.allreduce(np.float32(1.5), op=hvd.Sum), np.array(1.5 * size, np.float32))
    same(hvd.allreduce(np.int16(2), op=hvd.Product), np.array(2**size, np.int16))
    same(hvd.allreduce(3, op=hvd.Sum), np.array(3 * size))
    same(hvd.allreduce(0.5, op=hvd.Sum), np.array(0.5 * size))
    same(hvd.allreduce(True, op=hvd.Min), np.array(True))
    same(hvd.broadcast(1j, 0), np.array(1j))
    for scalar in (1, 1.0, np.float64(1)):
        with pytest.raises(TypeError, match="scalar"):
            hvd.allreduce_(scalar)


REFUSED: dict[str, Any] = {
    "object": np.array([None, 1], object),
    "str": np.array(["a", "b"]),
    "bytes": np.array([b"a", b"b"]),
    "big endian": np.array([1.0, 2.0], ">f8"),
    "swapped int": np.array([1, 2], np.dtype(np.int32).newbyteorder("S")),
    "datetime": np.array(["2020-01-01"], "M8[D]"),
    "structured": np.zeros(2, [("a", "f4")]),
    "void": np.zeros(2, "V4"),
    "longdouble": np.zeros(2, np.longdouble),
}


@CASES.add_each(REFUSED)
def refused_dtypes(name: str) -> None:
    array = REFUSED[name]
    calls = (
        lambda: hvd.allreduce(array, op=hvd.Sum),
        lambda: hvd.allreduce_(array),
        lambda: hvd.grouped_allreduce([np.ones(2), array]),
        lambda: hvd.allgather(array),
        lambda: hvd.broadcast(array, 0),
        lambda: hvd.alltoall(array),
        lambda: hvd.reducescatter(array),
    )
    for call in calls:
        with pytest.raises(hvd.UnsupportedDtypeError) as caught:
            call()
        assert isinstance(caught.value, ValueError)


@CASES.add()
def no_arrays_at_all() -> None:
    for thing in ([1.0, 2.0], (1,), None, "abc", {1: 2}, object()):
        with pytest.raises(TypeError):
            hvd.allreduce(thing)
        with pytest.raises(TypeError):
            hvd.allgather(thing)
    with pytest.raises(ValueError, match="name must be a str"):
        hvd.allreduce(np.ones(1), name=5)  # type: ignore[arg-type]


class Foreign:
    """A host array of another library, as numpy sees it."""

    def __init__(self, array: Array) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The array protocol, version 3."""
        return dict(self._array.__array_interface__)


class Dlpack:
    """A host array that supports DLPack only."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **how: Any) -> Any:
        """Return the array as a capsule."""
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the host device."""
        return self._array.__dlpack_device__()


@CASES.add()
def foreign_arrays_are_viewed() -> None:
    for kind in (Foreign, Dlpack):
        mine = np.full(3, float(hvd.rank()))
        wrapped = kind(mine)
        total = sum(range(hvd.size()))
        assert hvd.allreduce(wrapped, op=hvd.Sum).tolist() == [total] * 3
        if kind is Foreign:
            assert hvd.allreduce_(wrapped, op=hvd.Sum) is wrapped
            assert mine.tolist() == [total] * 3


class Tagged(np.ndarray[Any, Any]):
    """A subclass of ndarray."""


@CASES.add()
def subclasses_of_ndarray() -> None:
    mine = np.full((2, 2), hvd.rank()).view(Tagged)
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [[hvd.size() - 1] * 2] * 2
    assert hvd.broadcast_(mine, 0) is mine
    assert mine.tolist() == [[0, 0], [0, 0]]


@CASES.add_each(("all", "first", "none", "changing"))
def shared_memory(whose: str) -> None:
    """Arrays of ``hvd.empty()`` on some or all ranks give the same bits, repeatedly and in groups."""
    size, rank = hvd.size(), hvd.rank()
    for turn in range(5):
        for name, n in (("float32", 200_003), ("float16", 40_001), ("int64", 5), ("complex128", 9_000)):
            shared = {"all": True, "first": rank == 0, "none": False, "changing": (turn + rank) % 3 == 0}[
                whose
            ]
            parts = inputs(name, (n,), size)
            group = []
            for part in (parts[rank], parts[rank][: n // 2]):
                array = hvd.empty(part.shape, part.dtype) if shared else np.empty_like(part)
                array[...] = part
                group.append(array)
            single = group[0].copy() if not shared else hvd.empty_like(group[0])
            single[...] = group[0]
            want = reduced(hvd.Sum, parts)
            assert hvd.allreduce_(single, name=f"{whose}.{name}", op=hvd.Sum) is single
            same(single, want, f"{whose} {name}")
            hvd.grouped_allreduce_(group, name=f"{whose}.{name}.group", op=hvd.Sum)
            same(group[0], want, f"{whose} {name}, group")
            same(group[1], reduced(hvd.Sum, [part[: n // 2] for part in parts]), f"{whose} {name}, group")
            again = hvd.allreduce(single, name=f"{whose}.{name}.out", op=hvd.Sum)
            same(again, reduced(hvd.Sum, [want] * size), f"{whose} {name}, out of place")
            same(single, want, f"{whose} {name}, the input of that")


@CASES.add()
def shared_memory_with_factors() -> None:
    """A prescale factor needs a copy; a postscale factor does not."""
    for turn in range(3):
        for before, behind in ((1.0, 0.5), (0.25, 1.0), (0.5, 2.0)):
            array = hvd.empty((300, 50), np.float64)
            array[...] = hvd.rank() + turn
            hvd.allreduce_(
                array, name=f"{before}.{behind}", op=hvd.Sum, prescale_factor=before, postscale_factor=behind
            )
            want = sum(before * (rank + turn) for rank in range(hvd.size())) * behind
            assert (array == want).all()


@CASES.add()
def shared_memory_of_odd_shapes() -> None:
    """hvd.empty() accepts numpy's shapes, a size of zero, and bfloat16."""
    assert hvd.empty(3).shape == (3,)
    assert hvd.empty((), np.int8).shape == ()
    assert hvd.empty([2, 0, 3]).size == 0
    assert hvd.empty((2, 2)).dtype == np.float32
    half = hvd.empty((2, 3), BF16)
    half[...] = 1
    for _ in range(2):
        hvd.allreduce_(half, name="half", op=hvd.Average)
    assert half.astype(np.float32).tolist() == [[1.0] * 3] * 2
    with pytest.raises(ValueError, match="negative"):
        hvd.empty((-1,))
    with pytest.raises(TypeError):
        hvd.empty(2.5)  # type: ignore[arg-type]
    with pytest.raises(hvd.UnsupportedDtypeError):
        hvd.empty(2, "datetime64[s]")
    fortran = hvd.empty((30, 40)).T
    fortran[...] = hvd.rank()
    for _ in range(2):
        hvd.allreduce_(fortran, name="transposed", op=hvd.Max)
    assert (fortran == hvd.size() - 1).all()
