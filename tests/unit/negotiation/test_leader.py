"""A leader merges equal messages, keeps each rank's order, and waits for a limited time only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from pyhvd.controller import Coordinator
from pyhvd.negotiation.leader import Leader
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    JOIN_NAME,
    PROTOCOL_VERSION,
    ErrorInfo,
    ErrorKind,
    MergedList,
    MergedPart,
    Request,
    RequestList,
    RequestType,
    Response,
    bits_of,
    bits_to_bytes,
    bytes_to_bits,
    decode_merged,
    encode,
    iter_bits,
    pack_ranks,
    unpack_ranks,
)
from tests.unit.negotiation.simulation import allreduce, grouped, refusal

A, B, C = (allreduce(name) for name in "abc")
ALL = (0, 1, 2, 3)
HERE = 0b1110
"""Ranks 1, 2 and 3 are below the leader, which is rank 1; rank 0 is elsewhere."""


def message(*requests: Request, bits: int = 0, seen: int = 0, set_id: int = 0) -> RequestList:
    """Return a rank's message."""
    packed = {set_id: bits_to_bytes(bits)} if bits else {}
    return RequestList(PROTOCOL_VERSION, seen, packed, [(set_id, r) for r in requests])


def leader(**sets: tuple[int, ...]) -> Leader:
    """Return a leader of the ranks 1 to 3, which waits for 1 s."""
    return Leader(HERE, {GLOBAL_SET: ALL, **{int(name[1:]): ranks for name, ranks in sets.items()}}, 1.0)


def take(merging: Leader, rank: int, sent: RequestList, now: float = 0.0) -> None:
    """Let a leader take a rank's message."""
    merging.take(rank, MergedList.of(rank, sent).parts, now)


Plain = tuple[list[int], dict[int, int], list[str]]


def flush(merging: Leader) -> list[Plain]:
    """Return what a leader sends, through the wire form: ranks, bits and names of each part."""
    parts = decode_merged(encode(merging.flush()), 7).parts
    return [
        (
            iter_bits(unpack_ranks(part.ranks)),
            {set_id: bytes_to_bits(data) for set_id, data in part.message.bits.items()},
            [request.name for _, request in part.message.requests],
        )
        for part in parts
    ]


def test_equal_messages_become_one_part_that_is_sent_when_the_last_has_come() -> None:
    merging = leader()
    for rank in (2, 3, 1):
        assert merging.due == (None if rank == 2 else 6.0)
        take(merging, rank, message(A, B, bits=0b101), 5.0 if rank == 2 else 5.5)
    assert merging.due == 5.0, "nothing to wait for"
    (part,) = merging.flush().parts
    assert (unpack_ranks(part.ranks), part.last) == (HERE, 1)
    assert part.message == structs.replace(message(A, B, bits=0b101), sites=["", ""])
    assert merging.due is None


def test_messages_that_are_cut_elsewhere_are_merged_tensor_by_tensor() -> None:
    merging = leader()
    take(merging, 1, message(A))
    take(merging, 1, message(B, C))
    take(merging, 2, message(A, B))
    take(merging, 2, message(C))
    take(merging, 3, message(A, B, C))
    assert merging.due == 0.0
    assert flush(merging) == [([1, 2, 3], {}, ["a", "b", "c"])]


def test_each_ranks_order_is_kept() -> None:
    merging = leader()
    take(merging, 1, message(A, B))
    take(merging, 2, message(B, A))
    take(merging, 3, message(A, B))
    assert flush(merging) == [([1, 3], {}, ["a"]), ([1, 2, 3], {}, ["b"]), ([2], {}, ["a"])]


def test_bits_before_and_behind_a_request() -> None:
    merging = leader()
    for rank in (1, 2):
        take(merging, rank, message(A, bits=0b01))
        take(merging, rank, message(bits=0b10))
    assert flush(merging) == [([1, 2], {0: 0b01}, ["a"]), ([1, 2], {0: 0b10}, [])]


def test_bits_of_different_lists_mean_different_tensors() -> None:
    merging = leader()
    take(merging, 1, message(bits=0b1, seen=4))
    take(merging, 2, message(bits=0b1, seen=5))
    assert [part.message.seen for part in merging.flush().parts] == [4, 5]


def test_bits_are_merged_slot_by_slot() -> None:
    merging = leader()
    take(merging, 1, message(bits=0b0111))
    take(merging, 2, message(bits=0b1110))
    take(merging, 3, message(bits=0b0110))
    found = flush(merging)
    assert sorted(found) == [([1], {0: 0b0001}, []), ([1, 2, 3], {0: 0b0110}, []), ([2], {0: 0b1000}, [])]


