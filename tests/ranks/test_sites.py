"""Test that errors name the line of a submission, and the error of another rank."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.testing import RanksFailed, run_ranks

both_lanes = pytest.mark.parametrize("fast_lane", [False, True])


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(mark)]
    return number


def reduce_here(n: int) -> object:
    return hvd.allreduce(np.ones(n), name="x")  # the first place


def reduce_there(n: int) -> object:
    return hvd.allreduce(np.ones(n), name="x")  # the other place


@both_lanes
@pytest.mark.parametrize("remembered", [False, True])
def test_a_mismatch_knows_the_lines(fast_lane: bool, remembered: bool) -> None:
    def body() -> None:
        for _ in range(3 if remembered else 0):
            reduce_here(4)
        with pytest.raises(hvd.MismatchError) as caught:
            reduce_there(5) if hvd.rank() == 1 else reduce_here(4)
        lines = [line_of("# the first place"), line_of("# the other place"), line_of("# the first place")]
        names = ["reduce_here", "reduce_there", "reduce_here"]
        for rank, value in caught.value.per_rank.items():
            assert value.rank == rank
            assert value.host
            assert value.value == ("(5,)" if rank == 1 else "(4,)")
            assert value.site.endswith(f"test_sites.py:{lines[rank]} in {names[rank]}"), value
        here, there = (caught.value.per_rank[rank].site for rank in (0, 1))
        assert str(caught.value).endswith(f"Submitted at: ranks 0, 2: {here}; rank 1: {there}.")
        with pytest.raises(hvd.MismatchError) as again:
            reduce_there(5) if hvd.rank() == 1 else reduce_here(4)
        assert again.value.per_rank == caught.value.per_rank

    run_ranks(3, body, timeout=30, knobs={"fast_lane": fast_lane})


def test_groups_and_unnamed_tensors_have_lines_too() -> None:
    def body() -> None:
        with pytest.raises(hvd.MismatchError) as caught:
            hvd.grouped_allreduce([np.ones(1)] * (2 + hvd.rank()), name="g")
        line = sys._getframe().f_lineno - 1
        assert {r: v.value for r, v in caught.value.per_rank.items()} == {0: "2 tensors", 1: "3 tensors"}
        assert [v.site[-11:] for v in caught.value.per_rank.values()] == [f":{line} in body"] * 2
        with pytest.raises(hvd.MismatchError) as caught:
            hvd.allgather(np.ones((1, 1 + hvd.rank())))
        line = sys._getframe().f_lineno - 1
        assert [v.site[-11:] for v in caught.value.per_rank.values()] == [f":{line} in body"] * 2

    run_ranks(2, body, timeout=30)


def test_a_refusal_brings_its_traceback() -> None:
    def refuse() -> None:
        hvd.alltoall(np.ones(4), [9, 9], name="exchange")

    def body() -> None:
        if hvd.rank() == 0:
            with pytest.raises(ValueError, match="sum to 18"):
                refuse()
            hvd.barrier()
            return
        with pytest.raises(hvd.RankFailedError) as caught:
            hvd.alltoall(np.ones(4), [2, 2], name="exchange")
        cause = caught.value.__cause__
        assert isinstance(cause, hvd.RemoteError)
        assert cause.rank == 0
        assert "in check_splits" in cause.traceback
        assert "ValueError: splits [9, 9] sum to 18" in cause.traceback
        hvd.barrier()

    run_ranks(2, body, timeout=30)


def test_the_first_ranks_traceback_travels() -> None:
    told = threading.Barrier(2)

    def fail() -> None:
        raise KeyError("the root cause")

    def body() -> None:
        if hvd.rank() == 1:
            fail()
        with pytest.raises(hvd.RankFailedError) as caught:
            hvd.allreduce(1, name="x")
        assert "in fail" in str(caught.value.__cause__)
        assert str(caught.value.__cause__).endswith("  | KeyError: 'the root cause'")
        told.wait(10)

    with pytest.raises(RanksFailed, match="rank 1 of 3 raised KeyError"):
        run_ranks(3, body, timeout=30)
