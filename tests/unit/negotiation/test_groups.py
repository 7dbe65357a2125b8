"""Grouped calls: all tensors of a group become ready, run and fail together."""

from __future__ import annotations

import pytest

from pyhvd.negotiation.message_table import MessageTable, Senders
from pyhvd.negotiation.messages import ErrorKind, Request
from tests.unit.negotiation.simulation import Done, Network, allreduce, check_invariants, grouped


def texts(ends: list[Done]) -> dict[str, str]:
    """Return the text of each tensor's error, empty without an error."""
    return {
        e.response.request.name: "" if e.response.error is None else e.response.error.message for e in ends
    }


def test_no_member_runs_before_the_whole_group_is_ready() -> None:
    network = Network(2)
    network.submit(0, grouped("g", [(1,), (2,), (3,)]))
    network.submit(0, [allreduce("x")])
    network.settle()
    network.submit(1, [allreduce("x")])
    network.settle()
    assert [r.request.name for r in network.answered[-1].responses] == ["x"]
    network.submit(1, grouped("g", [(1,), (2,), (3,)]))
    network.settle()
    assert [r.request.name for r in network.answered[-1].responses] == ["g_1of3", "g_2of3", "g_3of3"]
    network.check_all()


def test_other_tensors_do_not_come_between_the_members() -> None:
    network = Network(2)
    group = grouped("g", [(1,), (2,)])
    for rank in (0, 1):
        network.submit(rank, [allreduce("x")])
        network.submit(rank, group)
        network.submit(rank, [allreduce("y")])
    network.settle()
    assert [r.request.name for r in network.answered[-1].responses] == ["x", "g_1of2", "g_2of2", "y"]


@pytest.mark.parametrize("capacity", [8, 2, 1, 0])
def test_a_group_larger_than_the_cache(capacity: int) -> None:
    network = Network(2, capacity)
    for _ in range(4):
        for ends in network.everywhere(grouped("g", [(1,), (2,), (3,)])):
            assert len({end.seq for end in ends}) == 1
            assert texts(ends) == dict.fromkeys(("g_1of3", "g_2of3", "g_3of3"), "")
    network.check_all()


def test_bits_of_a_group_wait_for_the_last_rank() -> None:
    network = Network(3)
    group = grouped("g", [(1,), (2,)])
    network.everywhere(group)
    network.answered.clear()
    for rank in (0, 1, 2):
        assert network.answered == []
        network.submit(rank, group)
        network.settle()
    assert network.answered[0].cached == {0: b"\x03"}


@pytest.mark.parametrize("sizes", [(2, 3, 3, 2, 2), (3, 1, 1, 3), (1, 2, 3, 1, 2, 3, 3)])
def test_a_group_of_one_name_and_changing_size(sizes: tuple[int, ...]) -> None:
    network = Network(2, capacity=16)
    for size in sizes:
        ends = network.everywhere(grouped("g", [(1,)] * size))
        assert [len(each) for each in ends] == [size, size], "a rank hangs"
    network.check_all()


def test_groups_of_one_name_and_different_sizes_at_the_same_time() -> None:
    network = Network(2)
    for _ in range(3):
        ends = [network.submit(r, grouped("g", [(1,)] * size)) for r in (0, 1) for size in (2 + r, 3 - r)]
        network.settle()
        assert [len(e) for e in ends if e is not None] == [2, 3, 3, 2]
    network.check_all()


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("other", [0, 1, 2])
@pytest.mark.parametrize("evicted", [False, True])
def test_groups_of_different_sizes_fail_where_both_are_remembered(
    late: int, other: int, evicted: bool
) -> None:
    """Every rank sends bits of cached tensors, and the bits differ between ranks."""
    network = Network(3, capacity=6)
    pair, triple = grouped("g", [(1,)] * 2), grouped("g", [(1,)] * 3)
    for _ in range(2):
        network.everywhere(pair)
        network.everywhere(triple)
        network.everywhere([allreduce("x")])
    if evicted:
        network.everywhere([allreduce("y")])
    ends = {}
    for rank in [r for r in range(3) if r != late] + [late]:
        ends[rank] = network.submit(rank, triple if rank == other else pair)
        network.settle()
    for rank, each in ends.items():
        assert each is not None
        assert len(each) == (3 if rank == other else 2), "a rank hangs"
        assert all("Mismatched sizes of the group 'g'" in text for text in texts(each).values())
    for again in (pair, triple):
        for each in network.everywhere(again):
            assert not any(texts(each).values())
    network.check_all()


