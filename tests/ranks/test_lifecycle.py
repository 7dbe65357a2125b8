"""Test start and end of ranks that are threads; a rank's failure is the cause of the others' errors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.testing import RanksFailed, run_ranks
from tests.conformance.cases import SECONDS
from tests.conformance.endings import ENDINGS


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ENDINGS)
def test_ending(name: str, size: int) -> None:
    def rank() -> None:
        ENDINGS[name](int(threading.current_thread().name.removeprefix("rank-")), size)

    run_ranks(size, rank, timeout=SECONDS, init=False)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_rank_that_raised_is_the_cause(bad: int) -> None:
    def rank() -> None:
        hvd.allreduce(np.ones(1))
        if hvd.rank() == bad:
            raise KeyError("the cause")
        hvd.allreduce(np.ones(1), name="waits")

    with pytest.raises(RanksFailed, match=f"rank {bad} of 3 raised KeyError") as caught:
        run_ranks(3, rank, timeout=SECONDS)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.errors.keys() == {0, 1, 2}
    for other in {0, 1, 2} - {bad}:
        error = caught.value.errors[other]
        assert isinstance(error, hvd.RankFailedError), repr(error)
        assert error.rank == bad
        assert "KeyError: 'the cause'" in str(error)


def test_a_hang_is_an_error_with_stacks() -> None:
    over = threading.Event()
    threads: list[threading.Thread] = []

    def rank() -> None:
        threads.append(threading.current_thread())
        if hvd.rank() == 0:
            hvd.barrier()
        else:
            over.wait()

    with pytest.raises(RanksFailed, match="have not ended within 1 s") as caught:
        run_ranks(2, rank, timeout=1.0)
    assert "hvd.barrier()" in str(caught.value)
    over.set()
    for thread in threads:  # later tests count this process's ranks
        thread.join(10)
        assert not thread.is_alive()
