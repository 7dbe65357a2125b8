"""Cases of join(): uneven numbers of steps, every op with a joined rank, several rounds.

The cases of ``IN_SETS`` need the knob ``dynamic_process_sets``.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import SECONDS, SEVERAL, Cases, Spawned, is_last, last, outcome, raised
from tests.conformance.oracle import DTYPES, OPS, SUMMABLE, inputs, reduced, rows, same

CASES, IN_SETS = Cases(), Cases()


@CASES.add()
def uneven_steps() -> None:
    """Rank r has r + 1 batches; an average still divides by the size of the world."""
    size, rank = hvd.size(), hvd.rank()
    for _ in range(2):
        for step in range(rank + 1):
            alive = [float(r + 1) for r in range(size) if r >= step]
            mine = np.full(3, rank + 1.0)
            assert np.allclose(hvd.allreduce(mine, name="grad"), sum(alive) / size)
            assert hvd.allreduce(mine, name="sum", op=hvd.Sum)[0] == sum(alive)
        assert hvd.join() == last()


@CASES.add()
def the_last_to_join_is_known_to_all() -> None:
    for chosen in range(hvd.size()):
        if hvd.rank() != chosen or hvd.size() == 1:
            assert hvd.join() == chosen
        else:
            # A barrier fails once the others have joined.
            while True:
                error = outcome(hvd.barrier)
                if isinstance(error, hvd.MismatchError) and len(error.per_rank) == hvd.size() - 1:
                    break
            assert hvd.join() == chosen


def _alone_after_joins(process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
    """Return on one member of a set once every other one has joined."""
    while True:
        error = outcome(lambda: hvd.barrier(process_set))
        assert isinstance(error, hvd.MismatchError), repr(error)
        if len(error.per_rank) == (process_set.size() or 0) - 1:
            return


@CASES.add(*SEVERAL)
def every_dtype_and_op_with_joined_ranks() -> None:
    """Min, Max and Product stay right, since joined ranks contribute the identity element."""
    if is_last():
        _alone_after_joins()
        handles = []
        for name, ops in OPS.items():
            mine = inputs(name, (5, 2), 1, seed=4)
            mine[0].reshape(-1)[0] = 0
            for op in ops:
                handles.append((name, op, mine, hvd.allreduce_async(mine[0], op=op)))
                handles.append((name, op, mine, hvd.grouped_allreduce_async([mine[0]], op=op)))
        for name, op, mine, handle in handles:
            got = handle.result(30)
            out = got[0] if isinstance(got, list) else got
            same(out, reduced(op, mine, size=hvd.size()), f"{name} {op!r} with joined ranks")
        own = inputs("float32", (4,), 1, seed=4)
        want = reduced(hvd.Sum, own, 0.5, 3.0)
        same(hvd.allreduce(own[0], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), want)
    assert hvd.join() == last()


@CASES.add(3, 4)
def two_ranks_left() -> None:
    """Joined and active ranks share one reduction; the coordinator may be a joined one."""
    size, rank = hvd.size(), hvd.rank()
    live = (1, size - 1)
    if rank in live:
        for name in SUMMABLE:
            parts = inputs(name, (6,), size, seed=2)
            got = hvd.allreduce(parts[rank], name=f"two.{name}")
            # This call waits until the others have joined, so exactly two ranks contribute.
            same(got, reduced(hvd.Average, [parts[r] for r in live], size=size), name)
            gathered = hvd.allgather(parts[rank], name=f"two.g.{name}")
            same(gathered, np.concatenate([parts[r] for r in live]), name)
    assert hvd.join() in range(size)


@CASES.add(*SEVERAL)
def moving_ops_with_joined_ranks() -> None:
    size = hvd.size()
    if is_last():
        _alone_after_joins()
        for name in DTYPES:
            (mine,) = inputs(name, (2 * size + 1, 2), 1, seed=5)
            same(hvd.allgather(mine), mine, name)
            same(hvd.grouped_allgather([mine, mine[:0], mine[:1]])[2], mine[:1], name)
            same(hvd.broadcast(mine, last()), mine, name)
            if name in SUMMABLE:
                want = reduced(hvd.Sum, [mine])[rows(len(mine), size, last())]
                same(hvd.reducescatter(mine, op=hvd.Sum), want, name)
                same(hvd.grouped_reducescatter([mine, mine], op=hvd.Sum)[1], want, name)
    assert hvd.join() == last()


@CASES.add(*SEVERAL)
def what_needs_everybody_fails_with_joined_ranks() -> None:
    size = hvd.size()
    if is_last():
        _alone_after_joins()
        calls = (
            lambda: hvd.alltoall(np.zeros(size), name="needs"),
            lambda: hvd.broadcast(np.zeros(2), 0, name="needs"),
            hvd.barrier,
        )
        for call in calls:
            error = outcome(call)
            assert isinstance(error, hvd.MismatchError), repr(error)
            assert error.per_rank.keys() == set(range(size - 1))
            assert "join" in str(error)
    assert hvd.join() == last()
    assert hvd.alltoall(np.zeros(size), name="needs").tolist() == [0.0] * size


@CASES.add(*SEVERAL)
def pending_before_the_join() -> None:
    """A rank's submissions before its join() are still contributed."""
    size, rank = hvd.size(), hvd.rank()
    for _ in range(2):
        handles = [hvd.allreduce_async(np.full(2, rank + i), op=hvd.Sum, name=f"p.{i}") for i in range(5)]
        handles.append(hvd.allgather_async(np.array([rank]), name="p.g"))
        assert hvd.join() in range(size)
        for i in range(5):
            assert handles[i].result(30).tolist() == [sum(r + i for r in range(size))] * 2
        assert handles[5].result(30).tolist() == list(range(size))


