"""Cases of process sets; cases that add sets need the knob ``dynamic_process_sets``, and remove the sets."""

from __future__ import annotations

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import SEVERAL, Cases, Spawned, is_last, last, outcome, raised

DYNAMIC = Cases()


def every_verb_in(members: list[int], process_set: hvd.ProcessSet) -> None:
    """Run each verb among the members; only members call it."""
    here = members.index(hvd.rank())
    n = len(members)
    assert process_set.included()
    assert (process_set.size(), process_set.rank(), process_set.ranks) == (n, here, members)
    mine = np.arange(2 * n) + hvd.rank()
    total = np.sum([np.arange(2 * n) + r for r in members], axis=0)
    assert hvd.allreduce(mine, op=hvd.Sum, process_set=process_set).tolist() == total.tolist()
    assert np.allclose(hvd.allreduce(mine * 1.0, process_set=process_set), total / n)
    in_place = mine.copy()
    assert hvd.allreduce_(in_place, op=hvd.Max, process_set=process_set) is in_place
    assert in_place[0] == members[-1]
    assert hvd.grouped_allreduce([mine, mine[:1]], op=hvd.Min, process_set=process_set)[1][0] == members[0]
    assert hvd.allgather(np.array([hvd.rank()]), process_set=process_set).tolist() == members
    for root in members:
        # The root is a global rank.
        assert hvd.broadcast(np.array([hvd.rank()]), root, process_set=process_set).tolist() == [root]
    exchanged, counts = hvd.alltoall(np.full(n, hvd.rank()), [1] * n, process_set=process_set)
    assert (exchanged.tolist(), counts.tolist()) == (members, [1] * n)
    scattered = hvd.reducescatter(mine, op=hvd.Sum, process_set=process_set)
    assert scattered.tolist() == total[2 * here : 2 * here + 2].tolist()
    hvd.barrier(process_set)
    assert hvd.broadcast_object({"from": hvd.rank()}, members[-1], process_set=process_set) == {
        "from": members[-1]
    }
    assert hvd.allgather_object(hvd.rank(), process_set=process_set) == members


def check_outsider(process_set: hvd.ProcessSet) -> None:
    """A non-member's calls raise, and no other rank waits for them."""
    assert not process_set.included()
    with pytest.raises(ValueError, match="not a member"):
        process_set.rank()
    for call in (
        lambda: hvd.allreduce(np.ones(1), process_set=process_set),
        lambda: hvd.broadcast(np.ones(1), 0, process_set=process_set),
        lambda: hvd.barrier(process_set),
        lambda: hvd.allgather_object(1, process_set=process_set),
        lambda: hvd.broadcast_object(1, 0, process_set=process_set),
    ):
        with pytest.raises(ValueError, match="not a member"):
            call()


def _use(process_set: hvd.ProcessSet) -> None:
    members = process_set.ranks
    assert members is not None
    if hvd.rank() in members:
        every_verb_in(members, process_set)
    else:
        check_outsider(process_set)


@DYNAMIC.add(*SEVERAL)
def added_used_and_removed() -> None:
    size = hvd.size()
    for ranks in ([0], [last()], list(range(1, size)), list(range(size - 1))):
        added = hvd.add_process_set(ranks)
        assert [added.process_set_id] == [1]
        _use(added)
        assert hvd.remove_process_set(added) is True
        assert [added.process_set_id, added.size()] == [None, None]
        assert hvd.remove_process_set(added) is False
        with pytest.raises(ValueError, match="not been registered"):
            hvd.allreduce(np.ones(1), process_set=added)
    assert hvd.remove_process_set(hvd.global_process_set) is False


@DYNAMIC.add(3, 4)
def overlapping_sets_and_reused_ids() -> None:
    size = hvd.size()
    low, high = hvd.add_process_set([0, 1]), hvd.add_process_set(hvd.ProcessSet(range(1, size)))
    assert (low.process_set_id, high.process_set_id) == (1, 2)
    _use(low)
    _use(high)
    # All calls run concurrently: each set may use the same name, and no order of calls deadlocks.
    order = (low, high) if hvd.rank() % 2 else (high, low)
    handles = [
        (each, hvd.allreduce_async(np.ones(3), name="x", op=hvd.Sum, process_set=each))
        for each in (*order, hvd.global_process_set)
        if each.included()
    ]
    for process_set, handle in handles:
        assert handle.result(30).tolist() == [process_set.size()] * 3
    hvd.remove_process_set(low)
    again = hvd.add_process_set([0, size - 1])
    assert again.process_set_id == 1
    _use(again)
    _use(high)
    assert hvd.remove_process_set(high)
    assert hvd.remove_process_set(again)


@DYNAMIC.add(*SEVERAL)
def wrong_sets_are_refused() -> None:
    size = hvd.size()
    for ranks in (list(range(size)), [size], [0, 99]):
        with pytest.raises(ValueError, match=r"registered already|there are only ranks"):
            hvd.add_process_set(ranks)
    known = hvd.add_process_set([0])
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set([0])
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(known)
    for nonsense in ([], [0, 0], [-1], "0", 3, None):
        with pytest.raises(ValueError, match=r"rank|process set"):
            hvd.add_process_set(nonsense)  # type: ignore[arg-type]
    assert hvd.remove_process_set(known)