def test_the_refusal_of_one_does_not_fail_another_group_of_its_name() -> None:
    network = Network(2)
    pair, triple = grouped("g", [(1,)] * 2), grouped("g", [(1,)] * 3)
    network.refuse(0, pair[0])
    network.submit(0, triple)
    good, bad = network.submit(1, triple), network.submit(1, pair)
    network.settle()
    assert good is not None
    assert bad is not None
    assert set(texts(good).values()) == {""}
    assert all(texts(bad).values())
    network.check_all()


@pytest.mark.parametrize("cached", [False, True])
def test_a_refusal_may_not_know_the_size(cached: bool) -> None:
    """A grouped call whose argument is no list is refused without a size."""
    network = Network(3)
    group = grouped("g", [(1,), (1,)])
    if cached:
        network.everywhere(group)
    unknown = Request(group[0].type, "g", group="g", error="TypeError: no list")
    before = network.submit(0, group)
    network.settle()
    network.ranks[1].fresh.append((0, unknown))
    network.settle()
    after = network.submit(2, group)
    network.settle()
    for ends in (before, after):
        assert ends is not None
        assert {e.response.error.rank for e in ends if e.response.error is not None} == {1}
    network.check_all()


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_one_mismatch_fails_every_member_on_every_rank(odd: int, order: tuple[int, ...]) -> None:
    network = Network(3)
    shapes = [(1,), (2,), (3,)]
    wrong = [(9,) if i == odd else shape for i, shape in enumerate(shapes)]
    ends = {}
    for rank in order:
        ends[rank] = network.submit(rank, grouped("g", wrong if rank == 1 else shapes))
        network.settle()
    name = f"g_{odd + 1}of3"
    text = (
        f"Mismatched shapes of allreduce {name!r}: ranks 0, 2: ({odd + 1},); rank 1: (9,)."
        " Every rank must submit the same under one name."
    )
    for each in ends.values():
        assert each is not None
        expected = {f"g_{i}of3": f"Its group failed with {name!r}: {text}" for i in (1, 2, 3)}
        assert texts(each) == {**expected, name: text}
        assert {e.response.error.kind for e in each if e.response.error is not None} == {ErrorKind.MISMATCH}
    assert set(texts(network.everywhere(grouped("g", shapes))[0]).values()) == {""}
    network.check_all()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("cached", [False, True])
def test_grouped_here_and_single_there(first: int, cached: bool) -> None:
    network = Network(2)
    group = grouped("g", [(1,), (1,)])
    alone = [allreduce(r.name, r.shape) for r in group]
    if cached:
        network.everywhere(group)
    submissions: list[list[Done]] = []
    for rank in (first, 1 - first):
        for unit in [group] if rank == 0 else [[r] for r in alone]:
            submitted = network.submit(rank, unit)
            network.settle()
            assert submitted is not None
            submissions.append(submitted)
    ends = [end for each in submissions for end in each]
    (whole,) = (each for each in submissions if len(each) == 2)
    assert whole[0].seq == whole[1].seq, "the group failed as one unit"
    text = (
        "Mismatched grouping of allreduce 'g_1of2': rank 0: one of 2 in 'g'; rank 1: not grouped."
        " Every rank must submit the same under one name."
    )
    assert sorted(e.response.request.name for e in ends) == ["g_1of2", "g_1of2", "g_2of2", "g_2of2"]
    assert all(each.endswith(text) or "g_2of2" in each for each in texts(ends).values())
    network.check_all()


def test_bits_of_half_a_group_are_not_ready() -> None:
    """The table waits for the bits of all tensors of a group, even if every rank sent half of them."""
    table = MessageTable(0, (0, 1), 8)
    for request in grouped("g", [(1,), (2,)]):
        for rank in (0, 1):
            table.submit(Senders.of(rank), request, 1, 0.0)
    assert [r.slot for r in table.take_responses()] == [0, 1]
    for rank in (0, 1):
        table.submit_hits(Senders.of(rank), 0b01, 1, 2, 0.0)
    assert table.take_hits() == 0
    for rank in (0, 1):
        table.submit_hits(Senders.of(rank), 0b10, 1, 2, 0.0)
    assert table.take_hits() == 0b11