@CASES.add()
def three_rounds_with_cached_names() -> None:
    size, rank = hvd.size(), hvd.rank()
    for turn in range(3):
        for step in range(4):
            assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="round")[0] == size, (turn, step)
        if rank == turn % size:
            extra = hvd.allreduce(np.ones(2), op=hvd.Sum, name="round")
            assert extra[0] == 1.0
        hvd.join()


@CASES.add(*SEVERAL)
def a_joined_rank_submits_nothing() -> None:
    """Another thread of a joined rank cannot submit until the last rank has joined."""
    told = _files_of_the_joined("told")
    if not is_last():
        joined = Spawned(lambda: _check_last(hvd.join()))
        error = _refused_when_joined()
        # These errors stay local: no other rank waits for the calls.
        wrong = outcome(lambda: hvd.allreduce(np.array(["text"]), name="healthy"))
        empty = outcome(lambda: hvd.grouped_allreduce([], name="empty"))
        told[hvd.rank()].touch()
        assert "joined" in str(error)
        assert isinstance(wrong, hvd.UnsupportedDtypeError), repr(wrong)
        assert "joined" in str(empty)
        joined.join()
    else:
        _until(lambda: all(path.exists() for path in told), "every other rank is refused")
        shutil.rmtree(told[0].parent)
        _alone_after_joins()  # the joins may still have been in flight
        assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="healthy").tolist() == [1.0, 1.0]
        assert hvd.join() == last()


def _files_of_the_joined(name: str) -> list[Path]:
    """Return one file per rank but the last: a joined rank cannot signal by a collective."""
    made = tempfile.mkdtemp(prefix="pyhvd-told-") if is_last() else None
    folder = Path(hvd.broadcast_object(made, root_rank=last(), name=name))
    return [folder / str(rank) for rank in range(last())]


