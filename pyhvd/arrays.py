"""Host arrays: any of them becomes a :class:`TensorView` (address, shape, dtype).

Owns: which arrays can be sent. A contiguous, native numpy array is never copied. A non-contiguous one is
copied, and in-place operations copy the result back. Numpy views other arrays without a copy
(``__array_interface__``, DLPack on the host). Object, string and wrong-endian arrays are refused by name.
Knows nothing of ranks or names, nor of arrays on devices (:mod:`pyhvd.devices.array_libraries`).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pyhvd.dtypes import BY_CODE, KNOWN, Code, DtypeInfo, lookup
from pyhvd.native.shared_memory import POOL_LEAST, pooled

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

pool_used = False
"""Whether a result has got its memory from the pool by :func:`new_array`."""

# The numbers that are taken as arrays of no dimension.
SCALARS = (bool, int, float, complex, np.generic)


class HostLibrary(Protocol):
    """Makes results in the caller's library, which is not numpy."""

    def empty_like(self, view: TensorView, shape: tuple[int, ...]) -> TensorView:
        """Return a new array's view, of the dtype and layout of ``view``; any thread may call it."""

    def give(self, view: TensorView) -> Any:
        """Return the array of such a view, for the caller; any thread may call it, once."""


@dataclass(slots=True, eq=False)
class TensorView:
    """A host array, C-contiguous and in native byte order, for the data path; keeps the memory alive."""

    array: Array
    info: DtypeInfo
    home: Any = None
    """The caller's array if ``array`` is a contiguous copy of it."""
    device: str = "cpu"
    library: HostLibrary | None = None
    """The library of the caller's array; None is numpy."""
    owner: Any = None
    """The array in that library, of the same memory."""
    layout: str = ""
    """The owner's order of dimensions in memory, as in "0,2,3,1", which ``array`` has; empty: row-major."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.owner.shape) if self.layout else self.array.shape

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.array.size

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def ptr(self) -> int:
        """Address of the first byte."""
        return address(self.array)

    @property
    def bytes(self) -> Bytes:
        """The memory as flat bytes, without a copy."""
        return flat_bytes(self.array)

    @property
    def result(self) -> Any:
        """The array that the caller gets, if this is the output of a call."""
        return self.array if self.library is None else self.library.give(self)

    def first_rows(self, rows: int) -> TensorView:
        """Return a view of the first rows of dimension 0; it is an input."""
        return replace(self, array=self.array[:rows], home=None)

    def empty_like(self, shape: tuple[int, ...]) -> TensorView:
        """Return new memory for a result, of the same dtype, and in the same library and layout."""
        if self.library is None:
            return TensorView(new_array(shape, self.array.dtype), self.info)
        return self.library.empty_like(self, shape)

    def copy_home(self) -> None:
        """Copy the contents to the caller's array, if this is a copy of it."""
        if self.home is not None:
            self.home[...] = self.result


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return new memory for a result: a large one gets that of a freed result, if there is one.

    Results of cached calls do so in C (``native/results.pxi``).
    """
    global pool_used
    if math.prod(shape) * dtype.itemsize < POOL_LEAST:
        return np.empty(shape, dtype)
    pool_used = True
    return pooled(shape, dtype)


def address(array: Array) -> int:
    """Return the address of an array's first byte."""
    return int(array.__array_interface__["data"][0])


def flat_bytes(array: Array) -> Bytes:
    """Return a contiguous array's memory as flat bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)


def view(tensor: Any, *, writing: bool = False) -> TensorView:
    """Return the view of a numpy array or scalar, a number, or any host array that numpy can view.

    It has any shape (0-d and empty are legal), and any dtype of the table in :mod:`pyhvd.dtypes`.

    Raises
    ------
    TypeError
        The tensor is no array, or ``writing`` is set and it is a scalar.
    ValueError
        ``writing`` is set, and the array is read-only.
    UnsupportedDtypeError
        The dtype cannot be sent.
    """
    if writing and isinstance(tensor, SCALARS):
        raise TypeError(f"an in-place operation needs an array, not the scalar {tensor!r}")
    array = _as_numpy(tensor)
    if writing and not array.flags.writeable:
        raise ValueError(
            "an in-place operation needs a writable array, and this one is read-only:"
            " pass array.copy(), or call the operation without the trailing underscore"
        )
    info = KNOWN.get(array.dtype) or lookup(array.dtype)
    if array.flags.c_contiguous:
        return TensorView(array, info)
    return TensorView(np.ascontiguousarray(array), info, home=array)


def view_at(at: int, shape: tuple[int, ...], code: int) -> TensorView:
    """Return the view of row-major memory that is not an array's; nothing keeps it alive."""
    info = BY_CODE[code]
    dtype = np.dtype("uint16" if info.code == Code.BFLOAT16 else info.name)  # numpy has no bfloat16
    nbytes = math.prod(shape) * info.itemsize
    if not nbytes:
        return TensorView(np.empty(shape, dtype), info)
    memory = (ctypes.c_uint8 * nbytes).from_address(at)
    return TensorView(np.frombuffer(memoryview(memory), dtype).reshape(shape), info)


def _as_numpy(tensor: Any) -> Array:
    if isinstance(tensor, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask: pass array.filled(value), or array.data")
    if isinstance(tensor, (np.ndarray, *SCALARS)) or hasattr(tensor, "__array_interface__"):
        return np.asarray(tensor)
    if hasattr(tensor, "__dlpack__"):
        try:
            return np.from_dlpack(tensor)
        except (BufferError, RuntimeError) as exc:
            raise TypeError(f"numpy cannot view this {type(tensor).__name__}: {exc}") from exc
    raise TypeError(
        f"expected a numpy array (or a host array that numpy can view), not {type(tensor).__name__}"
        + (": convert it with numpy.asarray first" if isinstance(tensor, (list, tuple)) else "")
    )
