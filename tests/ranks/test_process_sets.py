"""Test process sets on ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.testing import RanksFailed, run_ranks
from tests.conformance import joining, sets
from tests.conformance.cases import SECONDS, Case, each, on_threads, outcome


@each([*sets.DYNAMIC, *joining.IN_SETS])
def test_dynamic(case: Case, size: int) -> None:
    on_threads(case, size, dynamic_process_sets=True)


@pytest.mark.parametrize("dynamic", ["dynamic", None])
def test_the_word_dynamic(dynamic: str | None) -> None:
    def rank() -> None:
        hvd.init(process_sets=dynamic)
        if dynamic:
            added = hvd.add_process_set([1])
            assert added.process_set_id == 1
            assert hvd.remove_process_set(added)
        else:
            with pytest.raises(ValueError, match="DYNAMIC_PROCESS_SETS"):
                hvd.add_process_set([1])
            assert not hvd.remove_process_set(hvd.ProcessSet([1]))  # never registered
        assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]

    run_ranks(2, rank, timeout=SECONDS, init=False)


def test_static_sets() -> None:
    def rank() -> None:
        members = [[0, 1], [1, 2, 3], [3], [0, 2]]
        static = [hvd.ProcessSet(ranks) for ranks in members]
        assert [s.process_set_id for s in static] == [None] * 4
        hvd.init(process_sets=static)
        assert [s.process_set_id for s in static] == [1, 2, 3, 4]
        for process_set, ranks in zip(static, members, strict=True):
            if hvd.rank() in ranks:
                sets.every_verb_in(ranks, process_set)
            else:
                sets.check_outsider(process_set)
        hvd.barrier()
        hvd.shutdown()
        assert [s.process_set_id for s in static] == [None] * 4
        assert [s.ranks for s in static] == members

    run_ranks(4, rank, timeout=SECONDS, init=False)


WRONG: dict[str, Callable[[int], list[list[int]]]] = {
    "world": lambda rank: [[0, 1]],
    "twice": lambda rank: [[0], [0]],
    "beyond": lambda rank: [[0, 2]],
    "differ": lambda rank: [[rank]],
    "fewer": lambda rank: [[0]] * rank,
    "one refuses": lambda rank: [[0], [99 * rank]],
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_sets_fail_everywhere_and_can_be_corrected(kind: str) -> None:
    def rank() -> None:
        mine = int(threading.current_thread().name.removeprefix("rank-"))
        wrong = [hvd.ProcessSet(ranks) for ranks in WRONG[kind](mine)]
        with pytest.raises(ValueError, match=r"process set|there are only ranks"):
            hvd.init(process_sets=wrong)
        assert not hvd.is_initialized()
        assert [s.process_set_id for s in wrong] == [None] * len(wrong)
        with pytest.raises(hvd.NotInitializedError):
            hvd.rank()
        hvd.init(process_sets=[hvd.ProcessSet([1])])
        assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]

    run_ranks(2, rank, timeout=SECONDS, init=False)


@pytest.mark.parametrize("end", ["shutdown", "error"])
@pytest.mark.parametrize("hosts", [None, [0, 1, 1]], ids=str)
def test_a_job_that_ends_while_a_member_has_joined(end: str, hosts: list[int] | None) -> None:
    """The joined rank, and a member that waits for the rank that ends, get the cause."""

    def rank() -> None:
        first, second = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 2])
        if hvd.rank() == 2:
            while not isinstance(outcome(lambda: hvd.barrier(first)), hvd.MismatchError):
                pass
            assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=first).tolist() == [1.0]
            if end == "error":
                raise KeyError("this one")
            hvd.shutdown()
            return
        call = (
            hvd.join if hvd.rank() == 0 else lambda: hvd.allreduce(np.ones(1), name="x", process_set=second)
        )
        with pytest.raises(hvd.HorovodInternalError, match="rank 2"):
            call()

    def run() -> None:
        run_ranks(3, rank, timeout=SECONDS, knobs={"dynamic_process_sets": True}, hosts=hosts)

    if end == "shutdown":
        run()
        return
    with pytest.raises(RanksFailed, match="rank 2 of 3 raised KeyError"):
        run()
