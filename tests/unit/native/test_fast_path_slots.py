"""The slots that one rank's fast path knows, and the versions with which it marks them ready."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from pyhvd.api.collectives import LOOKUP, move_by_message, reduce_by_message
from pyhvd.api.process_sets import global_process_set
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.engine.context import ContextHolder, current_holder, playing_rank, process_holder
from pyhvd.engine.plans import Plan
from pyhvd.native import shared_memory
from pyhvd.native.shared_memory import IN_PLACE, WAITS, set_lookup, start
from pyhvd.negotiation.messages import Request, RequestType

SLOTS = 64
GROUPED = [False, True]


@pytest.fixture(autouse=True)
def _nothing_by_message() -> Iterator[None]:
    """Let start() return None for a call that the fast path does not take."""
    set_lookup(*LOOKUP, *[lambda *_: None] * 2)
    yield
    set_lookup(*LOOKUP, reduce_by_message, move_by_message)


def _aligned(nbytes: int) -> tuple[np.ndarray[Any, Any], int]:
    memory = np.zeros(nbytes + 128, np.uint8)
    return memory, -(-int(memory.ctypes.data) // 128) * 128


class Lane:
    """The fast path of rank 0 of two, with its ready table."""

    def __init__(self) -> None:
        memory, base = _aligned(shared_memory.ready_table_bytes(2, SLOTS))
        self.lane = shared_memory.FastPath(
            base, memory, 0, 2, SLOTS, 1 << 16, False, 1.0, lambda _: int(Code.INT64)
        )
        self.lane.attach({}, {}, {}, lambda: None)
        self.lane.clear()
        self.lane.know_arena(SimpleNamespace(start=0, nbytes=0))
        self.open()

    def open(self) -> None:
        size = -(-shared_memory.area_bytes(shared_memory.FLAT) // 128) * 128
        self._memory, base = _aligned(2 * size)
        self._window = shared_memory.Window(0, [base, base + size], shared_memory.FLAT)
        self._window.clear()
        self.lane.open_ready_set(0, range(2))
        self.lane.open_set(0, self._window, [])

    def install(self, since: int, requests: list[Request], first: int = 0) -> None:
        for slot, request in enumerate(requests, first):
            self.lane.install(0, slot, request, since, ReduceOp.SUM, 1.0, False, Plan())

    def delegate(self, since: int, count: int) -> None:
        for slot in range(count):
            self.lane.delegate(0, slot, since)

    @contextmanager
    def submitted(self, grouped: bool) -> Iterator[Any]:
        """Submit one tensor, or a group; only the test marks it ready."""
        slot = ContextHolder()
        slot.keep(None, self.lane, None)
        arrays = [np.ones(1, np.int64), np.ones(2, np.int64)]
        what, name = (arrays, "g") if grouped else (arrays[0], "t")
        form = IN_PLACE | WAITS | (shared_memory.GROUPED if grouped else 0)
        with playing_rank(slot):
            handle = start(form, what, None, name, ReduceOp.SUM, 1.0, 1.0, global_process_set)
        assert handle is not None
        yield handle
        for unit in self.lane.in_flight():
            taken = unit.take()
            assert taken is not None
            for k in range(len(taken[1])):
                unit.settle(k, None, None)
        assert handle.done()


def requests(grouped: bool) -> list[Request]:
    one = Request(RequestType.ALLREDUCE, "t", Code.INT64, (1,), ReduceOp.SUM)
    if not grouped:
        return [one]
    return [structs.replace(one, name=f"g_{k}of2", shape=(k,), group="g", group_size=2) for k in (1, 2)]


@pytest.mark.parametrize("grouped", GROUPED)
def test_who_takes_a_unit_learns_when_it_was_posted(grouped: bool) -> None:
    """The time is 0 if the call was not marked ready; latencies are measured from this time."""
    here, mine = Lane(), requests(grouped)
    here.install(1, mine)
    for delegates in (False, True):
        if delegates:
            here.delegate(1, len(mine))
        before = time.monotonic_ns()
        with here.submitted(grouped):
            if delegates:
                here.lane.mark_ready()
            (unit,) = here.lane.in_flight()
            taken = unit.take()
            assert taken is not None
            posted, tensors = taken
            assert before <= posted <= time.monotonic_ns() if delegates else posted == 0
            assert [request for request, *_ in tensors] == mine
            for k in range(len(tensors)):
                unit.settle(k, None, None)


@pytest.mark.parametrize("grouped", GROUPED)
def test_what_is_held_back_is_posted_under_the_number_that_holds_then(grouped: bool) -> None:
    """The slots get a new version, for another rank's tensors, while this rank holds its call."""
    here, mine = Lane(), requests(grouped)
    every = (1 << len(mine)) - 1
    here.install(1, mine)
    with here.submitted(grouped):
        here.delegate(2, len(mine))
        here.install(2, mine)
        here.lane.mark_ready()
        assert here.lane.refused() is None
        assert here.lane.look(0) == ({0: every}, 0)
        assert here.lane.recall(0, every) == {0: every}


