"""Allocate arrays in memory that all ranks of a node map, so that ranks reduce them in place without copies.

Owns :class:`Arena`, the shared memory of one rank's arrays; knows nothing of contexts, names or MPI. An arena
reserves as many addresses as the file system of shared memory has bytes. It takes memory in whole huge pages,
and only for allocated arrays.

Any thread may allocate. An array's memory becomes free when nothing refers to the array.
"""

from __future__ import annotations

import bisect
import errno
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyhvd.arrays import Array
from pyhvd.native.shared_memory import HUGE

LINE = 128
"""Arrays begin at multiples of this number of bytes."""


@dataclass(slots=True)
class Arena:
    """One rank's arena, and the addresses of the other ranks' arenas.

    Attributes
    ----------
    rank : int
        This rank.
    starts : sequence of int
        Address in this process at which each rank's arena begins.
    nbytes : int
        Length of each arena, a multiple of HUGE.
    claim : callable
        ``claim(offset, nbytes)`` allocates whole huge pages of this rank's arena, or raises OSError.
    release : callable
        ``release(offset, nbytes)`` frees that memory.
    memory : object
        Keeps all arenas mapped.
    """

    rank: int
    starts: Sequence[int]
    nbytes: int
    claim: Callable[[int, int], None]
    release: Callable[[int, int], None]
    memory: object
    _free: list[tuple[int, int]] = field(default_factory=list)
    _claimed: set[int] = field(default_factory=set)
    _returned: deque[tuple[int, int]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self._free.append((0, self.nbytes))

    @property
    def start(self) -> int:
        """Address of this rank's arena."""
        return self.starts[self.rank]

    def holds(self, address: int) -> bool:
        """Return whether an address lies in this rank's arena."""
        return self.start <= address < self.start + self.nbytes

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array with arbitrary contents, aligned to :data:`LINE`.

        Raises
        ------
        OSError
            Shared memory is used up.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        block = _Block(self, max(nbytes, 1))
        return np.asarray(block)[:nbytes].view(dtype).reshape(shape)

    def take(self, nbytes: int) -> int:
        """Allocate bytes, a multiple of :data:`LINE`; return their offset."""
        with self._lock:
            self._collect()
            for index, (offset, room) in enumerate(self._free):
                if room >= nbytes:
                    self._claim(offset, nbytes)
                    self._free[index : index + 1] = [(offset + nbytes, room - nbytes)] * (room > nbytes)
                    return offset
        raise OSError(errno.ENOSPC, f"all {self.nbytes >> 20} MiB of the arena are in use")

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free bytes; do nothing in a forked child, as the parent owns them.

        Finalizers call this method at any point of any thread, so it never waits for the lock.
        """
        if os.getpid() != self._pid:
            return
        self._returned.append((offset, nbytes))
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _claim(self, offset: int, nbytes: int) -> None:
        pages = range(offset // HUGE, -(-(offset + nbytes) // HUGE))
        missing = [page for page in pages if page not in self._claimed]
        if missing:  # contiguous: only the first and the last page can be claimed already
            self.claim(missing[0] * HUGE, len(missing) * HUGE)
            self._claimed.update(missing)

    def _collect(self) -> None:
        """Free the returned bytes, and release huge pages that hold no array."""
        while self._returned:
            offset, nbytes = self._returned.popleft()
            first, room = self._merge(offset, nbytes)
            # Only pages under the returned bytes can have become empty.
            lowest = max(-(-first // HUGE), offset // HUGE)
            highest = min((first + room) // HUGE, -(-(offset + nbytes) // HUGE))
            for page in range(lowest, highest):
                self._claimed.remove(page)
                self.release(page * HUGE, HUGE)

    def _merge(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Add bytes to the free list; return the free range that now contains them."""
        at = bisect.bisect(self._free, (offset, nbytes))
        if at < len(self._free) and offset + nbytes == self._free[at][0]:
            nbytes += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            at -= 1
            offset, room = self._free.pop(at)
            nbytes += room
        self._free.insert(at, (offset, nbytes))
        return offset, nbytes


class _Block:
    """The memory of one array, which refers to it as its base."""

    __slots__ = ("__array_interface__", "_arena", "_nbytes", "_offset")

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._nbytes = 0
        whole = -(-nbytes // LINE) * LINE
        self._arena = arena
        self._offset = arena.take(whole)
        self._nbytes = whole
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": np.dtype(np.uint8).str,
            "data": (arena.start + self._offset, False),
        }

    def __del__(self) -> None:
        if self._nbytes:
            self._arena.give_back(self._offset, self._nbytes)
