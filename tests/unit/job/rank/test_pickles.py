"""The bytes of what a rank's function is called with, and of what it returned."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest

from pyhvd.job.rank.pickles import dump, dump_functions, load

LARGE = 20_001


def test_functions_keep_the_names_of_their_files() -> None:
    def inner() -> int:
        return (lambda: 3)()

    (found,) = cloudpickle.loads(dump_functions((inner,)))
    assert found() == 3
    assert found is not inner
    assert found.__code__.co_filename == __file__
    assert any(getattr(each, "co_filename", "") == __file__ for each in found.__code__.co_consts)


def _travel(value: Any) -> Any:
    return load(bytearray(b"".join(dump(value))))


@pytest.mark.parametrize("value", [None, b"x" * LARGE * 8, {"a": [1, "b"]}, lambda: 3])
def test_values_without_arrays(value: Any) -> None:
    found = _travel(value)
    assert found() == 3 if callable(value) else found == value


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "c16", "U3", "i4,f8", "O"])
def test_arrays_are_whole_aligned_and_writable(dtype: str) -> None:
    given = [np.zeros(size, dtype=dtype) for size in (LARGE, 0, 3, 2 * LARGE, LARGE)]
    for number, array in enumerate(given):
        array[...] = number if dtype != "i4,f8" else (number, 1.5)
    for array, found in zip(given, _travel(given), strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype
        assert found.flags.aligned
        assert found.flags.writeable


def test_orders_and_read_only_arrays() -> None:
    square = np.arange(LARGE * 4.0).reshape(4, -1)
    fixed = square.copy()
    fixed.flags.writeable = False
    found = _travel([square.T, square[:, ::2], fixed])
    for array, back in zip([square.T, square[:, ::2], fixed], found, strict=True):
        np.testing.assert_array_equal(back, array)
    assert not found[2].flags.writeable


def test_a_large_array_is_not_copied() -> None:
    array = np.arange(LARGE)
    pieces = dump(array)
    assert sum(len(piece) for piece in pieces if isinstance(piece, bytes)) < 1000
    data = bytearray(b"".join(pieces))
    assert np.shares_memory(load(data), np.frombuffer(data, np.uint8))
