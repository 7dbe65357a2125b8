"""Allocate arrays in memory that all ranks of a node map, so that ranks reduce them without copies.

Owns :class:`Arena`, the shared memory of one rank's arrays; knows nothing of contexts, names or MPI. An arena
reserves as many addresses as the file system of shared memory has bytes. It takes memory in whole huge pages,
and only for allocated arrays.

Any thread may allocate. An array's memory becomes free when nothing refers to the array. That of a result is
kept for later results of its size class, as the pool keeps other results (``native/src/results/pool.h``): its
pages are there, and :meth:`Arena.tidy` frees it.
"""

from __future__ import annotations

import bisect
import errno
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyhvd.arrays import Array
from pyhvd.native.shared_memory import HUGE, pool_counts

LINE = 128
"""Arrays begin at multiples of this number of bytes."""
_PATIENCE_S = 1.0
"""A result gets other memory if the lock is not free for so long. This may be a signal's handler, whose own
thread has the lock."""
_AGAIN_S = 1.0
"""Time to the next look if the lock was not free."""
KEPT_S = 10.0
"""For how long memory is kept that no result of its size class uses."""


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
    kept : int
        Bytes that are kept for results now.
    made, reused : int
        Results in new memory, and in memory that was kept.
    """

    rank: int
    starts: Sequence[int]
    nbytes: int
    claim: Callable[[int, int], None]
    release: Callable[[int, int], None]
    memory: object
    kept: int = 0
    made: int = 0
    reused: int = 0
    _most_kept: int = 0
    _wake: Callable[[], object] = bool
    _kept: dict[int, _Kept] = field(default_factory=dict)  # by size class
    _results: int = 0  # in use or kept
    _free: list[tuple[int, int]] = field(default_factory=list)
    _claimed: set[int] = field(default_factory=set)
    _returned: deque[tuple[int, int, bool]] = field(default_factory=deque)
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
        return _Block(self, -(-max(nbytes, 1) // LINE) * LINE, is_result=False).array(shape, dtype)

    def keep_results(self, most: int, wake: Callable[[], object] = bool) -> None:
        """Give results memory from now on, and keep at most so many bytes; 0: give and keep none.

        ``wake()``, from any thread, asks for a call of :meth:`tidy`. It never waits for the lock.
        """
        self._most_kept, self._wake = most, wake
        if not most:
            self.tidy(math.inf)

    def result(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array as :meth:`empty`, in memory that was kept if there is some.

        Raises
        ------
        OSError
            Shared memory is used up, or no memory is kept for results.
        """
        if not self._most_kept:
            raise OSError(errno.ENOSPC, "no results come from the arena")
        return _Block(self, size_class(math.prod(shape) * dtype.itemsize), is_result=True).array(shape, dtype)

    def take(self, nbytes: int, *, is_result: bool = False) -> int:
        """Allocate bytes, a multiple of :data:`LINE`; return their offset."""
        if not self._lock.acquire(timeout=_PATIENCE_S if is_result else -1):
            raise OSError(errno.EBUSY, "another thread allocates in the arena")
        try:
            self._collect()
            if is_result and (kept := self._kept.get(nbytes)) and kept.offsets:
                self.kept -= nbytes
                self.reused += 1
                return kept.offsets.pop()
            try:
                offset = self._take_new(nbytes)
            except OSError:
                self._drop(math.inf)
                offset = self._take_new(nbytes)
            self.made += is_result
            self._results += is_result
            first = is_result and self._results == 1
        finally:
            self._lock.release()
        if first:
            self._wake()
        return offset

    def _take_new(self, nbytes: int) -> int:
        for index, (offset, room) in enumerate(self._free):
            if room >= nbytes:
                self._claim(offset, nbytes)
                self._free[index : index + 1] = [(offset + nbytes, room - nbytes)] * (room > nbytes)
                return offset
        raise OSError(errno.ENOSPC, f"all {self.nbytes >> 20} MiB of the arena are in use")

    def counts(self) -> tuple[int, int, int]:
        """Return (bytes kept, results in new memory, results in kept memory), here and in the pool."""
        kept, made, reused = pool_counts()
        return kept + self.kept, made + self.made, reused + self.reused

    def tidy(self, now: float) -> float | None:
        """Free what was kept for :data:`KEPT_S`; return when to look again; None: there is no result."""
        if not self._lock.acquire(blocking=False):  # an allocation may take long, and the caller must not
            return now + _AGAIN_S
        try:
            self._collect()
            self._drop(now - KEPT_S)
            return now + KEPT_S if self._results else None
        finally:
            self._lock.release()

    def give_back(self, offset: int, nbytes: int, *, is_result: bool = False) -> None:
        """Free bytes; do nothing in a forked child, as the parent owns them.

        Finalizers call this method at any point of any thread, so it never waits for the lock.
        """
        if os.getpid() != self._pid:
            return
        self._returned.append((offset, nbytes, is_result))
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
        """Keep or free the returned bytes."""
        if not self._most_kept and self._kept:
            self._drop(math.inf)
        while self._returned:
            offset, nbytes, is_result = self._returned.popleft()
            if is_result and nbytes <= self._most_kept:
                if self.kept + nbytes > self._most_kept:
                    self._make_room(nbytes)
                kept = self._kept.setdefault(nbytes, _Kept())
                kept.offsets.append(offset)
                kept.since = time.monotonic()
                self.kept += nbytes
            else:
                self._results -= is_result
                self._release(offset, nbytes)

    def _make_room(self, nbytes: int) -> None:
        """Free what is kept, the size classes first that were used least recently, until more may be kept."""
        for size, kept in sorted(self._kept.items(), key=lambda each: each[1].since):
            while kept.offsets and self.kept + nbytes > self._most_kept:
                self._free_kept(kept.offsets.pop(), size)

    def _drop(self, until: float) -> None:
        """Free what is kept, of size classes that were last used before a time."""
        for nbytes in [nbytes for nbytes, kept in self._kept.items() if kept.since < until]:
            for offset in self._kept.pop(nbytes).offsets:
                self._free_kept(offset, nbytes)

    def _free_kept(self, offset: int, nbytes: int) -> None:
        self.kept -= nbytes
        self._results -= 1
        self._release(offset, nbytes)

    def _release(self, offset: int, nbytes: int) -> None:
        """Free bytes, and release huge pages that hold no array."""
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


@dataclass(slots=True)
class _Kept:
    """Offsets of memory of one size class, and when the last one was kept (monotonic s)."""

    offsets: list[int] = field(default_factory=list)
    since: float = 0.0


def size_class(nbytes: int) -> int:
    """Return the bytes to allocate for a result: up to an eighth more, so that like sizes share memory."""
    step = max(LINE, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-max(nbytes, 1) // step) * step


class _Block:
    """The memory of one array, which refers to it as its base."""

    __slots__ = ("__array_interface__", "_arena", "_is_result", "_nbytes", "_offset")

    def __init__(self, arena: Arena, nbytes: int, *, is_result: bool) -> None:
        self._nbytes = 0
        self._arena, self._is_result = arena, is_result
        self._offset = arena.take(nbytes, is_result=is_result)
        self._nbytes = nbytes

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the array."""
        at = (self._arena.start + self._offset, False)
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": at}
        array = np.asarray(self)
        return array if array.dtype == dtype else array.view(dtype)  # ml_dtypes' have numpy's str of bytes

    def __del__(self) -> None:
        if self._nbytes:
            self._arena.give_back(self._offset, self._nbytes, is_result=self._is_result)
