"""Worker and coordinator together: the messages, the caches, and the report of waiting tensors."""

from __future__ import annotations

import pytest

from pyhvd.controller import Coordinator, Stalled, Worker
from pyhvd.errors import InternalError
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    PROTOCOL_VERSION,
    ErrorInfo,
    ErrorKind,
    MergedList,
    MergedPart,
    Request,
    RequestList,
    RequestType,
    ResponseList,
    TimelineOrder,
    bits_to_bytes,
    pack_ranks,
)
from tests.unit.negotiation.simulation import Network, allreduce, grouped, refusal, tensor

EVERY_KIND = [
    allreduce("a"),
    allreduce("scaled", prescale=0.5, postscale=2.0, op=4),
    allreduce("scalar", ()),
    allreduce("empty", (0,)),
    tensor(RequestType.ALLGATHER, "g", (3, 2)),
    tensor(RequestType.BROADCAST, "b", root=1),
    tensor(RequestType.ALLTOALL, "t", (4,)),
    tensor(RequestType.REDUCESCATTER, "r", (5,), op=0),
    Request(RequestType.BARRIER, "barrier.0"),
]


@pytest.mark.parametrize("request_", EVERY_KIND, ids=lambda r: r.name)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_every_rank_submits_comes_back_to_every_rank(request_: Request, size: int) -> None:
    network = Network(size, sets=())
    for _ in range(3):
        for ends in network.everywhere([request_]):
            assert [end.response.request for end in ends] == [request_]
            assert ends[0].response.error is None
    network.check_all()


def test_nothing_is_said_before_the_last_rank_has_submitted() -> None:
    network = Network(3)
    for rank in (2, 0):
        network.submit(rank, [allreduce("a")])
    network.settle()
    assert network.answered == []
    network.submit(1, [allreduce("a")])
    network.settle()
    assert [r.request.name for r in network.answered[0].responses] == ["a"]


def test_the_order_is_that_in_which_tensors_become_ready() -> None:
    network = Network(2)
    network.submit(0, [allreduce("x")])
    network.submit(0, [allreduce("y")])
    network.submit(1, [allreduce("y")])
    network.submit(1, [allreduce("x")])
    network.settle()
    assert [r.request.name for r in network.answered[0].responses] == ["y", "x"]


def test_from_the_second_step_on_only_bits_travel() -> None:
    network = Network(2, capacity=64)
    names = [allreduce(f"layer{i}.weight", (i + 1,)) for i in range(20)]
    network.everywhere(names)
    for step in range(5):
        network.sent.clear()
        network.answered.clear()
        network.everywhere(reversed(names) if step % 2 else names)
        assert [(m.requests, m.bits) for m in network.sent] == [([], {0: b"\xff\xff\x0f"})] * 2
        assert [(m.responses, m.cached) for m in network.answered] == [([], {0: b"\xff\xff\x0f"})]
    network.check_all()


@pytest.mark.parametrize("first", EVERY_KIND, ids=lambda r: r.name)
def test_every_kind_of_call_is_cached(first: Request) -> None:
    network = Network(2)
    network.everywhere([first])
    network.everywhere([first])
    assert network.answered[-1].responses == []


def test_allgather_with_rows_of_its_own_on_each_rank_is_cached() -> None:
    network = Network(2)
    requests = [tensor(RequestType.ALLGATHER, "g", (rank, 4)) for rank in range(2)]
    network.each(requests)
    ends = network.each(requests)
    assert network.answered[-1].responses == []
    assert ends[1][0].response.dims == (0, 1)


def test_forty_changes_of_shape_under_one_name() -> None:
    network = Network(3, capacity=4)
    for step in range(40):
        for ends in network.everywhere([allreduce("x", (step,))]):
            assert ends[0].response.request.shape == (step,)
    assert len(network.coordinator._sets[0].cache._slots) == 1
    network.check_all()


def test_allgather_whose_rows_change_at_each_step() -> None:
    network = Network(2, capacity=4)
    for step in range(40):
        ends = network.each([tensor(RequestType.ALLGATHER, "x", (step % 7 * (r + 1), 2)) for r in (0, 1)])
        assert ends[0][0].response.dims == (step % 7, step % 7 * 2)
    network.check_all()


def test_three_thousand_names_with_a_cache_of_1024() -> None:
    network = Network(2, capacity=1024)
    requests = [allreduce(f"t{i}") for i in range(3000)]
    for _ in range(2):
        ends = network.everywhere(requests)
        assert all(len(each) == 3000 for each in ends)
    assert len(network.coordinator._sets[0].cache._slots) == 1024
    ends = network.everywhere(requests[-500:])
    assert network.answered[-1].responses == [], "the most recent ones are still there"
    network.check_all()


