"""One kernel launch that packs many tensors, one that unpacks them: what goes to the device, and when.

Owns: the choice of the kernel, and the memory by which its table reaches the device. Knows the device only by
its protocol, and kernels only as something that can be launched, so that all of it runs without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyhvd import _fusion
from pyhvd.arrays import Bytes, address
from pyhvd.devices.base import Device, Event, Memory, Stream
from pyhvd.devices.pack_plan import ALIGNMENT, Words, make_tiles
from pyhvd.dtypes import BY_CODE, Code, ReduceOp

Argument = np.uint64 | np.int64 | np.float64
Launch = Callable[[str, int, tuple[Argument, ...], Stream], None]
"""``launch(name, blocks, arguments, stream)`` queues a kernel, in blocks of :data:`tiles.THREADS` threads."""

Compile = Callable[[str, str], Launch]
"""``compile(tensor, wire)`` returns the kernels for one pair of types, named as in ``pack_kernels.cu``."""

_FLOATS = (Code.FLOAT16, Code.BFLOAT16, Code.FLOAT32, Code.FLOAT64)
_REAL = {Code.COMPLEX64: Code.FLOAT32, Code.COMPLEX128: Code.FLOAT64}
_WORDS = {1: "UINT8", 2: "UINT16", 4: "UINT32", 8: "UINT64"}

SMALLEST_TABLE = 64 * 1024
"""Bytes; tables of a few hundred tensors need less."""

KEPT_TABLES = 32
"""Tables that are kept for later launches; there are more while more kernels are under way."""


@dataclass(slots=True)
class _Table:
    """Memory for a table, on both sides; ``done`` passes when the kernel has read it."""

    pinned: Bytes
    there: Memory
    done: Event


class KernelPacker:
    """Packs and unpacks by kernels; see :class:`pyhvd.devices.base.Packer`. For one thread at a time.

    Parameters
    ----------
    device : Device
        Where it all is.
    compiler : callable
        Makes the kernels for a pair of types, when they are first needed; called with the device acting.
    """

    def __init__(self, device: Device, compiler: Compile) -> None:
        self._device = device
        self._compile = functools.cache(compiler)
        self._tables: dict[Stream, list[_Table]] = {}

    def pack(
        self,
        buffer: int,
        offsets: Words,
        sources: Words,
        counts: Words,
        code: Code,
        wire: Code,
        op: ReduceOp,
        factor: float,
        stream: Stream,
    ) -> None:
        """Queue one kernel that gathers tensors; see :meth:`pyhvd.devices.base.Packer.pack`.

        The product with the factor is rounded once, to ``wire``. What lies behind a tensor up to the next
        multiple of 16 bytes becomes zero.
        """
        low, high = _neutral(wire, op) if not sources.all() else (np.uint64(0), np.uint64(0))
        arguments = (low, high, np.float64(factor))
        self._launch("pack", buffer, offsets, sources, counts, (code, wire), factor, arguments, stream)

    def unpack(
        self,
        buffer: int,
        offsets: Words,
        targets: Words,
        counts: Words,
        wire: Code,
        code: Code,
        factor: float,
        stream: Stream,
    ) -> None:
        """Queue one kernel that does the reverse; see :meth:`pyhvd.devices.base.Packer.unpack`."""
        arguments = (np.float64(factor),)
        self._launch("unpack", buffer, offsets, targets, counts, (code, wire), factor, arguments, stream)

    def _launch(
        self,
        verb: str,
        buffer: int,
        offsets: Words,
        addresses: Words,
        counts: Words,
        types: tuple[Code, Code],
        factor: float,
        arguments: tuple[Argument, ...],
        stream: Stream,
    ) -> None:
        names = kernel_types(*types, factor)
        parts = 2 if types[1] in _REAL else 1  # complex numbers are pairs of reals
        itemsize = BY_CODE[types[1]].itemsize // parts
        tiles = make_tiles(offsets * parts, addresses, counts * parts, itemsize)
        if not tiles.blocks:
            return
        device = self._device
        with device.acting():
            launch = self._compile(*names)
            table = self._table(len(tiles.table), stream)
            table.pinned[: len(tiles.table)] = tiles.table
            device.copy(table.there.ptr, address(table.pinned), len(tiles.table), stream)
            where = buffer + tiles.skipped, table.there.ptr, table.there.ptr + tiles.firsts
            pointers = tuple(np.uint64(place) for place in where)
            every = (*pointers, np.int64(tiles.vectors), *arguments)
            launch(f"pyhvd_{verb}_{tiles.suffix}", tiles.blocks, every, stream)
            device.record(table.done, stream)

    def _table(self, nbytes: int, stream: Stream) -> _Table:
        """Return memory that no queued kernel reads any more; of two, that which was used longer ago."""
        tables = self._tables.setdefault(stream, [])
        for i, table in enumerate(tables):
            if not self._device.has_passed(table.done):
                break  # those behind it were used later
            if len(table.pinned) >= nbytes:
                tables.append(tables.pop(i))
                if len(tables) > KEPT_TABLES and self._device.has_passed(tables[0].done):
                    del tables[0]
                return table
        room = max(SMALLEST_TABLE, 1 << (nbytes - 1).bit_length())
        pinned = self._device.allocate_pinned(room)
        tables.append(_Table(pinned, self._device.allocate(room, stream), self._device.make_event()))
        return tables[-1]


def kernel_types(code: Code, wire: Code, factor: float) -> tuple[str, str]:
    """Return the types of a kernel, by their names in ``pack_kernels.cu``: of the tensors, and of the buffer.

    Raises
    ------
    ValueError
        There is no such conversion, or nothing to multiply.
    """
    info = BY_CODE[code]
    if code == wire and factor == 1.0:  # bits are moved, whatever they mean
        word = _WORDS[info.itemsize // (2 if code in _REAL else 1)]
        return word, word
    if code != wire and not (code in _FLOATS and wire in _FLOATS):
        raise ValueError(f"no kernel casts {info.name} to {BY_CODE[wire].name}: floats alone are cast")
    if not info.scalable:
        raise ValueError(f"{info.name} cannot be multiplied by {factor}")
    return _REAL.get(code, code).name, _REAL.get(wire, wire).name


@functools.cache
def _neutral(code: Code, op: ReduceOp) -> tuple[np.uint64, np.uint64]:
    """Return the two halves of a vector of neutral elements."""
    vector = np.zeros(2, np.uint64)
    _fusion.fill(address(vector), ALIGNMENT // BY_CODE[code].itemsize, code, op)
    return vector[0], vector[1]
