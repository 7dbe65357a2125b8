"""Join: the operations that the remaining ranks can still run, and the errors of the others."""

from __future__ import annotations

import pytest

from pyhvd.controller import Stalled
from pyhvd.negotiation.messages import (
    JOIN_NAME,
    ErrorInfo,
    ErrorKind,
    Request,
    RequestType,
    Response,
    encode,
    iter_bits,
)
from tests.unit.negotiation.simulation import Done, Network, allreduce, grouped, tensor

JOIN = Request(RequestType.JOIN, "join.noname")
ADVICE = "Call it before the first rank joins or after join() has returned."


def with_joined(
    request: Request, size: int = 3, joined: tuple[int, ...] = (1,)
) -> tuple[Network, list[Done]]:
    """Let some ranks join and the others submit; return the ends on the first rank that has not joined."""
    network = Network(size)
    for rank in joined:
        network.submit(rank, [JOIN])
    network.settle()
    ends = [network.submit(rank, [request]) for rank in range(size) if rank not in joined]
    network.settle()
    assert ends[0] is not None
    return network, ends[0]


def finish(network: Network) -> list[Response]:
    """Let the remaining ranks join; check that no state is left; return the last responses."""
    for rank in [r.worker.rank for r in network.ranks if not r.joining]:
        network.submit(rank, [JOIN])
        network.settle()
    network.check_no_residue()
    network.check_slots()
    network.check_same_order()
    return network.answered[-1].responses


def test_a_join_waits_where_nothing_else_goes_on() -> None:
    network = Network(3)

    def say(rank: int, request: Request, now: float) -> None:
        network.submit(rank, [request])
        network.send(rank)
        network.deliver_up(rank, now)

    say(1, JOIN, 5.0)
    assert network.coordinator.stalled() == [Stalled(0, JOIN_NAME, 5.0, 0b10, 0b101)]
    say(0, allreduce("x"), 7.0)
    assert network.coordinator.stalled() == [Stalled(0, "x", 7.0, 0b1, 0b100)], "the tensor is what waits"
    say(2, allreduce("x"), 8.0)
    network.settle()
    assert network.coordinator.stalled() == [Stalled(0, JOIN_NAME, 8.0, 0b10, 0b101)]
    say(0, JOIN, 9.0)
    assert network.coordinator.stalled() == [Stalled(0, JOIN_NAME, 9.0, 0b11, 0b100)]
    say(2, JOIN, 10.0)
    network.settle()
    assert network.coordinator.stalled() == []


ADASUM = Request(RequestType.ADASUM, "x", 7, (4,), 2)
REDUCESCATTER = Request(RequestType.REDUCESCATTER, "x", 7, (4,), 1)


@pytest.mark.parametrize(
    "request_",
    [
        allreduce("x"),
        allreduce("x", op=3),
        ADASUM,
        REDUCESCATTER,
        tensor(RequestType.BROADCAST, "x", root=0),
        tensor(RequestType.ALLGATHER, "x", (4, 2)),
    ],
    ids=lambda r: f"{RequestType(r.type).name}-{r.op}",
)
def test_joined_ranks_take_part_without_a_tensor(request_: Request) -> None:
    network, ends = with_joined(request_)
    (end,) = ends
    assert end.response.error is None
    assert end.response.joined == (1,)
    assert end.response.slot == -1, "what a joined rank took part in is not what the cache should hold"
    assert network.ranks[1].history[-1][1] == end.response
    finish(network)


def test_joined_ranks_have_no_rows_in_an_allgather() -> None:
    network, ends = with_joined(tensor(RequestType.ALLGATHER, "x", (4, 2)), joined=(0, 2))
    assert ends[0].response.dims == (0, 4, 0)
    finish(network)


