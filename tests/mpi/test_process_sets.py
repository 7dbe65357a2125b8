"""Process sets under mpiexec: static, dynamic, and made of communicators."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.api.process_sets import found_process_set, start_removal
from tests.conformance import sets
from tests.conformance.cases import Case, each, run
from tests.mpi.harness import on_ranks


def _use_all(given: list[hvd.ProcessSet]) -> None:
    for one in given:
        assert one.ranks is not None
        if hvd.rank() in one.ranks:
            sets.every_verb_in(one.ranks, one)
        else:
            sets.check_outsider(one)
    hvd.barrier()


@each(sets.DYNAMIC, 2, 4, count="nranks")
@on_ranks(env={"PYHVD_DYNAMIC_PROCESS_SETS": "1"}, warm=True)
def test_dynamic(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("given", ["nothing", "a communicator"])
@on_ranks(3, timeout=60)
def test_reductions_of_mpi4py_do_not_stop_the_others(given: str) -> None:
    """Rank 0 reduces objects by MPI while the others need its background thread for their process set."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD if given == "nothing" else MPI.COMM_WORLD.Dup()
    pair = hvd.ProcessSet([1, 2])
    hvd.init(None if given == "nothing" else comm, process_sets=[pair])
    for round_ in range(2):
        if hvd.rank():
            time.sleep(0.3)  # rank 0 is in MPI by then
            total = hvd.allreduce(np.ones(3), name=f"late.{round_}", op=hvd.Sum, process_set=pair)
            assert total.tolist() == [2.0] * 3
        assert comm.allreduce(1.0) == 3.0
        assert comm.reduce(hvd.rank(), root=1) == (3 if hvd.rank() == 1 else None)
        assert comm.scan(1) == hvd.rank() + 1
    hvd.barrier()


def _interrupted(call: Callable[[], object]) -> None:
    """Make a call before the other ranks do, and interrupt it by Ctrl-C."""
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call()


@pytest.mark.slow
@pytest.mark.any_mpi
@on_ranks(2, 4, timeout=240)
def test_three_thousand_sets_at_a_time() -> None:
    """MPICH has some 2,000 communicators; the sets of the same ranks share one."""
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    tuples = [ranks for n in range(1, size + 1) for ranks in itertools.combinations(range(size), n)]
    made: dict[int, hvd.ProcessSet] = {}
    for number in range(3000):
        ranks = tuples[number % len(tuples)]
        if rank in ranks:
            made[number] = found_process_set(ranks, f"set.{number}")
    for number in [*range(16), *range(16, 2980, 97), *range(2984, 3000)]:
        if number in made:
            total = hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=made[number])
            assert total.tolist() == [made[number].size()]
    removals = [start_removal(one) for one in made.values()]
    assert [removal for removal in removals if removal is None or removal.exception() is not None] == []
    for number in range(1000):
        ranks = tuples[-1 - number % 3]
        if rank in ranks:
            one = found_process_set(ranks, f"again.{number}")
            if number % 10 < 3:
                assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=one).tolist() == [one.size()]
            assert hvd.remove_process_set(one)
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [size]


@on_ranks(2)
def test_what_was_interrupted_goes_on() -> None:
    """The ranks change the sets when all have called, even if one rank's wait was interrupted."""
    hvd.init(process_sets="dynamic")
    pair = hvd.ProcessSet([1])
    for verb in (hvd.add_process_set, hvd.remove_process_set, hvd.add_process_set):
        if hvd.rank() == 0:
            _interrupted(lambda verb=verb: verb(pair))  # type: ignore[misc]
            hvd.broadcast_object("now", 0)
        else:
            hvd.broadcast_object(None, 0)
            verb(pair)
        hvd.barrier()
        assert pair.process_set_id == (None if verb is hvd.remove_process_set else 1)
    assert hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(pair)
    hvd.barrier()


