"""The loaders of ``horovod.data``."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pyhvd.aliases.as_horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    """Yields numbers; counts how many it has read."""

    def __init__(self, count: int, *, fails_at: int = -1) -> None:
        self.count, self.fails_at = count, fails_at
        self.read = 0
        self.paused = threading.Semaphore(0)

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[Any]:
        for number in range(self.count):
            if number == self.fails_at:
                raise OSError("the disk is gone")
            self.read += 1
            self.paused.release()
            yield None if number == 1 else number

    def _process_batch(self, batch: Any) -> Any:
        return batch, threading.current_thread() is threading.main_thread()


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    """The same, ahead of the program."""


WANTED = [(0, True), (None, True), (2, True), (3, True), (4, True)]


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "pyhvd-data"]


@pytest.mark.parametrize("size", [0, 1, 2, 5, 64])
def test_batches_come_in_order_each_time(size: int) -> None:
    loader = AsyncNumbers(size, 5)
    assert (len(loader), list(loader), list(loader)) == (5, WANTED, WANTED)
    assert list(AsyncNumbers(async_loader_queue_size=size, count=5)) == list(Numbers(5)) == WANTED
    assert list(AsyncNumbers(size, 0)) == []
    assert _threads() == []


def test_the_thread_reads_no_further_than_asked() -> None:
    loader = AsyncNumbers(3, 100)
    batches = iter(loader)
    next(batches)
    for _ in range(5):  # one that the program has, three that wait, one that waits for room
        assert loader.paused.acquire(timeout=10)
    assert not loader.paused.acquire(timeout=0.1)
    assert loader.read == 5


@pytest.mark.parametrize("how", ["break", "delete", "close"])
def test_an_iteration_that_is_left_ends_its_thread(how: str) -> None:
    loader = AsyncNumbers(2, 100)
    batches = iter(loader)
    assert next(batches) == (0, True)
    if how == "delete":
        del batches
        gc.collect()
    elif how == "break":
        batches.close()  # type: ignore[attr-defined]  # as CPython does after a break
    else:
        loader.close_async_loader()
        assert len(list(batches)) <= 2
        loader.close_async_loader()
    assert _threads() == []
    assert [batch for batch, _ in loader] == [0, None, *range(2, 100)]


def test_an_error_comes_after_the_batches_before_it() -> None:
    found = []
    with pytest.raises(OSError, match="the disk is gone"):  # noqa: PT012 - it reads on
        for batch, _ in AsyncNumbers(4, 5, fails_at=3):
            found.append(batch)
    assert found == [0, None, 2]
    assert _threads() == []


def test_what_a_loader_lacks_is_named() -> None:
    class Empty(AsyncDataLoaderMixin, BaseDataLoader):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty has no _iterate\(\)"):
        list(Empty())
    with pytest.raises(TypeError, match=r"Empty has no __len__\(\)"):
        len(Empty())