@pytest.mark.parametrize(
    ("request_", "joined", "text"),
    [
        (
            tensor(RequestType.ALLTOALL, "x", (3,)),
            (1,),
            f"alltoall 'x' needs every rank, but rank 1 already called join(). {ADVICE}",
        ),
        (
            Request(RequestType.BARRIER, "barrier.0"),
            (0, 1),
            f"barrier 'barrier.0' needs every rank, but ranks 0-1 already called join(). {ADVICE}",
        ),
        (
            tensor(RequestType.BROADCAST, "x", root=1),
            (1,),
            f"broadcast 'x' has its root on rank 1, but rank 1 already called join(). {ADVICE}",
        ),
        (
            Request(RequestType.ADD_PROCESS_SET, "set.add.0", ranks=(0, 1)),
            (2,),
            f"add_process_set 'set.add.0' needs every rank, but rank 2 already called join(). {ADVICE}",
        ),
        (
            Request(RequestType.REMOVE_PROCESS_SET, "set.remove.0", ranks=(1,)),
            (2,),
            f"remove_process_set 'set.remove.0' needs every rank, but rank 2 already called join(). {ADVICE}",
        ),
    ],
    ids=lambda value: RequestType(value.type).name if isinstance(value, Request) else "",
)
def test_what_needs_every_rank_fails(request_: Request, joined: tuple[int, ...], text: str) -> None:
    network, ends = with_joined(request_, joined=joined)
    error = ends[0].response.error
    assert error is not None
    assert error.kind == ErrorKind.MISMATCH
    assert error.message == text
    assert error.per_rank == dict.fromkeys(joined, "joined")
    finish(network)


def test_the_last_to_join_is_the_same_everywhere() -> None:
    network = Network(3)
    for rank in (2, 0, 1):
        network.submit(rank, [JOIN])
        network.send(rank)
    for rank in (0, 2, 1):
        network.deliver_up(rank)
    network.settle()
    assert [rank.history[-1][1].value for rank in network.ranks] == [1, 1, 1]


def test_join_twice_in_a_row() -> None:
    network = Network(3)
    for last in (2, 0, 1, 1):
        for rank in [r for r in range(3) if r != last] + [last]:
            network.submit(rank, [JOIN])
            network.settle()
        assert network.answered[-1].responses == [Response(JOIN, value=last)]
        network.everywhere([allreduce("between")])
    network.check_all()


def test_bits_that_are_pending_when_a_rank_joins() -> None:
    network = Network(3)
    requests = [allreduce("x"), *grouped("g", [(1,), (2,)])]
    for _ in range(2):
        network.everywhere(requests)
    network.submit(0, requests)
    network.settle()
    assert network.sent[-1].requests == []
    network.submit(1, [JOIN])
    network.settle()
    network.submit(2, requests)
    network.settle()
    names = [r.request.name for r in network.answered[-1].responses]
    assert names == ["x", "g_1of2", "g_2of2"]
    assert {r.joined for r in network.answered[-1].responses} == {(1,)}
    finish(network)


def test_bits_of_a_rank_that_has_not_heard_of_the_join() -> None:
    network = Network(2)
    for _ in range(2):
        network.everywhere([allreduce("x")])
    network.submit(0, [JOIN])
    network.settle()
    network.submit(1, [allreduce("x")])
    network.settle()
    assert network.sent[-1].bits
    assert network.answered[-1].responses[0].joined == (0,)
    finish(network)
    network.everywhere([allreduce("x")])
    assert network.answered[-1].cached, "the cache has not been forgotten"


@pytest.mark.parametrize("joining", [0, 1, 2])
def test_bits_of_a_rank_that_joins_in_the_same_message(joining: int) -> None:
    network = Network(3)
    requests = [allreduce("x"), tensor(RequestType.ALLGATHER, "rows"), *grouped("g", [(1,), (2,)])]
    for _ in range(2):
        network.everywhere(requests)
    for rank in {0, 1, 2} - {joining}:
        network.submit(rank, requests)
        network.settle()
    ends = network.submit(joining, [*requests, JOIN])
    network.settle()
    assert network.sent[-1].bits
    assert len(network.sent[-1].requests) == 1
    assert [r.request.name for r in network.answered[-1].responses] == ["x", "rows", "g_1of2", "g_2of2"]
    assert {r.joined for r in network.answered[-1].responses} == {()}, "it is among those that submitted"
    assert ends is not None
    finish(network)


