"""Cases of handles and names: the result of an asynchronous call, and the matching of submissions."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import SECONDS, SEVERAL, Cases, Spawned, is_last, raised

CASES = Cases()


@CASES.add(*SEVERAL)
def waiting_with_a_limit() -> None:
    if is_last():
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="late")
    else:
        # The last rank submits it only after this rank's go.
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="late")
    assert handle.result(SECONDS).tolist() == [hvd.size()] * 2
    if not is_last():
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="gated")
        assert handle.wait(0.02) is False
        assert handle.done() is False
        assert hvd.poll(handle) is False
        with pytest.raises(TimeoutError, match="gated"):
            handle.result(0.01)
        with pytest.raises(TimeoutError, match="gated"):
            handle.exception(0)
        assert "pending" in repr(handle)
        hvd.allreduce(np.zeros(1), name="go")
    else:
        hvd.allreduce(np.zeros(1), name="go")
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="gated")
    assert handle.wait(SECONDS) is True
    assert handle.done()
    assert hvd.poll(handle)
    assert handle.exception() is None
    assert handle.name == "gated"
    assert "done" in repr(handle)
    first = hvd.synchronize(handle)
    assert hvd.synchronize(handle) is first
    assert handle.result() is first
    assert first.tolist() == [hvd.size()] * 2


@CASES.add()
def foreign_handles_are_refused() -> None:
    for thing in (None, 0, 17, "handle"):
        with pytest.raises(ValueError, match="handle"):
            hvd.poll(thing)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="handle"):
            hvd.synchronize(thing)  # type: ignore[arg-type]


@CASES.add(*SEVERAL)
def failed_handles() -> None:
    handle = hvd.allreduce_async(np.ones(3 if is_last() else 2), name="failed")
    error = raised(handle)
    assert isinstance(error, hvd.MismatchError)
    for _ in range(2):
        with pytest.raises(hvd.MismatchError) as caught:
            hvd.synchronize(handle)
        assert (str(caught.value), vars(caught.value)) == (str(error), vars(error))
    assert hvd.poll(handle)
    assert "failed" in repr(handle)


@CASES.add()
def callbacks() -> None:
    called: list[tuple[str, bool]] = []
    ended = threading.Event()
    handle = hvd.allreduce_async(np.ones(2), name="called")
    handle.add_done_callback(lambda h: called.append((h.name, h.done())))
    handle.add_done_callback(lambda h: ended.set())
    assert handle.wait(SECONDS)
    assert ended.wait(SECONDS)
    handle.add_done_callback(lambda h: called.append(("now", h is handle)))
    assert called == [("called", True), ("now", True)]


@CASES.add()
def coroutines() -> None:
    async def step(i: int) -> Any:
        return await hvd.allreduce_async(np.full(2, i), op=hvd.Sum, name=f"awaited.{i}")

    async def several() -> list[Any]:
        return list(await asyncio.wait_for(asyncio.gather(*(step(i) for i in range(5))), SECONDS))

    assert [out[0] for out in asyncio.run(several())] == [i * hvd.size() for i in range(5)]

    async def wrong() -> None:
        extent = 3 if is_last() and hvd.size() > 1 else 2
        await asyncio.wait_for(_awaited(hvd.allreduce_async(np.ones(extent), name="awaited badly")), SECONDS)

    if hvd.size() > 1:
        with pytest.raises(hvd.MismatchError):
            asyncio.run(wrong())


async def _awaited(handle: hvd.Handle) -> Any:
    return await handle


@CASES.add()
def names_come_in_any_order() -> None:
    """Each rank's threads submit in different orders; names alone match the submissions."""
    size, rank = hvd.size(), hvd.rank()

    def work(part: int) -> None:
        numbers = list(range(25))
        for turn in range(3):
            random.Random(100 * rank + 10 * part + turn).shuffle(numbers)
            handles = {
                i: hvd.allreduce_async(np.full(i + 1, i + part), op=hvd.Sum, name=f"any.{part}.{i}")
                for i in numbers
            }
            for i, handle in handles.items():
                assert handle.result(SECONDS).tolist() == [(i + part) * size] * (i + 1)

    threads = [Spawned(lambda part=part: work(part)) for part in range(4)]  # type: ignore[misc]
    for thread in threads:
        thread.join()


@CASES.add()
def synchronous_threads_in_different_orders() -> None:
    """Four threads of each rank block, started in an order that differs between ranks."""
    size, rank = hvd.size(), hvd.rank()

    def work(name: str) -> None:
        for step in range(15):
            assert hvd.allreduce(np.full(2, step), op=hvd.Sum, name=name)[0] == step * size
            assert hvd.allgather(np.array([rank]), name=f"{name}.g").tolist() == list(range(size))

    order = [f"thread.{(i + rank) % 4}" for i in range(4)]
    threads = [Spawned(lambda name=name: work(name)) for name in order]  # type: ignore[misc]
    for thread in threads:
        thread.join()


@CASES.add()
def a_name_is_free_once_its_handle_is_done() -> None:
    for step in range(50):
        handle = hvd.allreduce_async(np.full(2, step), op=hvd.Sum, name="again")
        assert handle.wait(SECONDS)
        assert handle.result()[0] == step * hvd.size()


@CASES.add(*SEVERAL)
def groups_are_one_unit() -> None:
    """No member completes before the last rank has submitted the group."""
    tensors = [np.full(2, i) for i in range(4)]
    if not is_last():
        handle = hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="unit of work")
        assert not handle.wait(0.02)
        hvd.allreduce(np.zeros(1), name="unit go")
    else:
        hvd.allreduce(np.zeros(1), name="unit go")
        handle = hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="unit of work")
    assert [out[0] for out in handle.result(SECONDS)] == [i * hvd.size() for i in range(4)]