def test_without_a_cache_everything_travels_in_full() -> None:
    network = Network(2, capacity=0)
    for _ in range(3):
        network.everywhere([allreduce("a")])
        assert network.answered[-1].responses[0].slot == -1
    network.check_all()


def test_overlapping_sets_have_names_and_caches_of_their_own() -> None:
    network = Network(3, sets=[(0, 1), (1, 2)])
    for step in range(3):
        for rank, sets in ((0, (1,)), (1, (1, 2)), (2, (2,))):
            for set_id in sets:
                network.submit(rank, [allreduce("same", (set_id,))], set_id)
        network.settle()
        assert len(network.answered) == step + 1
    assert network.answered[-1].cached == {1: b"\x01", 2: b"\x01"}
    network.check_all()


def test_ranks_are_told_what_waits_for_whom() -> None:
    network = Network(4)
    network.everywhere([allreduce("cached")])
    network.submit(2, [allreduce("late"), allreduce("cached")])
    network.submit(0, [allreduce("late")])
    for rank, now in ((0, 5.0), (2, 7.0)):
        network.send(rank)
        network.deliver_up(rank, now)
    assert network.coordinator.stalled() == [
        Stalled(0, "late", 5.0, 0b101, 0b1010),
        Stalled(0, "cached", 7.0, 0b100, 0b1011),
    ]


def test_time_goes_on_when_bits_become_requests() -> None:
    network = Network(2)
    network.everywhere([allreduce("a")])
    network.submit(0, [allreduce("a")])
    network.send(0)
    network.deliver_up(0, 3.0)
    network.submit(1, [Request(RequestType.JOIN, "join.noname")])
    network.coordinator._sets[0]._spill(allreduce("a"), 9.0)
    assert network.coordinator.stalled() == [Stalled(0, "a", 3.0, 0b1, 0b10)]


def test_a_group_that_lacks_a_member_names_it() -> None:
    network = Network(2)
    network.submit(0, grouped("g", [(1,), (1,)]))
    network.settle()
    assert [each.name for each in network.coordinator.stalled()] == ["g_1of2", "g_2of2"]


def test_shutdown_travels_to_everybody_once() -> None:
    coordinator = Coordinator(2, 8)
    workers = [Worker(0, 2), Worker(1, 2)]
    why = ErrorInfo(ErrorKind.SHUT_DOWN, "rank 1 called shutdown()", 1)
    coordinator.receive(MergedList.of(0, workers[0].compose([(0, allreduce("a"))])))
    coordinator.receive(MergedList.of(1, workers[1].compose([], why)))
    coordinator.receive(
        MergedList.of(0, workers[0].compose([], ErrorInfo(ErrorKind.SHUT_DOWN, "rank 0 did too", 0)))
    )
    answer = coordinator.respond()
    assert answer is not None
    assert answer.stop == why, "the first reason counts"
    assert coordinator.respond() is None


def test_work_that_is_ready_runs_before_a_shutdown() -> None:
    network = Network(2)
    network.submit(0, [allreduce("a")])
    network.submit(1, [allreduce("a")])
    for rank in (0, 1):
        network.send(rank)
        network.deliver_up(rank)
    network.coordinator.receive(
        MergedList.of(0, network.ranks[0].worker.compose([], ErrorInfo(ErrorKind.SHUT_DOWN, "x")))
    )
    answer = network.coordinator.respond()
    assert answer is not None
    assert [r.request.name for r in answer.responses] == ["a"]
    assert answer.stop is not None


def test_answers_out_of_order_are_noticed_and_gaps_are_lists_for_other_sets() -> None:
    worker = Worker(1, 2)
    worker.process(ResponseList(PROTOCOL_VERSION, 2))
    for seq in (2, 1):
        with pytest.raises(InternalError, match=f"rank 1 got response list {seq} after 2"):
            worker.process(ResponseList(PROTOCOL_VERSION, seq))
    worker.process(ResponseList(PROTOCOL_VERSION, 7))


