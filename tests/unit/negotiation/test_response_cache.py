"""The response cache: its slots, their reuse, the meaning of a late rank's bit, and dropped meanings."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, strategies as st

from pyhvd.negotiation.messages import Request, Response, iter_bits
from pyhvd.negotiation.response_cache import MAX_WITHOUT, SlotTable, WorkerCache, group_of
from tests.unit.negotiation.simulation import Network, allreduce, by_request, grouped


def row(name: str, *widths: int) -> dict[Request, int]:
    """Return the ranks of each distinct request for a tensor, by default of length 1 on two ranks."""
    return by_request([allreduce(name, (width,)) for width in widths or (1, 1)])


def test_slots_are_numbered_from_zero_and_found_by_name() -> None:
    table = SlotTable(3)
    assert [table.assign(row(name), 0, 1) for name in "abc"] == [0, 1, 2]
    assert [table.slot_of(name) for name in "abcd"] == [0, 1, 2, -1]
    assert len(table._slots) == 3
    assert table[1].name == "b"


def test_the_least_recently_used_goes_first() -> None:
    table = SlotTable(3)
    for name in "abc":
        table.assign(row(name), 0, 1)
    table.touch([0])
    assert table.assign(row("d"), 0, 2) == 1
    assert table.assign(row("a"), 0, 3) == 0, "used again"
    assert table.assign(row("e"), 0, 4) == 2
    assert [table.slot_of(name) for name in "abcde"] == [0, -1, -1, 1, 2]


def test_of_more_tensors_than_slots_those_with_slots_keep_them() -> None:
    """Not the least recently used goes then: in each step it would be the one that comes next."""
    table = SlotTable(4)
    names = [f"t{i}" for i in range(7)]
    hits = []
    for step in range(6):
        hits.append(0)
        for name in names:
            slot = table.slot_of(name)
            if slot >= 0:
                hits[-1] += 1
                table.touch([slot])
            else:
                table.assign(row(name), 0, step)
    assert hits == [0, 4, 4, 4, 4, 4]
    assert table.wanted == 7


def test_a_tensor_in_another_order_at_each_step_takes_no_slot() -> None:
    table = SlotTable(2)
    chance = Random(1)
    names = list("abcd")
    held = []
    for step in range(20):
        for name in names:
            slot = table.slot_of(name)
            if slot >= 0:
                table.touch([slot])
            else:
                table.assign(row(name), 0, step)
        held.append([name for name in "abcd" if table.slot_of(name) >= 0])
        chance.shuffle(names)
    assert all(each == held[1] for each in held[1:])


def test_tensors_that_come_no_more_give_their_slots_to_those_that_do() -> None:
    """A program that goes on with other tensors, which had no slots before."""
    table = SlotTable(2)
    for step in range(3):
        for name in "abcd":
            if (slot := table.slot_of(name)) >= 0:
                table.touch([slot])
            else:
                table.assign(row(name), 0, step)
    assert [table.slot_of(name) for name in "abcd"] == [-1, -1, 0, 1]
    for _ in range(3):
        for name in "ab":
            table.assign(row(name), 0, 9)
    assert [table.slot_of(name) for name in "ab"] == [0, 1]


def test_names_that_come_once_are_forgotten() -> None:
    table = SlotTable(1)
    for number in range(MAX_WITHOUT + 10):
        table.assign(row(f"t{number}"), 0, number)
    assert len(table._without) == MAX_WITHOUT
    assert table.wanted == 0


def test_slots_that_a_rank_has_submitted_stay() -> None:
    table = SlotTable(2)
    for name in "ab":
        table.assign(row(name), 0, 1)
    assert table.assign(row("c"), 0b01, 2) == 1
    assert table.assign(row("d"), 0b11, 3) == -1
    assert SlotTable(0).assign(row("a"), 0, 1) == -1


def test_a_tensor_with_a_new_shape_keeps_its_slot() -> None:
    table = SlotTable(2)
    table.assign(row("a"), 0, 1)
    assert table.assign(row("a", 5, 5), 0, 4) == 0
    assert table.last_change == 4
    assert table.assign(row("a", 5, 5), 0, 6) == 0
    assert table.last_change == 4, "nothing has changed"


def test_a_slot_means_what_the_rank_has_heard_last() -> None:
    table = SlotTable(1)
    for seq, name in ((2, "a"), (5, "b"), (5, "c"), (9, "d")):
        table.assign(row(name), 0, seq)
    meanings = {seen: slot.name if (slot := table.meaning(0, seen)) else None for seen in range(1, 11)}
    assert meanings == {
        1: None,
        **dict.fromkeys((2, 3, 4), "a"),
        **dict.fromkeys((5, 6, 7, 8), "c"),
        9: "d",
        10: "d",
    }


def test_meanings_are_dropped_once_every_rank_has_a_newer_one() -> None:
    table = SlotTable(1)
    for seq, name in ((2, "a"), (5, "b"), (9, "c")):
        table.assign(row(name), 0, seq)
    table.forget(4)
    assert table.meaning(0, 4) is not None
    table.forget(5)
    assert table.meaning(0, 4) is None
    assert table.meaning(0, 8) is not None
    table.forget(9)
    assert not table._retired


def test_groups_are_told_apart_by_size() -> None:
    table = SlotTable(8)
    for request in (*grouped("g", [(1,)] * 2), *grouped("g", [(1,)] * 3), allreduce("x")):
        table.assign({request: 3}, 0, 1)
    assert table.group_bits(("g", 2)) == 0b00011
    assert table.group_bits(("g", 3)) == 0b11100
    assert table.group_bits(("g", 0)) == 0b11111
    assert table.group_bits(None) == table.group_bits(("h", 2)) == 0
    assert group_of(allreduce("x")) is None


def test_a_name_that_leaves_its_group() -> None:
    table = SlotTable(8)
    for request in grouped("g", [(1,)] * 2):
        table.assign({request: 1}, 0, 1)
    table.assign({allreduce("g_1of2"): 1}, 0, 2)
    assert table.group_bits(("g", 2)) == 0b10
    table.assign({allreduce("g_2of2"): 1}, 0, 3)
    assert table.group_bits(("g", 2)) == 0


def test_a_rank_remembers_its_own_request() -> None:
    cache = WorkerCache()
    mine, first = allreduce("a", (2,)), allreduce("a", (1,))
    cache.put(Response(first, slot=3), mine)
    assert cache.hit(mine) == 3
    assert cache.hit(first) == -1
    assert cache.hit(allreduce("b", (2,))) == -1
    assert cache.expand(0b1000) == [Response(first, slot=3)]
    cache.put(Response(allreduce("b"), slot=3), allreduce("b"))
    assert cache.hit(mine) == -1
    assert cache.hit(allreduce("b")) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (3,)}, {"dtype": 8}, {"op": 3}, {"prescale": 2.0}, {"postscale": 2.0},
        {"root": 1}, {"device": "cuda:0"}, {"group": "g", "group_size": 1},
    ],
    ids=str,
)  # fmt: skip
def test_any_difference_is_a_miss(other: dict[str, object]) -> None:
    cache = WorkerCache()
    cache.put(Response(allreduce("a"), slot=0), allreduce("a"))
    assert cache.hit(allreduce("a", **other)) == -1  # type: ignore[arg-type]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("assign"), st.sampled_from("abcdef"), st.integers(1, 2), st.integers(0, 7)),
        st.tuples(st.just("touch"), st.sampled_from("abcdef"), st.just(0), st.just(0)),
        st.tuples(st.just("forget"), st.just(""), st.integers(0, 5), st.just(0)),
    ),
    max_size=40,
)


@given(capacity=st.integers(0, 4), operations=operations)
def test_meanings_agree_with_a_log_of_all_assignments(
    capacity: int, operations: list[tuple[str, str, int, int]]
) -> None:
    """The table gives each slot the meanings that a log of all assignments gives, unless it dropped them."""
    table = SlotTable(capacity)
    log: list[dict[int, str]] = [{}]
    forgotten = 0
    for what, name, number, busy in operations:
        state = dict(log[-1])
        if what == "assign":
            before = table.slot_of(name)
            slot = table.assign(row(name, number), busy, len(log))
            assert slot < capacity
            assert slot < 0 or before == slot or slot not in state or not busy >> slot & 1
            if slot >= 0:
                state[slot] = f"{name}{number}"
        elif what == "touch" and table.slot_of(name) >= 0:
            table.touch([table.slot_of(name)])
        elif what == "forget":
            forgotten = max(forgotten, len(log) - 1 - number)
            table.forget(forgotten)
        log.append(state)
        for seen in range(max(forgotten, 0), len(log)):
            for slot in range(capacity):
                meant = table.meaning(slot, seen)
                told = None if meant is None else f"{meant.name}{meant.first.shape[0]}"
                assert told == log[seen].get(slot)


def test_a_bit_of_a_slot_that_has_been_given_away() -> None:
    """Rank 1 is late: it sends the bit of a slot that has another tensor by then."""
    network = Network(3, capacity=1, sets=[(0, 1)])
    network.everywhere([allreduce("old")])
    for rank in (0, 1, 2):
        network.submit(rank, [allreduce("new")])
        network.send(rank)
        network.deliver_up(rank)
    network.submit(1, [allreduce("old")])
    message = network.send(1)
    assert (message.bits, message.requests, message.seen) == ({0: b"\x01"}, [], 1)
    network.respond()
    network.deliver_up(1)
    (waiting,) = network.coordinator.stalled()
    assert (waiting.name, waiting.submitted) == ("old", 0b10)
    network.submit(0, [allreduce("old")])
    ends = network.submit(2, [allreduce("old")])
    network.settle()
    assert ends is not None
    assert ends[0].response.request.name == "old"
    network.check_all()


@given(bits=st.sets(st.integers(0, 2000)))
def test_bits_come_in_ascending_order(bits: set[int]) -> None:
    assert iter_bits(sum(1 << bit for bit in bits)) == sorted(bits)