WRONG: dict[str, Callable[[int], list[list[int]]]] = {
    "world": lambda rank: [[0, 1, 2, 3]],
    "twice": lambda rank: [[0], [0]],
    "beyond": lambda rank: [[0, 4]],
    "differ": lambda rank: [[rank]],
    "fewer": lambda rank: [[0]] * (rank == 2),
    "one refuses": lambda rank: [[0], [99 if rank == 3 else 1]],
}


@on_ranks(4)
def test_static_sets_and_failed_inits() -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    for kind, wrong in WRONG.items():
        bad = [hvd.ProcessSet(ranks) for ranks in wrong(rank)]
        with pytest.raises(ValueError, match=r"process set|there are only ranks"):
            hvd.init(process_sets=bad)
        assert not hvd.is_initialized(), kind
        assert [one.process_set_id for one in bad] == [None] * len(bad)
        with pytest.raises(NotImplementedError, match="comm"):
            hvd.init(process_sets=[hvd.ProcessSet(MPI.COMM_SELF)])
        static = [hvd.ProcessSet(ranks) for ranks in ([0, 1], [1, 2, 3], [3])]
        hvd.init(process_sets=static)
        assert [one.process_set_id for one in static] == [1, 2, 3], kind
        assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [4.0]
        if kind in ("world", "one refuses"):
            _use_all(static)
        with pytest.raises(ValueError, match="DYNAMIC_PROCESS_SETS"):
            hvd.add_process_set([0])
        hvd.shutdown()


@on_ranks(4)
def test_sets_of_communicators() -> None:
    """The halves of one split become two sets; each rank knows its own."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for color in (world.rank % 2, world.rank // 2):
        half = world.Split(color, world.rank)
        mine = hvd.ProcessSet(half)
        assert [mine.ranks, mine.process_set_id] == [None, None]
        hvd.init(comm=world, process_sets=[mine])
        members = half.allgather(world.rank)
        assert mine.ranks == members
        assert [mine.process_set_id] == [1 if 0 in members else 2]
        assert "communicator" in repr(mine)
        assert mine.mpi_comm is half
        assert hvd.global_process_set.mpi_comm is world
        sets.every_verb_in(members, mine)
        hvd.barrier()
        hvd.shutdown()
        assert mine.process_set_id is None
        half.Free()
    same = world.Dup()
    with pytest.raises(ValueError, match="duplicate of the global"):
        hvd.init(comm=world, process_sets=[hvd.ProcessSet(same)])
    same.Free()
    hvd.init()
    assert hvd.global_process_set.mpi_comm is None
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [4.0]


@on_ranks(4)
def test_init_with_some_of_the_ranks() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    members = [1, 3] if world.rank % 2 else [0, 2]
    for ranks in (members, members[::-1], np.array(members).tolist()):
        hvd.init(comm=ranks)
        assert (hvd.rank(), hvd.size()) == (world.rank // 2, 2)
        assert hvd.allgather(np.array([world.rank])).tolist() == members
        hvd.shutdown()
    part = world.Split(world.rank > 0, -world.rank)
    hvd.init(comm=part)
    assert (hvd.rank(), hvd.size()) == (part.rank, part.size)
    assert hvd.global_process_set.mpi_comm is part
    # pyhvd duplicated the communicator: the program may use and free the original.
    assert part.allreduce(1) == part.size
    part.Free()
    if world.rank:
        assert hvd.allgather(np.array([world.rank])).tolist() == [3, 2, 1]
    hvd.shutdown()
    for wrong in ([0, 0], [-1], [99], [], "01", 5, MPI.COMM_NULL, ["a"]):
        with pytest.raises(ValueError, match=r"rank|comm|process set"):
            hvd.init(comm=wrong)
        assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=f"rank {world.rank} calls init"):
        hvd.init(comm=[r for r in range(4) if r != world.rank])
    hvd.init()
    assert hvd.size() == 4
