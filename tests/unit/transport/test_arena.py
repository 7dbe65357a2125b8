"""The memory of ``hvd.empty()``: arrays do not overlap, memory is not lost, huge pages are claimed whole."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from pyhvd.native.shared_memory import HUGE
from pyhvd.transport.arena import KEPT_S, LINE, Arena

PAGES = 4


class Pages:
    """An arena over ordinary memory, which records its claimed pages."""

    def __init__(self, room: int = PAGES) -> None:
        self.memory: npt.NDArray[np.uint8] = np.zeros((PAGES + 1) * HUGE, np.uint8)
        start = -(-self.memory.ctypes.data // HUGE) * HUGE
        self.claimed: set[int] = set()
        self.room = room
        self.arena = Arena(0, [start], PAGES * HUGE, self.claim, self.release, self.memory)

    def claim(self, offset: int, nbytes: int) -> None:
        assert offset % HUGE == nbytes % HUGE == 0
        pages = range(offset // HUGE, (offset + nbytes) // HUGE)
        assert self.claimed.isdisjoint(pages)
        if len(self.claimed) + len(pages) > self.room:
            raise OSError(errno.ENOSPC, "no space left")
        self.claimed.update(pages)

    def release(self, offset: int, nbytes: int) -> None:
        assert nbytes == HUGE
        self.claimed.remove(offset // HUGE)

    def under(self, arrays: list[Any]) -> set[int]:
        """Return the huge pages under the arrays."""
        used: set[int] = set()
        for array in arrays:
            first = array.ctypes.data - self.arena.start
            used.update(range(first // HUGE, (first + max(array.nbytes, 1) - 1) // HUGE + 1))
        return used


sizes = st.sampled_from([0, 1, 100, LINE, 5000, HUGE // 2, HUGE - LINE, HUGE, HUGE + 1, 2 * HUGE])


@settings(max_examples=150)
@given(st.lists(st.one_of(sizes, st.integers(-6, -1)), max_size=30))
def test_arrays_come_and_go(program: list[int]) -> None:
    """A number >= 0 allocates that many bytes; a negative one drops an array."""
    pages = Pages()
    held: list[tuple[Any, int]] = []
    for index, step in enumerate(program):
        if step < 0 and held:
            held.pop(step % len(held))
        elif step >= 0 and (array := _allocate(pages.arena, step)) is not None:
            array[...] = index % 251
            held.append((array, index % 251))
        array = None
        assert all((each == value).all() for each, value in held)
        assert pages.claimed == pages.under([each for each, _ in held])
    held.clear()
    assert not pages.claimed
    whole = pages.arena.empty((PAGES * HUGE,), np.dtype(np.uint8))
    assert whole.size == PAGES * HUGE


def _allocate(arena: Arena, nbytes: int) -> Any:
    try:
        array = arena.empty((nbytes,), np.dtype(np.uint8))
    except OSError:
        return None
    assert array.ctypes.data % LINE == 0
    assert arena.holds(array.ctypes.data)
    return array


def _result(arena: Arena, nbytes: int) -> Any:
    return arena.result((nbytes,), np.dtype(np.uint8))


@settings(max_examples=150)
@given(st.lists(st.tuples(sizes, st.booleans(), st.integers(0, 3)), max_size=30), st.integers(1, PAGES))
def test_results_come_and_go_beside_arrays(program: list[tuple[int, bool, int]], most: int) -> None:
    """Each step allocates a result or an array, then drops an array if there are too many."""
    pages = Pages()
    pages.arena.keep_results(most * HUGE // 2)
    held: list[tuple[Any, int]] = []
    results = 0
    for index, (nbytes, is_result, most_held) in enumerate(program):
        with contextlib.suppress(OSError):
            array = _result(pages.arena, nbytes) if is_result else _allocate(pages.arena, nbytes)
            results += is_result
            if array is not None:
                array[...] = index % 251
                held.append((array, index % 251))
        array = None
        if len(held) > most_held:
            held.pop(index % len(held))
        assert all((each == value).all() for each, value in held)
        assert pages.claimed >= pages.under([each for each, _ in held])
        assert 0 <= pages.arena.kept <= most * HUGE // 2
    assert pages.arena.made + pages.arena.reused == results
    held.clear()
    pages.arena.keep_results(0)
    assert not pages.claimed
    assert pages.arena.tidy(time.monotonic()) is None


def test_a_result_gets_memory_that_is_kept_until_nobody_uses_it() -> None:
    pages, woken = Pages(), []
    with pytest.raises(OSError, match="no results"):
        _result(pages.arena, 1000)
    pages.arena.keep_results(2 * HUGE, lambda: woken.append(1))
    first = _result(pages.arena, HUGE)
    address = first.ctypes.data
    del first
    assert pages.arena.kept == HUGE
    second = _result(pages.arena, HUGE - 5)  # of the same size class
    assert second.ctypes.data == address
    assert (pages.arena.made, pages.arena.reused, woken) == (1, 1, [1])
    del second
    now = time.monotonic()
    assert pages.arena.tidy(now) == now + KEPT_S
    assert pages.claimed
    assert pages.arena.tidy(now + KEPT_S + 1) is None
    assert not pages.claimed
    assert pages.arena.kept == 0


def test_the_least_recently_used_sizes_make_room() -> None:
    pages = Pages()
    pages.arena.keep_results(2 * HUGE)
    held = [_result(pages.arena, nbytes) for nbytes in (HUGE // 2, HUGE, HUGE)]
    held.pop(0)
    held.pop(0)
    assert pages.arena.kept == HUGE * 3 // 2
    held.pop()
    assert pages.arena.kept == 2 * HUGE
    assert pages.arena.reused == 0
    held = [_result(pages.arena, HUGE) for _ in range(2)]
    assert pages.arena.reused == 2


def test_nobody_waits_for_a_lock_that_its_own_thread_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a signal's handler, which may shut down or reduce while its thread allocates."""
    monkeypatch.setattr("pyhvd.transport.arena._PATIENCE_S", 0.01)
    pages = Pages()
    pages.arena.keep_results(HUGE)
    claim = pages.arena.claim
    refused: list[str | None] = []

    def interrupted(offset: int, nbytes: int) -> None:
        claim(offset, nbytes)
        if not refused:
            try:
                _result(pages.arena, 1000)
            except OSError as exc:
                refused.append(exc.strerror)
            now = time.monotonic()
            assert pages.arena.tidy(now) == now + 1
            pages.arena.keep_results(0)

    pages.arena.claim = interrupted
    result = _result(pages.arena, HUGE)
    assert refused == ["another thread allocates in the arena"]
    del result
    assert not pages.claimed


