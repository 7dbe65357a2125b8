"""The bytes of a call, which ranks make, and of its result.

A call is one pickle. A result is a pickle followed by its large arrays, which neither the rank nor the driver
copies. A result's bytes are:

1. the number of pieces, and the length of each piece, as unsigned 64-bit numbers in network byte order;
2. the pieces: the pickle, then the buffers of the large arrays in the pickle's order. Each piece begins at a
   multiple of 16 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pickle import PickleBuffer
from types import CodeType
from typing import Any

_NUMBER = struct.Struct("!Q")
# No dtype needs a larger alignment, and malloc gives this one to a bytearray.
_ALIGNED = 16
# Smaller arrays stay in the pickle. A larger one is a view of all the bytes, and keeps them alive.
_LARGE = 1 << 16


class PreparedCall:
    """A call whose pickle, when it is loaded, first calls `prepare` and then becomes the call itself."""

    def __init__(self, prepare: Callable[[], object], call: tuple[Any, ...]) -> None:
        self._prepare = prepare
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return _last, (_Result(self._prepare), self._call)


class _Result:
    """Its pickle, when it is loaded, calls a function and becomes what that returns."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, ()


def _last(_first: object, last: Any) -> Any:
    return last


def dump_functions(call: Any) -> bytes:
    """Return cloudpickle's pickle of functions and their arguments.

    The functions keep the names of their files, so that tracebacks show their lines. cloudpickle itself omits
    these names since 3.1.3.
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
    """Return the bytes of a result in parts, to be sent one after the other."""
    import cloudpickle

    arrays: list[memoryview] = []

    def stays(buffer: PickleBuffer) -> bool:
        """Return whether an array stays in the pickle; if not, note its buffer in `arrays`."""
        try:
            raw = buffer.raw()
        except BufferError:  # the array is not contiguous
            return True
        if raw.nbytes < _LARGE:
            return True
        arrays.append(raw)
        return False

    pieces: list[bytes | memoryview] = [cloudpickle.dumps(value, buffer_callback=stays), *arrays]
    head = b"".join(_NUMBER.pack(number) for number in (len(pieces), *map(len, pieces)))
    return [part for piece in (head, *pieces) for part in (piece, bytes(-len(piece) % _ALIGNED))]


def load(data: bytearray) -> Any:
    """Return the value that :func:`dump` was given; its large arrays are views of `data`."""
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