def test_requests_of_different_lists_are_merged_in_the_global_set_only() -> None:
    """The id of a removed set may be in use again, for another set."""
    merging = leader(s5=(1, 2))
    for rank, seen in ((1, 4), (2, 3)):
        take(merging, rank, message(A, seen=seen))
        take(merging, rank, message(A, seen=seen, set_id=5))
    found = [(unpack_ranks(part.ranks), part.message.seen) for part in merging.flush().parts]
    assert found == [(0b110, 3), (0b010, 4), (0b100, 3)]


def test_lines_are_kept_apart() -> None:
    merging = leader()
    for rank, line in ((1, "x.py:1"), (2, "x.py:2"), (3, "x.py:1")):
        take(merging, rank, structs.replace(message(A), sites=[line]))
    found = [(unpack_ranks(part.ranks), part.message.sites) for part in merging.flush().parts]
    assert found == [(0b1010, ["x.py:1"]), (0b0100, ["x.py:2"])]


def test_a_late_rank_is_not_waited_for_twice() -> None:
    merging = leader()
    take(merging, 1, message(A, bits=1), 10.0)
    take(merging, 2, message(A, bits=1), 10.1)
    assert merging.due == 11.0
    merging.flush()
    take(merging, 3, message(A, bits=1), 12.0)
    assert merging.due == 12.0, "the others have sent it before"
    merging.flush()
    take(merging, 2, message(A, bits=1), 20.0)
    assert merging.due == 21.0, "the next turn"


def test_ranks_of_other_sets_are_not_waited_for() -> None:
    merging = leader(s1=(0, 2))
    take(merging, 2, message(A, set_id=1), 3.0)
    assert merging.due == 3.0
    take(merging, 3, message(A), 3.0)
    assert merging.due == 4.0
    merging.flush()
    take(merging, 1, message(A, set_id=9), 3.0)
    assert merging.due == 3.0, "the leader does not know this set yet"


def test_joined_ranks_are_not_waited_for() -> None:
    merging = leader()
    take(merging, 3, message(Request(RequestType.JOIN, JOIN_NAME)), 1.0)
    assert merging.due == 2.0
    merging.flush()
    for rank, due in ((1, 4.0), (2, 3.0)):
        take(merging, rank, message(A, bits=1), 3.0)
        assert merging.due == due
    merging.flush()
    take(merging, 3, message(A), 5.0)
    assert merging.due == 6.0, "it works again"


def test_joined_ranks_are_not_waited_for_in_their_sets() -> None:
    merging = leader(s1=(1, 3))
    take(merging, 3, message(Request(RequestType.JOIN, JOIN_NAME)), 1.0)
    merging.flush()
    take(merging, 1, message(A, bits=1, set_id=1), 3.0)
    assert merging.due == 3.0
    merging.flush()
    take(merging, 3, message(A, set_id=1), 5.0)
    assert merging.due == 6.0, "it works again"


@pytest.mark.parametrize("kind", ["refusal", "stop"])
def test_refusals_and_stops_do_not_wait(kind: str) -> None:
    merging = leader()
    stop = ErrorInfo(ErrorKind.SHUT_DOWN, "enough", 2)
    sent = message(refusal(A)) if kind == "refusal" else structs.replace(message(), stop=stop)
    if kind == "stop":
        take(merging, 1, message(A), 7.0)
    take(merging, 2, sent, 7.0)
    assert merging.due is not None
    assert merging.due <= 7.0
    last = merging.flush().parts[-1]
    assert unpack_ranks(last.ranks) == 0b100
    assert last.message.stop == (stop if kind == "stop" else None)


def test_leaders_merge_what_leaders_have_merged() -> None:
    merging = Leader(0b11111110, {GLOBAL_SET: tuple(range(8))}, 1.0)
    take(merging, 1, message(A, B))
    for child, ranks in ((2, 0b00001100), (4, 0b11110000)):
        assert merging.due == 1.0
        merging.take(child, [MergedPart(pack_ranks(ranks), child, message(A, B))], 0.0)
    assert merging.due == 0.0
    assert flush(merging) == [(list(range(1, 8)), {}, ["a", "b"])]


@given(ranks=st.sets(st.integers(0, 500), min_size=1))
def test_ranks_on_the_wire(ranks: set[int]) -> None:
    assert iter_bits(unpack_ranks(pack_ranks(bits_of(ranks)))) == sorted(ranks)