def test_what_a_rank_submitted_before_it_joined_counts() -> None:
    network = Network(2)
    first = network.submit(0, [allreduce("x")])
    network.submit(0, [JOIN])
    second = network.submit(1, [allreduce("x")])
    network.settle()
    assert first is not None
    assert second is not None
    assert first[0].response == second[0].response
    assert first[0].response.joined == ()
    finish(network)


def test_what_nobody_else_submits_ends_when_all_have_joined() -> None:
    network = Network(2)
    ends = network.submit(0, [allreduce("x")])
    network.submit(0, [JOIN])
    network.settle()
    network.submit(1, [JOIN])
    network.settle()
    assert ends is not None
    assert ends[0].response.joined == (1,)
    kinds = [r.request.type for r in network.answered[-1].responses]
    assert kinds == [RequestType.ALLREDUCE, RequestType.JOIN], "the join is the last thing to happen"
    finish(network)


def test_a_refused_join_is_no_join() -> None:
    network = Network(2)
    network.submit(0, [JOIN])
    network.refuse(0, JOIN, text="DuplicateNameError: in flight")
    network.settle()
    assert network.answered == []
    network.submit(1, [JOIN])
    network.settle()
    assert network.answered[-1].responses == [Response(JOIN, value=1)]


def test_joined_ranks_are_told_of_no_refusal() -> None:
    network = Network(3)
    network.submit(0, [JOIN])
    network.settle()
    network.refuse(1, allreduce("x"))
    ends = network.submit(2, [allreduce("x")])
    network.settle()
    assert ends is not None
    assert ends[0].response.only == (2,)
    finish(network)
    assert network.everywhere([allreduce("x")])[0][0].response.error is None


def test_a_rank_that_joins_after_a_refusal_needs_no_telling() -> None:
    network = Network(3)
    network.refuse(1, allreduce("x"))
    network.settle()
    network.submit(0, [JOIN])
    network.submit(2, [JOIN])
    network.settle()
    assert not network.coordinator._sets[0]._failed.by_key


def test_a_join_that_fails_a_group_fails_each_of_its_tensors_once() -> None:
    network = Network(3)
    ends = [network.submit(rank, grouped("g", [(1 + rank,), (5,)])) for rank in (0, 1)]
    network.settle()
    assert network.answered == []
    network.submit(2, [JOIN])
    network.settle()
    for each in ends:
        assert each is not None
        assert [end.response.request.name for end in each] == ["g_1of2", "g_2of2"]
        for end in each:
            assert end.response.error is not None
            assert "Mismatched shapes of allreduce 'g_1of2'" in end.response.error.message
    finish(network)


def test_duplicates_of_ranks_that_join_cancel_each_other() -> None:
    """Regression, found by random programs: a refusal that two joining ranks deferred was counted twice."""
    network = Network(3)
    x = allreduce("x")
    for rank in (0, 1):
        network.submit(rank, [x])
        assert network.submit(rank, [x]) is None
        network.submit(rank, [JOIN])
    network.settle()
    network.submit(2, [x])
    assert network.submit(2, [x]) is None
    network.settle()
    ends = network.submit(2, [x])
    network.settle()
    assert ends is not None
    assert ends[0].response.error is None
    finish(network)


# -- in process sets ------------------------------------------------------------------------------------

PAIR = (0, 1)


def in_pair(size: int = 3, sets: tuple[tuple[int, ...], ...] = (PAIR,)) -> Network:
    """Return a network with process sets, by default one of the ranks 0 and 1, which has the id 1."""
    return Network(size, sets=sets)


def join(network: Network, *ranks: int) -> None:
    """Let ranks join, one after the other."""
    for rank in ranks:
        network.submit(rank, [JOIN])
        network.settle()