def test_arrays_get_the_memory_that_is_kept_for_results() -> None:
    pages = Pages()
    pages.arena.keep_results(PAGES * HUGE)
    del [_result(pages.arena, HUGE) for _ in range(PAGES)][:]
    assert pages.arena.kept == PAGES * HUGE
    whole = pages.arena.empty((PAGES * HUGE,), np.dtype(np.uint8))
    assert whole.size == PAGES * HUGE
    assert pages.arena.kept == 0


def test_without_memory_nothing_changes() -> None:
    pages = Pages(room=1)
    first = pages.arena.empty((HUGE // 2,), np.dtype(np.uint8))
    with pytest.raises(OSError, match="no space left"):
        pages.arena.empty((HUGE,), np.dtype(np.uint8))
    assert pages.claimed == pages.under([first])
    second = pages.arena.empty((HUGE // 2,), np.dtype(np.uint8))
    assert pages.claimed == pages.under([first, second]) == {0}


def test_views_keep_the_memory() -> None:
    pages = Pages()
    array = pages.arena.empty((10, 10), np.dtype(np.float64))
    array[...] = 3
    view = array[2:4, ::2]
    del array
    gc.collect()
    assert pages.claimed == {0}
    assert view.tolist() == [[3.0] * 5] * 2
    del view
    gc.collect()
    assert not pages.claimed


def test_a_fork_gives_nothing_back() -> None:
    pages = Pages()
    array = pages.arena.empty((10,), np.dtype(np.uint8))
    pid = os.fork()
    if not pid:
        del array
        os._exit(0 if pages.claimed == {0} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pages.claimed == pages.under([array])


def test_a_finalizer_never_waits() -> None:
    """The garbage collector may run while the same thread changes the arena."""
    pages = Pages()
    inner = [pages.arena.empty((10,), np.dtype(np.uint8))]
    claim = pages.arena.claim

    def and_collect(offset: int, nbytes: int) -> None:
        inner.clear()
        claim(offset, nbytes)

    pages.arena.claim = and_collect
    done = threading.Event()

    def allocate() -> None:
        pages.arena.empty((HUGE,), np.dtype(np.uint8))
        done.set()

    threading.Thread(target=allocate, daemon=True).start()
    assert done.wait(10), "a finalizer waits for the arena's lock"
    assert pages.arena.empty((1,), np.dtype(np.uint8)).size == 1
