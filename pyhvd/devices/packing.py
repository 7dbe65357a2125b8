"""Pack many tensors by one kernel launch, and unpack them by another.

Owns the choice of the kernel, and the memory in which its table reaches the device. Knows the device by its
protocol only, and a kernel as a function that launches it; so it runs without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pyhvd import _fusion
from pyhvd.arrays import Bytes, address
from pyhvd.devices.base import Device, Event, Memory, Stream
from pyhvd.devices.pack_plan import ALIGNMENT, EACH, Tiles, Words, make_tiles
from pyhvd.dtypes import BY_CODE, Code, ReduceOp

Argument = np.uint64 | np.int64 | np.float64
Launch = Callable[[str, int, tuple[Argument, ...], Stream], None]
"""``launch(name, blocks, arguments, stream)`` queues a kernel, with :data:`pack_plan.THREADS` per block."""

Compile = Callable[[str], Launch]
"""``compile(type)`` returns the kernels of a type, by its name in ``pack_kernels.cu``."""

KERNELS = tuple(f"pyhvd_{verb}_{suffix}" for verb in ("pack", "unpack") for suffix in EACH)
"""The kernels of each type."""

_REAL = {Code.COMPLEX64: Code.FLOAT32, Code.COMPLEX128: Code.FLOAT64}
_WORDS = {1: "UINT8", 2: "UINT16", 4: "UINT32", 8: "UINT64"}

SMALLEST_TABLE = 64 * 1024
"""Bytes; enough for a few hundred tensors."""

KEPT_TABLES = 32
"""Most tables that are kept for later launches; more exist while more kernels are queued."""


class _Table(NamedTuple):
    """A table's memory on host and device; ``done`` passes when the kernel has read it."""

    pinned: Bytes
    on_device: Memory
    done: Event


class KernelPacker:
    """Packs and unpacks by kernels; see :class:`pyhvd.devices.base.Packer`. Not thread-safe.

    ``compiler`` makes the kernels of a type in :meth:`load`, or when they are first needed. ``device`` is the
    current one of the calling thread.
    """

    def __init__(self, device: Device, compiler: Compile) -> None:
        self._device = device
        self._compile = functools.cache(compiler)
        self._tables: dict[Stream, list[_Table]] = {}

    def load(self) -> None:
        """Make the kernels of all types, so that no later call can fail for want of one."""
        for name in KERNEL_TYPES:
            self._compile(name)

    def pack(
        self,
        buffer: int,
        offsets: Words,
        sources: Words,
        counts: Words,
        code: Code,
        op: ReduceOp,
        factor: float,
        stream: Stream,
    ) -> None:
        low, high = _identity(code, op) if not sources.all() else (np.uint64(0), np.uint64(0))
        name, tiles = kernel_type(code, factor), _tiles(offsets, sources, counts, code)
        self._launch("pack", name, buffer, tiles, (low, high, np.float64(factor)), stream)

    def unpack(
        self,
        buffer: int,
        offsets: Words,
        targets: Words,
        counts: Words,
        code: Code,
        factor: float,
        stream: Stream,
    ) -> None:
        name, tiles = kernel_type(code, factor), _tiles(offsets, targets, counts, code)
        self._launch("unpack", name, buffer, tiles, (np.float64(factor),), stream)

    def _launch(
        self,
        verb: str,
        name: str,
        buffer: int,
        tiles: Tiles,
        last: tuple[Argument, ...],
        stream: Stream,
    ) -> None:
        """Launch a kernel for the type of this name; its last arguments are `last`."""
        if not tiles.blocks:
            return
        device = self._device
        launch = self._compile(name)
        table = self._table(len(tiles.table), stream)
        table.pinned[: len(tiles.table)] = tiles.table
        device.copy(table.on_device.ptr, address(table.pinned), len(tiles.table), stream)
        where = buffer + tiles.skipped, table.on_device.ptr, table.on_device.ptr + tiles.firsts
        pointers = map(np.uint64, where)
        arguments = (*pointers, np.int64(tiles.vectors), *last)
        launch(f"pyhvd_{verb}_{tiles.suffix}", tiles.blocks, arguments, stream)
        device.record(table.done, stream)

    def _table(self, nbytes: int, stream: Stream) -> _Table:
        """Return memory that no queued kernel reads; the longest unused comes first."""
        tables = self._tables.setdefault(stream, [])
        for i, table in enumerate(tables):
            if not self._device.has_passed(table.done):
                break  # later ones were used later
            if len(table.pinned) >= nbytes:
                tables.append(tables.pop(i))
                if len(tables) > KEPT_TABLES and self._device.has_passed(tables[0].done):
                    del tables[0]
                return table
        room = max(SMALLEST_TABLE, 1 << (nbytes - 1).bit_length())
        pinned = self._device.allocate_pinned(room)
        tables.append(_Table(pinned, self._device.allocate(room, stream), self._device.make_event()))
        return tables[-1]


def _tiles(offsets: Words, addresses: Words, counts: Words, code: Code) -> Tiles:
    parts = 2 if code in _REAL else 1  # complex numbers are pairs of reals
    return make_tiles(offsets * parts, addresses, counts * parts, BY_CODE[code].itemsize // parts)


def kernel_type(code: Code, factor: float) -> str:
    """Return the type of a kernel by its name in ``pack_kernels.cu``; ValueError if none scales this type."""
    info = BY_CODE[code]
    if factor == 1.0:  # bits move unchanged
        return _WORDS[info.itemsize // (2 if code in _REAL else 1)]
    if not info.scalable:
        raise ValueError(f"{info.name} cannot be multiplied by {factor}")
    return _REAL.get(code, code).name


KERNEL_TYPES = sorted(
    {kernel_type(code, 1.0) for code in Code} | {kernel_type(c, 2.0) for c in Code if BY_CODE[c].scalable}
)
"""The types of all kernels."""


@functools.cache
def _identity(code: Code, op: ReduceOp) -> tuple[np.uint64, np.uint64]:
    """Return the two halves of a vector of identity elements."""
    vector = np.zeros(2, np.uint64)
    _fusion.fill(address(vector), ALIGNMENT // BY_CODE[code].itemsize, code, op)
    return vector[0], vector[1]