@DYNAMIC.add(*SEVERAL)
def ranks_that_differ_are_told() -> None:
    error = outcome(lambda: hvd.add_process_set([0] if is_last() else [1]))
    assert isinstance(error, hvd.MismatchError), repr(error)
    assert "process sets" in str(error)
    assert error.per_rank[last()].value == "[0]"
    error = outcome(lambda: hvd.add_process_set([99] if is_last() else [0]))
    assert isinstance(error, ValueError if is_last() else hvd.RankFailedError), repr(error)
    added = hvd.add_process_set([0])
    _use(added)
    assert hvd.remove_process_set(added)


@DYNAMIC.add(3, 4)
def removal_ends_what_is_pending() -> None:
    added = hvd.add_process_set([0, 1])
    pending = None
    if hvd.rank() == 1:
        pending = hvd.allreduce_async(np.ones(2), name="orphan", process_set=added)
    assert hvd.remove_process_set(added)
    if pending is not None:
        error = raised(pending)
        assert isinstance(error, hvd.ShutDownError), repr(error)
        assert "has been removed" in str(error)
        assert "orphan" in str(error)


@DYNAMIC.add(3, 4)
def what_is_ready_with_the_removal_is_carried_out() -> None:
    """Every member submits a tensor, and calls remove_process_set() in the same message."""
    for step in range(5):
        added, other = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 2])
        mine = [each for each in (added, other) if each.included()]
        x, row = np.full(3, step), np.full(1, hvd.rank())
        reduced = [hvd.allreduce_async(x, op=hvd.Sum, name="reduced", process_set=each) for each in mine]
        rooted = [hvd.broadcast_async(row, 2, name="rooted", process_set=each) for each in mine]
        rows = [hvd.allgather_async(row, name="rows", process_set=each) for each in mine]
        members = [each.ranks for each in mine]
        assert hvd.remove_process_set(added)
        assert hvd.remove_process_set(other)
        assert [handle.result(30).tolist() for handle in reduced] == [[2 * step] * 3] * len(mine)
        assert [handle.result(30).tolist() for handle in rooted] == [[2]] * len(mine)
        assert [handle.result(30).tolist() for handle in rows] == members


@DYNAMIC.add(3, 4)
def a_mismatch_in_a_set_stays_there() -> None:
    added = hvd.add_process_set([0, 1])
    if added.included():
        handle = hvd.allreduce_async(np.ones(2 + hvd.rank()), name="bad", process_set=added)
        error = raised(handle)
        assert isinstance(error, hvd.MismatchError), repr(error)
        assert {r: v.value for r, v in error.per_rank.items()} == {0: "(2,)", 1: "(3,)"}
        error = outcome(
            lambda: hvd.allreduce(np.array(["a"]) if hvd.rank() else np.ones(1), process_set=added)
        )
        assert isinstance(error, ValueError if hvd.rank() else hvd.RankFailedError), repr(error)
        root = outcome(lambda: hvd.broadcast(np.ones(1), last(), process_set=added))
        assert isinstance(root, ValueError)
        assert "invalid root rank" in str(root)
        assert hvd.allreduce(np.ones(1), name="bad", op=hvd.Sum, process_set=added).tolist() == [2.0]
    assert hvd.allreduce(np.ones(1), name="bad", op=hvd.Sum).tolist() == [hvd.size()]
    assert hvd.remove_process_set(added)


@DYNAMIC.add(*SEVERAL)
def added_while_others_are_in_flight() -> None:
    handles = [hvd.allreduce_async(np.full(2, i), op=hvd.Sum, name=f"fly.{i}") for i in range(10)]
    added = hvd.add_process_set([last()])
    handles += [hvd.allreduce_async(np.full(2, i), op=hvd.Sum, name=f"fly.{i}") for i in range(10, 20)]
    assert [handle.result(30)[0] for handle in handles] == [i * hvd.size() for i in range(20)]
    assert hvd.remove_process_set(added)


@DYNAMIC.add(*SEVERAL)
def a_removal_that_fails_removes_nothing() -> None:
    first, second = hvd.add_process_set([0]), hvd.add_process_set([1])
    error = outcome(lambda: hvd.remove_process_set(first if is_last() else second))
    assert isinstance(error, hvd.MismatchError), repr(error)
    _use(first)
    _use(second)
    assert hvd.remove_process_set(second)
    assert hvd.remove_process_set(first)


@DYNAMIC.add(3, 4)
def sets_in_threads_of_their_own() -> None:
    """Each rank uses its two sets and the world concurrently, from three threads."""
    size = hvd.size()
    sets = [hvd.add_process_set(sorted({r, (r + 1) % size})) for r in range(size)]

    def work(process_set: hvd.ProcessSet) -> None:
        for step in range(20):
            got = hvd.allreduce(np.full(3, step), op=hvd.Sum, name=f"t.{step % 3}", process_set=process_set)
            assert got.tolist() == [step * (process_set.size() or 0)] * 3

    mine = [process_set for process_set in sets if process_set.included()]
    threads = [Spawned(lambda p=p: work(p)) for p in [*mine, hvd.global_process_set]]  # type: ignore[misc]
    for thread in threads:
        thread.join()
    for process_set in sets:
        assert hvd.remove_process_set(process_set)
