"""Cases of the life cycle: before init(), after shutdown(), and after another rank's shutdown or failure.

Each function gets this rank's number and the number of ranks. pyhvd is not initialised before or after it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import SECONDS, Spawned, outcome, raised

Ending = Callable[[int, int], None]


def _total() -> float:
    return float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])


def not_initialized(rank: int, size: int) -> None:
    """Every verb raises the same error before init() and after shutdown()."""
    x = np.ones(2)
    calls: list[Callable[[], object]] = [
        *(hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size),
        *(hvd.mpi_threads_supported, hvd.join, hvd.barrier),
        *(lambda: hvd.allreduce(x), lambda: hvd.allreduce_(x), lambda: hvd.allreduce_async(x)),
        *(lambda: hvd.grouped_allreduce([x]), lambda: hvd.allgather(x), lambda: hvd.broadcast(x, 0)),
        *(lambda: hvd.alltoall(x), lambda: hvd.reducescatter(x), lambda: hvd.broadcast_object(1)),
        *(lambda: hvd.allgather_object(1), lambda: hvd.add_process_set([0]), lambda: hvd.allreduce("wrong")),
        lambda: hvd.remove_process_set(hvd.global_process_set),
    ]
    for turn in range(2):
        assert not hvd.is_initialized()
        assert hvd.global_process_set.ranks is None
        for call in calls:
            error = outcome(call)
            assert isinstance(error, hvd.NotInitializedError), repr(error)
            assert isinstance(error, ValueError)
            assert isinstance(error, hvd.HorovodInternalError)
            assert "init()" in str(error)
        hvd.shutdown()
        if turn == 0:
            hvd.init()
            assert _total() == size
            hvd.shutdown()


def in_a_callback(rank: int, size: int) -> None:
    """In a callback, shutdown() does not wait and init() fails: each would wait for its own thread."""
    hvd.init()
    seen: list[BaseException | None] = []
    alone = hvd.allreduce_async(np.ones(1), name=f"alone.{rank}")
    alone.add_done_callback(lambda _: seen.extend(outcome(call) for call in (hvd.shutdown, hvd.init)))
    hvd.barrier()
    if rank == size - 1:
        hvd.shutdown()
    error = raised(alone)
    assert isinstance(error, hvd.ShutDownError), repr(error)
    assert error.rank == size - 1
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert [type(each) for each in seen] == [type(None), RuntimeError], seen
    assert "callback" in str(seen[1])


def again_and_again(rank: int, size: int) -> None:
    """init() works after shutdown(), several times; a second init() or shutdown() has no effect."""
    for turn in range(5):
        hvd.init()
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (rank, size)
        assert hvd.global_process_set.ranks == list(range(size))
        assert _total() == size, turn
        for _ in range(3):
            assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="kept name")[1] == size
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()


def pending_at_shutdown(rank: int, size: int) -> None:
    """Calls that wait for a rank that shuts down end in an error that names the rank."""
    hvd.init()
    assert _total() == size
    if rank == size - 1:
        hvd.barrier()
        hvd.shutdown()
    else:
        handles = [hvd.allreduce_async(np.ones(2), name=f"pending.{i}") for i in range(3)]
        handles.append(hvd.grouped_allreduce_async([np.ones(2)] * 2, name="pending group"))
        hvd.barrier()  # so that no rank submits after the shutdown
        for handle in handles:
            error = raised(handle)
            assert isinstance(error, hvd.ShutDownError), repr(error)
            assert error.rank == size - 1
            assert f"rank {size - 1}" in str(error)
        # This rank's local queries still work.
        assert hvd.is_initialized()
        assert (hvd.rank(), hvd.size()) == (rank, size)
        for call in (
            lambda: hvd.allreduce(np.ones(1)),
            hvd.barrier,
            hvd.join,
            lambda: hvd.broadcast_object(1),
        ):
            error = outcome(call)
            assert isinstance(error, hvd.ShutDownError), repr(error)
            assert error.rank == size - 1
        if rank == 0:
            hvd.shutdown()
    # Ranks that have not called shutdown() can initialise again too.
    hvd.init()
    assert _total() == size
    hvd.shutdown()


def own_pending_at_shutdown(rank: int, size: int) -> None:
    """A rank's own pending tensors fail too, even if another thread waits for them."""
    hvd.init()
    errors: list[BaseException | None] = []
    if rank == 0:
        handle = hvd.allreduce_async(np.ones(2), name="own")
        waiter = Spawned(lambda: errors.append(raised(handle)))
        hvd.shutdown()
        waiter.join()
        assert isinstance(errors[0], hvd.ShutDownError), repr(errors[0])
        assert errors[0].rank == 0
    else:
        error = outcome(lambda: hvd.allreduce_async(np.ones(1), name="other").result(SECONDS))
        assert isinstance(error, hvd.ShutDownError), repr(error)
        assert error.rank == 0
        hvd.shutdown()


def join_and_shutdown(rank: int, size: int) -> None:
    """A shutdown ends another rank's join() with an error."""
    hvd.init()
    if rank == size - 1:
        hvd.shutdown()
    else:
        error = outcome(hvd.join)
        assert isinstance(error, hvd.ShutDownError), repr(error)
        hvd.shutdown()
    hvd.init()
    assert hvd.join() in range(size)
    hvd.shutdown()


def wrong_arguments(rank: int, size: int) -> None:
    """A failed init() leaves pyhvd uninitialised, and the next init() works."""
    for sets in ("static", [[0]], [0], 5, [hvd.global_process_set]):
        with pytest.raises((ValueError, TypeError)):
            hvd.init(process_sets=sets)  # type: ignore[arg-type]
        assert not hvd.is_initialized()
    hvd.init()
    assert _total() == size
    hvd.shutdown()


ENDINGS: dict[str, Ending] = {
    each.__name__: each
    for each in (
        not_initialized,
        in_a_callback,
        again_and_again,
        pending_at_shutdown,
        own_pending_at_shutdown,
        join_and_shutdown,
        wrong_arguments,
    )
}