def test_lists_go_to_the_ranks_that_they_concern() -> None:
    coordinator = Coordinator(4, 8, [(1, 2), (2, 3)])
    ask = Request(RequestType.ALLREDUCE, "x", 7, (1,), 1)
    for rank in (1, 2):
        coordinator.receive(MergedList.of(rank, RequestList(PROTOCOL_VERSION, 0, requests=[(1, ask)])))
    first = coordinator.respond()
    assert first is not None
    assert coordinator.audience(first) == 0b0110
    coordinator.receive(
        MergedList.of(3, RequestList(PROTOCOL_VERSION, 0, stop=ErrorInfo(ErrorKind.SHUT_DOWN, "enough", 3)))
    )
    last = coordinator.respond()
    assert last is not None
    assert coordinator.audience(last) == 0b1111


def test_bits_behind_a_refusal_in_one_message_travel_in_full() -> None:
    worker = Worker(0, 1)
    coordinator = Coordinator(1, 8)
    for requests in ([allreduce("a")], [allreduce("a"), allreduce("b")]):
        coordinator.receive(MergedList.of(0, worker.compose([(0, r) for r in requests])))
        answer = coordinator.respond()
        assert answer is not None
        worker.process(answer)
    refused = Request(RequestType.ALLREDUCE, "a", error="no")
    message = worker.compose([(0, refused), (0, allreduce("a")), (0, allreduce("b"))])
    assert [r.name for _, r in message.requests][:2] == ["a", "a"]
    assert message.requests[0][1].error == "no"


def test_bits_mean_nothing_of_sets_that_a_rank_is_not_in() -> None:
    worker = Worker(2, 3, [(0, 1)])
    assert worker.process(ResponseList(PROTOCOL_VERSION, 1, {1: bits_to_bytes(1)})) == []
    assert worker.compose([]) == RequestList(PROTOCOL_VERSION, 1)


def test_nothing_follows_a_stop() -> None:
    """A second rank asks for a shutdown while one is under way; no rank would receive another list."""
    network = Network(2)
    for rank in range(2):
        stop = ErrorInfo(ErrorKind.SHUT_DOWN, f"rank {rank} called shutdown()", rank)
        network.coordinator.receive(
            MergedList.of(rank, network.ranks[rank].worker.compose([(0, allreduce("x"))], stop))
        )
        answer = network.coordinator.respond()
        if rank == 0:
            assert answer is not None
            assert answer.stop == stop
        else:
            assert answer is None


def test_an_order_for_the_timeline_goes_to_every_rank() -> None:
    coordinator = Coordinator(3, 8, [(1, 2)])
    order = TimelineOrder("/tmp/t.json", True, "job")
    coordinator.order_timeline(order)
    answer = coordinator.respond()
    assert answer is not None
    assert answer.timeline == order
    assert coordinator.audience(answer) == 0b111
    assert coordinator.respond() is None


def test_what_a_message_submits_can_be_watched() -> None:
    coordinator, worker = Coordinator(1, 8), Worker(0, 1)
    fresh = allreduce("w")
    message = worker.compose([(GLOBAL_SET, fresh), (GLOBAL_SET, Request(0, "refused", error="no"))])
    assert coordinator.requests_of(message) == [(GLOBAL_SET, fresh)]
    coordinator.receive(MergedList.of(0, worker.compose([(GLOBAL_SET, fresh)])))
    answer = coordinator.respond()
    assert answer is not None
    worker.process(answer)
    again = worker.compose([(GLOBAL_SET, fresh)])
    assert again.bits
    assert coordinator.requests_of(again) == [(GLOBAL_SET, fresh)]


def test_late_ranks_get_a_refusals_error_in_one_response() -> None:
    coordinator = Coordinator(4, 8)
    refused = RequestList(PROTOCOL_VERSION, 0, requests=[(0, refusal(allreduce("a")))])
    coordinator.receive(MergedList.of(1, refused))
    late = RequestList(PROTOCOL_VERSION, 0, requests=[(0, allreduce("a"))])
    coordinator.receive(MergedList(PROTOCOL_VERSION, [MergedPart(pack_ranks(0b1101), 3, late)]))
    answer = coordinator.respond()
    assert answer is not None
    assert [response.only for response in answer.responses] == [(0, 2, 3)]


def test_a_merged_message_counts_its_last_rank_as_late() -> None:
    coordinator = Coordinator(3, 8)
    message = RequestList(PROTOCOL_VERSION, 0, requests=[(0, allreduce("a"))])
    coordinator.receive(MergedList.of(0, message), 1.0)
    coordinator.receive(MergedList(PROTOCOL_VERSION, [MergedPart(pack_ranks(0b110), 2, message)]), 3.0)
    assert coordinator.stragglers.totals() == [(0, 0.0), (0, 0.0), (1, 2.0)]