@pytest.mark.parametrize(
    "request_",
    [
        allreduce("x"),
        allreduce("x", op=3),
        ADASUM,
        REDUCESCATTER,
        tensor(RequestType.BROADCAST, "x", root=0),
        tensor(RequestType.ALLGATHER, "x", (4, 2)),
    ],
    ids=lambda r: f"{RequestType(r.type).name}-{r.op}",
)
@pytest.mark.parametrize("cached", [False, True])
def test_joined_members_of_a_set_take_part_without_a_tensor(request_: Request, cached: bool) -> None:
    network = in_pair()
    if cached:
        network.everywhere([request_], 1)
    join(network, 1)
    ends = network.submit(0, [request_], 1)
    network.settle()
    assert ends is not None
    (end,) = ends
    assert (end.response.error, end.response.joined, end.response.slot) == (None, (1,), -1)
    assert end.response.dims == ((4, 0) if request_.type == RequestType.ALLGATHER else ())
    assert network.ranks[1].history[-1][1] == end.response
    assert not any(response.process_set for _, response in network.ranks[2].history)
    finish(network)
    network.everywhere([request_], 1)
    assert bool(network.answered[-1].cached) == cached


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (tensor(RequestType.ALLTOALL, "x", (3,)), "alltoall 'x' needs every rank"),
        (Request(RequestType.BARRIER, "x"), "barrier 'x' needs every rank"),
        (tensor(RequestType.BROADCAST, "x", root=1), "broadcast 'x' has its root on rank 1"),
    ],
)
@pytest.mark.parametrize("order", ["join first", "call first"])
def test_what_needs_every_member_of_a_set_fails(request_: Request, what: str, order: str) -> None:
    network = in_pair()
    if order == "join first":
        join(network, 1)
    ends = network.submit(0, [request_], 1)
    network.settle()
    if order == "call first":
        join(network, 1)
    assert ends is not None
    error = ends[0].response.error
    assert error is not None
    assert error.kind == ErrorKind.MISMATCH
    assert error.message == f"{what}, but rank 1 already called join(). {ADVICE}"
    assert (ends[0].response.only, error.per_rank) == ((0,), {1: "joined"})
    finish(network)


def test_the_join_of_ranks_that_are_in_no_set_changes_nothing_there() -> None:
    network = in_pair()
    for _ in range(2):
        network.everywhere([allreduce("x")], 1)
    join(network, 2)
    ends = network.everywhere([allreduce("x")], 1)
    assert network.answered[-1].cached, "the set goes on as before"
    assert all(end.response.joined == () for (end,) in ends)
    finish(network)


@pytest.mark.parametrize("joining", PAIR)
def test_bits_of_a_set_that_are_pending_when_a_member_joins(joining: int) -> None:
    network = in_pair()
    requests = [allreduce("x"), tensor(RequestType.ALLGATHER, "rows"), *grouped("g", [(1,), (2,)])]
    for _ in range(2):
        network.everywhere(requests, 1)
    network.submit(1 - joining, requests, 1)
    network.settle()
    assert network.sent[-1].bits
    join(network, joining)
    assert [r.request.name for r in network.answered[-1].responses] == ["x", "rows", "g_1of2", "g_2of2"]
    assert {r.joined for r in network.answered[-1].responses} == {(joining,)}
    finish(network)


def test_bits_of_sets_in_the_message_of_a_join() -> None:
    network = in_pair(sets=(PAIR, (1, 2)))
    for set_id in (1, 2) * 2:
        network.everywhere([allreduce("x")], set_id)
    for set_id in (1, 2):
        network.submit(1, [allreduce("x")], set_id)
    network.submit(1, [JOIN])
    network.settle()
    assert (sorted(network.sent[-1].bits), len(network.sent[-1].requests)) == ([1, 2], 1)
    for rank, set_id in ((0, 1), (2, 2)):
        network.submit(rank, [allreduce("x")], set_id)
        network.settle()
        assert [r.joined for r in network.answered[-1].responses] == [()], "it had submitted it"
    finish(network)


def test_a_set_whose_members_have_all_joined() -> None:
    """What one of them has submitted ends at once; the ranks outside still work."""
    network = in_pair()
    pending = network.submit(0, [allreduce("x"), *grouped("g", [(1,), (2,)])], 1)
    join(network, 0)
    assert pending == []
    join(network, 1)
    assert pending is not None
    assert [end.response.joined for end in pending] == [(1,)] * 3
    assert network.coordinator._sets[1].live == 0
    assert network.coordinator.stalled() == [Stalled(0, JOIN_NAME, 0.0, 0b11, 0b100)]
    ends = network.submit(2, [allreduce("y")])
    network.settle()
    assert ends is not None
    assert ends[0].response.joined == (0, 1)
    finish(network)
    network.everywhere([allreduce("x")], 1)
    network.check_all()