def test_ranks_on_the_wire_have_no_leading_zeros() -> None:
    assert pack_ranks(1 << 8000) == (1000, b"\x01")


messages = st.builds(
    lambda requests, bits, seen, set_id, line: structs.replace(
        message(*requests, bits=bits, seen=seen, set_id=set_id), sites=[line] * len(requests)
    ),
    requests=st.lists(st.sampled_from([A, B, C]), max_size=3),
    bits=st.sampled_from([0, 0, 1, 2, 3]),
    seen=st.integers(0, 1),
    set_id=st.sampled_from([0, 0, 1]),
    line=st.sampled_from(["x", "x", "y"]),
)
Spoken = tuple[int, Request, str, int]


def _speech(heard: Sequence[RequestList]) -> tuple[list[Spoken], list[set[tuple[int, int, int]]]]:
    """Return the requests of one rank's messages, and the bits before, between and after them."""
    requests: list[Spoken] = []
    bits: list[set[tuple[int, int, int]]] = [set()]
    for each in heard:
        for set_id, data in each.bits.items():
            bits[-1] |= {(set_id, each.seen, slot) for slot in iter_bits(bytes_to_bits(data))}
        for (set_id, request), line in zip(each.requests, each.sites, strict=True):
            # In the global set the number of a request's list has no meaning.
            requests.append((set_id, request, line, each.seen if set_id else 0))
            bits.append(set())
    return requests, bits


@given(
    spoken=st.lists(st.tuples(st.integers(1, 3), messages), max_size=12),
    cuts=st.sets(st.integers(0, 11), max_size=3),
)
def test_each_rank_is_heard_as_it_spoke(spoken: list[tuple[int, RequestList]], cuts: set[int]) -> None:
    """Rank 1 leads, rank 2 leads below it, and rank 3 is below rank 2; the leaders send now and then."""
    sets = {GLOBAL_SET: ALL, 1: ALL}
    upper, lower = Leader(0b1110, sets), Leader(0b1100, sets)
    sent: list[MergedPart] = []
    for index, (rank, each) in enumerate(spoken):
        (upper if rank == 1 else lower).take(rank, MergedList.of(rank, each).parts, 0.0)
        if index in cuts or index == len(spoken) - 1:
            upper.take(2, decode_merged(encode(lower.flush()), 7).parts, 0.0)
        if index not in cuts or index == len(spoken) - 1:
            sent += decode_merged(encode(upper.flush()), 7).parts
    for rank in (1, 2, 3):
        heard = [part.message for part in sent if unpack_ranks(part.ranks) >> rank & 1]
        assert _speech(heard) == _speech([each for sender, each in spoken if sender == rank])
    assert all(unpack_ranks(part.ranks) >> part.last & 1 for part in sent)


calls = st.sampled_from(
    [A, B, allreduce("a", (3,)), *grouped("g", [(1,), (2,)]), allreduce("g_1of2"), refusal(B)]
)
programs = st.lists(
    st.lists(calls, max_size=5, unique_by=lambda r: (r.name, bool(r.error))), min_size=3, max_size=3
)


def _outcome(sent: Sequence[MergedList]) -> list[Response]:
    """Return the coordinator's responses to all messages, in an order of their own."""
    coordinator = Coordinator(3, 8)
    for each in sent:
        coordinator.receive(each)
    answer = coordinator.respond()
    responses = [] if answer is None else answer.responses
    split = [structs.replace(r, only=(rank,)) for r in responses for rank in r.only or (-1,)]
    return sorted(split, key=lambda r: (r.request.name, r.only, str(r.error)))


@given(program=programs)
def test_merged_messages_have_the_same_responses(program: list[list[Request]]) -> None:
    """All messages of one merged message count as if they had come one by one, in some order."""
    sites = [[f"x.py:{rank % 2}"] * len(requests) for rank, requests in enumerate(program)]
    sent = [structs.replace(message(*r), sites=s) for r, s in zip(program, sites, strict=True)]
    merging = Leader(0b111, {GLOBAL_SET: (0, 1, 2)})
    for rank, each in enumerate(sent):
        take(merging, rank, each)
    parts = merging.flush().parts
    singly = [
        MergedList.of(rank, part.message) for part in parts for rank in iter_bits(unpack_ranks(part.ranks))
    ]
    assert _outcome([MergedList(PROTOCOL_VERSION, parts)]) == _outcome(singly)
    for rank, requests in enumerate(program):
        own = [p.message.requests for p in parts if unpack_ranks(p.ranks) >> rank & 1]
        assert [request for each in own for _, request in each] == requests