def _refused_when_joined(
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> hvd.HorovodInternalError:
    """Submit until a submission is refused; submissions before this rank's join are contributions."""
    refused: list[hvd.HorovodInternalError] = []

    def submit() -> bool:
        try:
            hvd.allreduce_async(np.ones(1), name=f"own.{next(numbers)}", process_set=process_set)
        except hvd.HorovodInternalError as error:
            refused.append(error)
        return bool(refused)

    numbers = itertools.count()
    _until(submit, "this rank has joined")
    return refused[0]


def _until(true: Callable[[], bool], what: str) -> None:
    """Poll a condition every millisecond until it is true, in bounded time."""
    until = time.monotonic() + SECONDS / 2
    while not true():
        assert time.monotonic() < until, f"not in {SECONDS / 2} s: {what}"
        time.sleep(0.001)


@CASES.add(*SEVERAL)
def a_thread_races_with_join() -> None:
    """A submission concurrent with join() is either contributed or refused: never lost, never left over."""
    told = _files_of_the_joined("refused")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for turn in range(20):
            _race([path.with_suffix(f".{turn}") for path in told])
    finally:
        sys.setswitchinterval(interval)
    if is_last():
        shutil.rmtree(told[0].parent)


def _race(told: list[Path]) -> None:
    """Run one race; each rank adds its own decimal digit, so that the sum shows the contributors.

    A rank creates its file in *told* after a refusal. Before that, its thread may be about to submit. A
    submission after the last rank has joined is a normal contribution.
    """
    rank, here = hvd.rank(), set(range(hvd.size()))
    mine = np.array([10.0**rank])

    def go_on() -> None:
        left = here
        while True:
            total = int(hvd.allreduce(mine, op=hvd.Sum, name="race")[0])
            taking_part = {r for r in here if total // 10**r % 10 == 1}
            assert total == sum(10**r for r in taking_part), total
            assert rank in taking_part <= left, (taking_part, left)
            left = taking_part
            if is_last() and left == {rank}:
                return

    if is_last():
        go_on()
        _until(lambda: all(path.exists() for path in told), "every other rank has refused")
        for _ in range(3):
            assert hvd.allreduce(mine, op=hvd.Sum, name="race")[0] == mine[0]
        assert hvd.join() == last()
    else:
        others = Spawned(lambda: _expect_refusal(go_on, told[rank]))
        _check_last(hvd.join())
        others.join()
    assert hvd.allreduce(mine, op=hvd.Sum, name="race")[0] == sum(10.0**r for r in here)


def _expect_refusal(call: Callable[[], None], told: Path) -> None:
    error = outcome(call)
    told.touch()
    assert "this rank has joined" in str(error), repr(error)


@CASES.add()
def unnamed_calls_after_uneven_steps() -> None:
    """Ranks with different numbers of unnamed calls match again after a join()."""
    size, rank = hvd.size(), hvd.rank()
    for _ in range(2):
        for step in range(rank + 1):
            assert hvd.allreduce(np.ones(2), op=hvd.Sum)[0] == size - step
        if is_last() and size > 1:
            assert isinstance(outcome(hvd.barrier), hvd.MismatchError)
            assert hvd.allgather_object("alone") == ["alone"]
        assert hvd.join() == last()
        hvd.barrier()
        assert hvd.allreduce(np.full(2, rank), op=hvd.Sum)[0] == sum(range(size))
        assert hvd.allgather_object(rank) == list(range(size))
        assert hvd.broadcast_object(rank, root_rank=last()) == last()


def _check_last(rank: int) -> None:
    assert rank == last()


@CASES.add(*SEVERAL)
def mismatch_among_the_live() -> None:
    if hvd.size() == 2:
        return
    if hvd.rank() == 0:
        assert hvd.join() in range(hvd.size())
        return
    extent = 4 if is_last() else 3
    error = raised(hvd.allreduce_async(np.ones(extent), name="live"))
    assert isinstance(error, hvd.MismatchError), repr(error)
    assert set(error.per_rank) == set(range(1, hvd.size()))
    with pytest.raises(hvd.UnsupportedDtypeError):
        hvd.allreduce(np.array(["a"]), name="live")
    hvd.join()


# -- in process sets ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _sets_of(*ranks: Sequence[int]) -> Iterator[list[hvd.ProcessSet]]:
    """Add process sets, and remove them afterwards."""
    added = [hvd.add_process_set(each) for each in ranks]
    yield added
    for each in added:
        assert hvd.remove_process_set(each)


@IN_SETS.add(3, 4)
def uneven_steps_in_a_set() -> None:
    """Member r makes r + 1 steps, named and unnamed; the last rank, which is no member, makes none."""
    rank, members = hvd.rank(), range(last())
    with _sets_of(members) as (few,):
        for _ in range(3):
            for step in range(rank + 1) if few.included() else ():
                alive = [float(r + 1) for r in members if r >= step]
                mine = np.full(3, rank + 1.0)
                average = hvd.allreduce(mine, name="grad", process_set=few)
                assert np.allclose(average, sum(alive) / len(members))
                assert hvd.allreduce(mine, op=hvd.Sum, process_set=few)[0] == sum(alive)
                gathered = hvd.allgather_object(rank, process_set=few)
                assert gathered == [r for r in members if r >= step]
            assert hvd.join() in range(hvd.size())
            assert hvd.allreduce(np.ones(1), op=hvd.Sum) == hvd.size()


@IN_SETS.add(3, 4)
def every_verb_in_a_set_whose_other_members_have_joined() -> None:
    with _sets_of([0, last()], range(1, hvd.size())) as sets:
        if is_last():
            for each in sets:
                _every_verb_alone(each)
        assert hvd.join() == last()
        for each in sets:
            if each.included():
                total = hvd.alltoall(np.zeros(each.size() or 0), name="needs", process_set=each)
                assert total.tolist() == [0.0] * (each.size() or 0)


def _every_verb_alone(process_set: hvd.ProcessSet) -> None:
    """Check each verb on the last rank when all other members of a set have joined."""
    others = set(process_set.ranks or ()) - {last()}
    size = len(others) + 1
    _alone_after_joins(process_set)
    for op in OPS["float32"]:
        if op is hvd.Adasum and size & (size - 1):
            continue
        (mine,) = inputs("float32", (5, 2), 1, seed=4)
        for named in ("a", None):
            got = hvd.allreduce(mine, op=op, name=named, process_set=process_set)
            same(got, reduced(op, [mine], size=size), f"{op!r}")
            got = hvd.grouped_allreduce([mine, mine], op=op, name=named, process_set=process_set)[1]
            same(got, reduced(op, [mine], size=size), f"{op!r}")
    (mine,) = inputs("float32", (2 * size + 1, 2), 1, seed=5)
    same(hvd.allgather(mine, process_set=process_set), mine)
    same(hvd.broadcast(mine, last(), process_set=process_set), mine)
    want = reduced(hvd.Sum, [mine])[rows(len(mine), size, size - 1)]
    same(hvd.reducescatter(mine, op=hvd.Sum, process_set=process_set), want)
    assert hvd.allgather_object("alone", process_set=process_set) == ["alone"]
    for call in (
        lambda: hvd.alltoall(np.zeros(size), name="needs", process_set=process_set),
        lambda: hvd.broadcast(np.zeros(2), min(others), name="root", process_set=process_set),
        lambda: hvd.barrier(process_set),
    ):
        error = outcome(call)
        assert isinstance(error, hvd.MismatchError), repr(error)
        assert "already called join()" in str(error)
        assert error.per_rank.keys() <= others


@IN_SETS.add(3, 4)
def pending_in_sets_before_the_join() -> None:
    """A chain of sets: each rank submits in its sets in an order of its own, then joins at once."""
    size, rank = hvd.size(), hvd.rank()
    with _sets_of(*([r, r + 1] for r in range(size - 1))) as chain:
        mine = [each for each in chain if each.included()][:: 1 if rank % 2 else -1]
        for turn in range(4):
            handles = [
                (each, hvd.allreduce_async(np.full(2, rank + i), op=hvd.Sum, name=f"p.{i}", process_set=each))
                for each in mine
                for i in range(3)
            ]
            rows = [(each, hvd.allgather_async(np.array([rank]), "g", process_set=each)) for each in mine]
            if turn == 2:  # a call that only the first member of each set makes
                owned = [each for each in mine if each.rank() == 0]
                extra = [
                    hvd.allreduce_async(np.ones(1), name="e", op=hvd.Sum, process_set=each) for each in owned
                ]
            assert hvd.join() in range(size)
            for index, (each, handle) in enumerate(handles):
                assert handle.result(30)[0] == sum(r + index % 3 for r in each.ranks or ())
            for each, handle in rows:
                assert handle.result(30).tolist() == each.ranks
            if turn == 2:
                assert [handle.result(30).tolist() for handle in extra] == [[1.0]] * len(owned)


@IN_SETS.add(3, 4)
def cached_names_in_two_sets_and_a_join() -> None:
    """Rank 1 of two sets leaves first, in the middle of the others' cached calls."""
    with _sets_of([0, 1], range(1, hvd.size())) as sets:
        mine = [each for each in sets if each.included()]
        for turn in range(3):
            for step in range(4):
                for each in [*mine, hvd.global_process_set]:
                    total = hvd.allreduce(np.ones(2), op=hvd.Sum, name="round", process_set=each)
                    assert total[0] == each.size(), (turn, step)
            for step in range(2 if hvd.rank() != 1 else 0):
                for each in mine:
                    total = hvd.allreduce(np.ones(2), op=hvd.Sum, name="round", process_set=each)
                    assert total[0] == (each.size() or 0) - 1, (turn, step)
            hvd.join()


@IN_SETS.add(3, 4)
def others_go_on_when_a_whole_set_has_joined() -> None:
    with _sets_of(range(last()), [0, last()]) as (few, two):
        if is_last():
            _alone_after_joins()
            for _ in range(3):
                assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="x")[0] == 1.0
                assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="x", process_set=two)[0] == 1.0
            error = outcome(lambda: hvd.add_process_set([0]))
            assert isinstance(error, hvd.MismatchError), repr(error)
            assert "add_process_set" in str(error)
            assert "already called join()" in str(error)
            error = outcome(lambda: hvd.remove_process_set(few))
            assert isinstance(error, hvd.MismatchError), repr(error)
        assert hvd.join() == last()
        if few.included():
            total = hvd.allreduce(np.ones(2), op=hvd.Sum, name="x", process_set=few)
            assert total[0] == few.size()


@IN_SETS.add(3, 4)
def a_joined_rank_submits_nothing_in_its_sets() -> None:
    with _sets_of([0, last()]) as (two,):
        told = _files_of_the_joined("told in sets")
        if hvd.rank() == 0:
            joined = Spawned(lambda: _check_last(hvd.join()))
            assert "joined" in str(_refused_when_joined(two))
            wrong = outcome(lambda: hvd.allreduce(np.array(["text"]), name="healthy", process_set=two))
            assert isinstance(wrong, hvd.UnsupportedDtypeError), repr(wrong)
            told[0].touch()
            joined.join()
        elif is_last():
            _until(told[0].exists, "rank 0 is refused")
            shutil.rmtree(told[0].parent)
            _alone_after_joins(two)
            got = hvd.allreduce(np.ones(2), op=hvd.Sum, name="healthy", process_set=two)
            assert got.tolist() == [1.0, 1.0]
            _alone_after_joins()
            assert hvd.join() == last()
        else:
            assert hvd.join() == last()