@pytest.mark.parametrize("grouped", GROUPED)
@pytest.mark.parametrize("number", [1, 3])
def test_what_has_another_number_is_refused_and_not_posted(grouped: bool, number: int) -> None:
    """In a group, only the last tensor's version differs."""
    here, mine = Lane(), requests(grouped)
    here.install(2, mine)
    here.install(number, mine[-1:], len(mine) - 1)
    here.delegate(2, len(mine))
    with here.submitted(grouped):
        here.lane.mark_ready()
        unit = here.lane.refused()
        assert unit is not None
        assert here.lane.look(0) == ({}, 0)


@pytest.mark.parametrize("grouped", GROUPED)
@pytest.mark.parametrize("what", ["recalled", "frozen", "delegated anew", "opened anew", "known anew"])
def test_what_has_been_posted_before_is_refused_once_the_ready_table_has_changed(
    grouped: bool, what: str
) -> None:
    """A call remembers that its slots are delegated, until the ready table or its slots change."""
    here, mine = Lane(), requests(grouped)
    last = len(mine) - 1
    here.install(1, mine)
    here.delegate(1, len(mine))
    for _ in range(2):
        with here.submitted(grouped):
            here.lane.mark_ready()
            assert here.lane.refused() is None
    if what == "recalled":
        here.lane.recall(0, 1 << last)
    elif what == "frozen":
        here.lane.freeze(0, last)
    elif what == "delegated anew":
        here.lane.delegate(0, last, 2)
    elif what == "known anew":  # so far by this rank only
        here.install(2, mine[last:], last)
    else:  # as many slots delegated as before, but other slots
        here.lane.open_ready_set(0, range(2))
        for slot in range(len(mine)):
            here.lane.delegate(0, 10 + slot, 1)
    with here.submitted(grouped):
        here.lane.mark_ready()
        assert here.lane.refused() is not None


def test_a_group_is_posted_whatever_the_order_of_its_slots() -> None:
    here, mine = Lane(), requests(True)
    for slot, request in ((3, mine[0]), (1, mine[1])):
        here.install(1, [request], slot)
    here.delegate(1, 4)
    with here.submitted(True):
        here.lane.mark_ready()
        assert here.lane.refused() is None
        assert here.lane.look(0) == ({0: 0b1010}, 0)
        (unit,) = here.lane.in_flight()
        taken = unit.take()
        assert taken is not None
        assert [(request, source.size) for request, source, *_ in taken[1]] == [(mine[0], 1), (mine[1], 2)]
        for k in range(len(mine)):
            unit.settle(k, None, None)


def test_what_was_refused_stays_so_when_the_number_comes() -> None:
    """The refused submission goes by message; the next submission is marked ready again."""
    here, mine = Lane(), requests(False)
    here.install(1, mine)
    here.delegate(2, 1)
    with here.submitted(False) as handle:
        here.lane.mark_ready()
        here.install(2, mine)
        here.lane.mark_ready()
        unit = here.lane.refused()
        assert unit is not None
        assert not handle.done()
        assert here.lane.look(0) == ({}, 0)
    with here.submitted(False):
        here.lane.mark_ready()
        assert here.lane.refused() is None
        assert here.lane.look(0) == ({0: 1}, 0)


def test_a_group_that_is_not_complete_yet_takes_the_number_too() -> None:
    here, mine = Lane(), requests(True)
    here.install(1, mine[:1])
    here.install(2, mine[:1])
    assert here.lane.requests(0, 0, False) == mine[:1], "no unit yet"
    here.install(2, mine[1:], 1)
    here.delegate(2, 2)
    with here.submitted(True):
        here.lane.mark_ready()
        assert here.lane.look(0) == ({0: 0b11}, 0)


def test_a_set_that_is_closed_leaves_no_half_of_a_group_behind() -> None:
    """The id of the set and the name of the group may be used again."""
    here, mine = Lane(), requests(True)
    here.install(1, mine[:1])
    here.lane.close_set(0)
    here.open()
    here.install(2, mine[1:])
    assert here.lane.requests(0, 0, False) == mine[1:]


@pytest.mark.parametrize("own", [False, True])
def test_whose_slot_it_is_is_asked_only_where_threads_have_slots_of_their_own(own: bool) -> None:
    """In a process with one rank no thread has a rank slot of its own, so nothing is looked up."""
    asked = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal asked
        asked += event == "call" and frame.f_code is current_holder.__code__

    with playing_rank(ContextHolder() if own else process_holder):
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            start(WAITS, np.ones(1), None, "t", ReduceOp.SUM, 1.0, 1.0, global_process_set)
        finally:
            sys.setprofile(before)
    assert asked == own
