"""What ranks are to call, and what it returned, as bytes.

A call is a pickle. A result is its pickle, and beside the pickle the large arrays: neither the rank nor the
driver copies these. The bytes of a result are, in this order, and each of the last at a multiple of 16:

1. the number of pieces, and the length of each;
2. the pieces: the pickle, then the buffers of the arrays in the pickle's order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pickle import PickleBuffer
from types import CodeType
from typing import Any

_NUMBER = struct.Struct("!Q")
# malloc aligns a bytearray to this, which all dtypes of arrays need at most.
_ALIGNED = 16
# A smaller array stays in the pickle, and keeps no others alive on the driver.
_LARGE = 1 << 16


class PreparedCall:
    """A call in whose pickle comes first a function that prepares the process: the load calls it."""

    def __init__(self, prepare: Callable[[], object], call: tuple[Any, ...]) -> None:
        self._prepare = prepare
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return _last, (_Result(self._prepare), self._call)


class _Result:
    """Becomes the result of a function when it is loaded."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, ()


def _last(_first: object, last: Any) -> Any:
    return last


def dump_functions(call: Any) -> bytes:
    """Return the pickle of functions and their arguments; cloudpickle carries it.

    The functions keep the names of their files, so that tracebacks show their lines. cloudpickle leaves the
    names out from 3.1.3 on.
    """
    import io

    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        dispatch_table = cloudpickle.CloudPickler.dispatch_table.new_child({CodeType: _reduce_code})

    file = io.BytesIO()
    Pickler(file).dump(call)
    return file.getvalue()


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    import cloudpickle

    return _make_code, (code.co_filename, *cloudpickle.CloudPickler.dispatch_table[CodeType](code))


def _make_code(filename: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=filename)


def dump(value: Any) -> list[bytes | memoryview]:
    """Return the bytes of a value in pieces; cloudpickle carries it."""
    import cloudpickle

    arrays: list[memoryview] = []

    def stays(buffer: PickleBuffer) -> bool:
        """Return whether an array stays in the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:  # it is not contiguous
            return True
        if raw.nbytes < _LARGE:
            return True
        arrays.append(raw)
        return False

    pieces: list[bytes | memoryview] = [cloudpickle.dumps(value, buffer_callback=stays), *arrays]
    head = b"".join(_NUMBER.pack(number) for number in (len(pieces), *map(len, pieces)))
    return [part for piece in (head, *pieces) for part in (piece, bytes(-len(piece) % _ALIGNED))]


def load(data: bytearray) -> Any:
    """Return the value of :func:`dump`; its large arrays are parts of `data`."""
    import cloudpickle

    whole = memoryview(data)
    (count,) = _NUMBER.unpack_from(data)
    begin = _NUMBER.size * (1 + count)
    pieces = []
    for (length,) in _NUMBER.iter_unpack(whole[_NUMBER.size : begin]):
        begin += -begin % _ALIGNED
        pieces.append(whole[begin : begin + length])
        begin += length
    return cloudpickle.loads(pieces[0], buffers=pieces[1:])
