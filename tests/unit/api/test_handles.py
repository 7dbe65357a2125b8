"""Handles: waiting, results, errors, callbacks, coroutines; poll and synchronize."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
from typing import Any

import pytest

from pyhvd.api.handles import Handle, QueuedHandle, poll, synchronize
from pyhvd.devices.pending import DeviceWaits
from pyhvd.errors import MismatchError, ShutDownError
from pyhvd.observe.metrics import Meter

NO_DEVICE = DeviceWaits(lambda: None, None)


class Made(QueuedHandle):
    """A handle that counts its flushes."""

    __slots__ = ("flushes",)

    def __init__(self, parts: int = 1, name: str = "x") -> None:
        self.flushes = 0
        meter = Meter(0, 1, timed=False)

        def result(outputs: list[Any]) -> Any:
            return outputs[0] if parts == 1 else list(outputs)

        super().__init__(name, parts, self._count, result, NO_DEVICE, meter)

    def _count(self) -> None:
        self.flushes += 1


def ended(result: Any = "out", error: BaseException | None = None) -> Made:
    handle = Made()
    handle.complete(0, result, error)
    return handle


def test_result_comes_once_all_parts_have() -> None:
    handle = Made(3)
    for part in (2, 0):
        handle.complete(part, f"r{part}", None)
        assert not handle.done()
        assert not poll(handle)
    handle.complete(1, "r1", None)
    assert handle.done()
    assert poll(handle)
    assert handle.result() == synchronize(handle) == ["r0", "r1", "r2"]
    assert handle.exception() is None
    assert handle.name == "x"


def test_a_handle_of_nothing_has_ended() -> None:
    handle = Made(0)
    assert handle.done()
    assert handle.result() == []


def test_waiting_asks_for_a_flush_and_polling_does_not() -> None:
    handle = Made()
    assert not handle.wait(0)
    assert handle.flushes == 1
    assert not handle.done()
    assert handle.flushes == 1
    handle.complete(0, None, None)
    assert handle.wait()
    assert handle.flushes == 1


@pytest.mark.parametrize("timeout", [0, -1.0, 0.01])
def test_timeouts(timeout: float) -> None:
    handle = Made(name="grad")
    assert not handle.wait(timeout)
    with pytest.raises(TimeoutError, match="'grad' has not ended within"):
        handle.result(timeout)
    with pytest.raises(TimeoutError, match="'grad' has not ended within"):
        handle.exception(timeout)
    handle.complete(0, 1, None)
    assert handle.result(timeout) == 1


@pytest.mark.parametrize("timeout", [None, 60.0, 1e12, math.inf])
def test_many_threads_wait_for_one_handle(timeout: float | None) -> None:
    about_to_sleep = threading.Semaphore(0)
    meter = Meter(0, 1, timed=False)
    handle = QueuedHandle("x", 1, about_to_sleep.release, lambda outputs: outputs[0], NO_DEVICE, meter)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(handle.result(timeout)), daemon=True) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        # A thread that asked for the flush saw the handle unfinished, so it must be woken.
        assert about_to_sleep.acquire(timeout=30)
    handle.complete(0, "out", None)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a waiter was not woken"
    assert results == ["out"] * 8


def test_the_first_error_is_the_one_shown_and_comes_last() -> None:
    handle = Made(3)
    first = MismatchError("first")
    handle.complete(1, None, first)
    assert not handle.done(), "the other parts are still in use"
    handle.complete(0, "fine", None)
    handle.complete(2, None, MismatchError("second"))
    for _ in range(2):
        with pytest.raises(MismatchError, match="first"):
            handle.result()
        with pytest.raises(MismatchError, match="first"):
            synchronize(handle)
    assert str(handle.exception()) == "first"


def test_an_error_raised_again_and_again_does_not_grow() -> None:
    handle = ended(error=MismatchError("no"))
    depths = []
    for _ in range(3):
        try:
            handle.result()
        except MismatchError as exc:
            trace, depth = exc.__traceback__, 0
            while trace is not None:
                trace, depth = trace.tb_next, depth + 1
            depths.append(depth)
    assert depths[0] == depths[1] == depths[2]


def test_callbacks_run_once_in_order_and_at_once_when_late(caplog: pytest.LogCaptureFixture) -> None:
    handle, calls = Made(), []
    handle.add_done_callback(lambda h: calls.append((1, h.done())))

    def bad(_: Handle) -> None:
        raise KeyError("mine")

    handle.add_done_callback(bad)
    handle.add_done_callback(lambda h: calls.append((2, h.result())))
    assert calls == []
    with caplog.at_level(logging.ERROR, "pyhvd"):
        handle.complete(0, "out", None)
    assert "a callback of 'x' raised" in caplog.text
    handle.add_done_callback(lambda h: calls.append((3, h is handle)))
    assert calls == [(1, True), (2, "out"), (3, True)]


def test_await_before_and_after_the_end() -> None:
    async def main() -> list[Any]:
        handle = Made()
        thread = threading.Timer(0.01, handle.complete, (0, "out", None))
        thread.start()
        first = await handle
        thread.join()
        assert handle.flushes == 1
        return [first, await handle, await ended("done")]

    assert asyncio.run(main()) == ["out", "out", "done"]


def test_await_raises_the_error() -> None:
    async def main() -> None:
        await ended(error=MismatchError("no"))

    with pytest.raises(MismatchError, match="no"):
        asyncio.run(main())


def test_many_coroutines_await_one_handle() -> None:
    async def use(handle: QueuedHandle) -> Any:
        return await handle

    async def main() -> list[Any]:
        handle = Made()
        tasks = [asyncio.ensure_future(use(handle)) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        handle.complete(0, "out", None)
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    assert isinstance(results.pop(2), asyncio.CancelledError)
    assert results == ["out"] * 4


def test_an_await_that_was_given_up_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    """The collective completes after the event loop has closed, without an error in the log."""
    handle = Made()

    async def use() -> Any:
        return await handle

    async def main() -> None:
        await asyncio.wait_for(use(), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    handle.complete(0, "out", None)
    assert handle.result() == "out"
    assert caplog.text == ""


def test_an_error_that_was_never_read_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def drop(error: BaseException | None, look: bool) -> str:
        caplog.clear()
        handle = ended(error=error)
        if look:
            handle.exception()
        del handle
        gc.collect()
        return caplog.text

    text = "the error of 'x' was never read; call result(): shut down"
    assert text in drop(ShutDownError("shut down"), look=False)
    assert drop(ShutDownError("shut down"), look=True) == ""
    assert drop(None, look=False) == ""


def test_repr_says_the_state() -> None:
    states = [repr(Made()), repr(ended()), repr(ended(error=MismatchError("no")))]
    assert states == [f"<pyhvd.Handle 'x' {state}>" for state in ("pending", "done", "failed")]


@pytest.mark.parametrize("foreign", [None, 3, "x", object(), [ended()]])
def test_what_is_no_handle(foreign: Any) -> None:
    for verb in (poll, synchronize):
        with pytest.raises(
            ValueError, match="expected a handle from one of pyhvd's \\*_async functions, not"
        ):
            verb(foreign)