def test_refused_alone_here_and_grouped_there() -> None:
    network = Network(3)
    group = grouped("g", [(1,), (1,)])
    first = network.submit(0, group)
    network.settle()
    network.refuse(1, allreduce("g_1of2"))
    network.settle()
    second = network.submit(2, group)
    third = network.submit(1, [allreduce("g_2of2", (1,))])
    network.settle()
    for ends in (first, second, third):
        assert ends is not None
        assert all(texts(ends).values())
    network.check_all()


def test_a_tensor_that_is_ready_waits_for_the_rest_of_its_group() -> None:
    table = MessageTable(0, (0, 1), 8)
    first, second = grouped("g", [(1,), (2,)])
    for rank, request in ((0, first), (1, first), (0, second)):
        table.submit(Senders.of(rank), request, 1, 0.0)
        check_invariants(table)
        assert table.take_responses() == []
    table.submit(Senders.of(1), second, 1, 0.0)
    assert [r.request.name for r in table.take_responses()] == ["g_1of2", "g_2of2"]
    check_invariants(table)


def test_a_failed_group_does_not_take_a_new_call_of_another_rank_with_it() -> None:
    """Rank 1 has had its error, so its group is a new call; rank 0's first call of the group fails."""
    network = Network(2)
    group = grouped("g", [(1,), (1,)])
    network.refuse(1, allreduce("g_2of2", (1,)))
    network.settle()
    waiting = network.submit(1, group)
    network.settle()
    failed = network.submit(0, group)
    network.settle()
    assert failed is not None
    assert [e.response.error is not None for e in failed] == [True, True]
    assert waiting == []
    again = network.submit(0, group)
    network.settle()
    for ends in (waiting, again):
        assert ends is not None
        assert texts(ends) == {"g_1of2": "", "g_2of2": ""}
    network.check_all()


def test_a_duplicate_of_a_tensor_that_fails_with_a_group_counts_after_it() -> None:
    network = Network(3)
    group = grouped("g", [(1,), (1,)])
    one, two = (allreduce(r.name, r.shape) for r in group)
    network.refuse(1, two, text="ValueError: first")
    network.settle()
    single = network.submit(2, [one])
    assert network.submit(2, [one]) is None
    network.settle()
    whole = network.submit(0, group)
    network.settle()
    behind = network.submit(0, [one])
    network.settle()
    rest = network.submit(1, [one])
    network.settle()
    last = network.submit(1, [one])
    network.settle()
    for ends, cause in (
        *((ends, "rank 1 refused it: ValueError: first") for ends in (single, whole, rest)),
        *((ends, "rank 2 refused it: DuplicateNameError: in flight") for ends in (behind, last)),
    ):
        assert ends
        assert all(cause in text for text in texts(ends).values())
    assert set(texts(network.everywhere(group)[0]).values()) == {""}
    network.check_all()


def test_a_duplicate_group_waits_for_the_first() -> None:
    network = Network(2)
    group = grouped("g", [(1,), (1,)])
    for _ in range(2):
        first = network.submit(0, group)
        assert network.submit(0, group) is None
        network.settle()
        other = network.submit(1, group)
        network.settle()
        again = network.submit(1, group)
        network.settle()
        assert first is not None
        assert other is not None
        assert again is not None
        assert set(texts(first).values()) == set(texts(other).values()) == {""}
        assert all(texts(again).values())
    network.check_all()


def test_a_member_that_was_evicted_brings_the_others_back() -> None:
    network = Network(2, capacity=3)
    group = grouped("g", [(1,), (2,)])
    network.everywhere(group)
    network.everywhere([allreduce("x"), allreduce("y")])
    message = None
    for rank in (0, 1):
        network.submit(rank, group)
        message = network.send(rank)
    assert message is not None
    assert message.bits
    assert message.requests, "half of the group is cached, half is not"
    network.settle()
    network.check_all()