def test_the_join_ends_behind_the_calls_of_all_sets() -> None:
    network = in_pair(sets=(PAIR, (1, 2)))
    network.submit(1, [allreduce("x")], 1)
    network.submit(1, [allreduce("x")], 2)
    network.submit(1, [JOIN])
    network.settle()
    for rank in (0, 2):
        network.submit(rank, [JOIN])
    network.settle()
    ran = [(r.process_set, r.request.name) for answer in network.answered for r in answer.responses]
    assert ran == [(1, "x"), (2, "x"), (0, JOIN_NAME)]
    assert [r.joined for r in network.answered[-1].responses] == [(0,), (1,), ()]
    network.check_all()


@pytest.mark.parametrize("ends_in_the_same_list", [False, True])
def test_a_set_that_is_added_while_a_member_has_joined(ends_in_the_same_list: bool) -> None:
    """A rank may submit the addition in one thread and join in another."""
    network = Network(3)
    add = Request(RequestType.ADD_PROCESS_SET, "add", ranks=PAIR)
    network.submit(1, [add])
    network.submit(1, [JOIN])
    network.settle()
    if ends_in_the_same_list:
        for rank in (0, 2):
            network.submit(rank, [add])
            network.submit(rank, [JOIN])
        network.settle()
    else:
        for rank in (0, 2):
            network.submit(rank, [add])
        network.settle()
        ends = network.submit(0, [allreduce("x")], 1)
        network.settle()
        assert ends is not None
        assert ends[0].response.joined == (1,)
        finish(network)
    assert [end.response.joined for (end,) in network.everywhere([allreduce("x")], 1)] == [(), ()]
    network.check_all()


def test_a_set_that_is_removed_while_a_member_has_joined() -> None:
    network = in_pair()
    remove = Request(RequestType.REMOVE_PROCESS_SET, "remove", ranks=(1,))
    network.submit(1, [remove])
    network.submit(1, [JOIN])
    network.settle()
    for rank in (0, 2):
        network.submit(rank, [remove])
    network.settle()
    assert sorted(network.coordinator._sets) == [0]
    finish(network)


def test_members_that_joined_are_told_of_no_refusal_in_a_set() -> None:
    network = in_pair(4, sets=((0, 1, 2),))
    join(network, 0)
    network.refuse(1, allreduce("x"), 1)
    ends = network.submit(2, [allreduce("x")], 1)
    network.settle()
    assert ends is not None
    assert ends[0].response.only == (2,)
    network.refuse(1, allreduce("y"), 1)
    network.settle()
    join(network, 2)
    assert not network.coordinator._sets[1]._failed.by_key
    finish(network)


def test_who_is_missing_in_a_set_has_not_joined() -> None:
    network = in_pair(4, sets=((0, 1, 2),))
    join(network, 1, 3)
    network.submit(0, [allreduce("x")], 1)
    network.send(0)
    network.deliver_up(0, 5.0)
    assert network.coordinator.stalled() == [Stalled(1, "x", 5.0, 0b1, 0b100)]
    network.settle()
    join(network, 2)
    finish(network)


def test_ranks_of_a_stop_have_joined() -> None:
    """A stop reaches all ranks, and nothing is left that a joined rank would run after it."""
    network = in_pair()
    join(network, 1)
    network.submit(0, [allreduce("x")], 1)
    network.send(0)
    network.deliver_up(0)
    stop = ErrorInfo(ErrorKind.RANK_FAILED, "no", 2)
    network.up[2].append(encode(network.ranks[2].worker.compose([], stop)))
    network.deliver_up(2)
    network.respond()
    (answer,) = network.answered
    assert [r.joined for r in answer.responses] == [(1,)]
    assert answer.stop == stop
    assert iter_bits(network.coordinator.audience(answer)) == [0, 1, 2]
