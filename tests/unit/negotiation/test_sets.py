"""Process sets that are added and removed: pending calls, late messages, and ids that are used again."""

from __future__ import annotations

import pytest

from pyhvd.errors import InternalError
from pyhvd.negotiation.message_table import MessageTable
from pyhvd.negotiation.messages import FOUNDING, ErrorInfo, ErrorKind, Request, RequestType
from tests.unit.negotiation.simulation import Network, Ranks, allreduce, grouped

GONE = ErrorInfo(ErrorKind.SHUT_DOWN, "process set 1 has been removed")


def add(network: Network, ranks: Ranks, name: str = "process_set.add.0") -> int:
    """Add a set on every rank; return its id."""
    ends = network.everywhere([Request(RequestType.ADD_PROCESS_SET, name, ranks=ranks)])
    ids = {each[0].response.value for each in ends}
    (set_id,) = ids
    return set_id


def removal(set_id: int = 1) -> Request:
    """Return a request to remove a set."""
    return Request(RequestType.REMOVE_PROCESS_SET, f"process_set.remove.{set_id}", ranks=(set_id,))


def test_ids_are_the_lowest_that_are_free() -> None:
    network = Network(3, sets=[(0, 1)])
    assert add(network, (1, 2)) == 2
    assert add(network, (0, 2), "second") == 3
    network.everywhere([removal(2)])
    assert add(network, (2,), "third") == 2
    assert network.ranks[0].worker.sets == {0: (0, 1, 2), 1: (0, 1), 2: (2,), 3: (0, 2)}
    network.check_all()


def found(network: Network, ranks: Ranks, key: str) -> int:
    """Let the members make a set alone; return its id."""
    request = Request(RequestType.ADD_PROCESS_SET, key, ranks=ranks)
    ends = [network.submit(rank, [request], FOUNDING) for rank in ranks]
    network.settle()
    (set_id,) = {end[0].response.value for end in ends if end}
    return set_id


def test_lists_about_a_founded_set_go_to_its_members_alone() -> None:
    network = Network(4)
    set_id = found(network, (1, 3), "key")
    network.everywhere([allreduce("x")])
    for rank in (1, 3):
        network.submit(rank, [allreduce("x")], set_id)
        network.submit(rank, [removal(set_id)], set_id)
    network.settle()
    heard = [[response.request.name for _, response in rank.history] for rank in network.ranks]
    assert heard[0] == heard[2] == ["x"]
    assert heard[1] == heard[3] == ["key", "x", "x", "process_set.remove.1"]
    assert found(network, (0, 1), "key") == set_id
    network.check_all()


def test_members_that_disagree_and_the_missing_one_get_the_error() -> None:
    network = Network(3)
    ends = []
    for rank, ranks in ((1, (0, 1)), (2, (0, 1, 2)), (0, (0, 1, 2))):
        request = Request(RequestType.ADD_PROCESS_SET, "key", ranks=ranks)
        ends.append(network.submit(rank, [request], FOUNDING))
        network.send(rank)
        network.deliver_up(rank)
        network.respond()
    network.settle()
    for end in ends:
        assert end
        assert end[0].response.error is not None
        assert end[0].response.error.kind == ErrorKind.MISMATCH
        assert end[0].response.error.per_rank == {1: "[0, 1]", 2: "[0, 1, 2]"}
    network.check_all()


def test_idle_sets_cost_a_list_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(3, sets=[(0, 1)])
    for number in range(20):
        found(network, (number % 3,), f"key.{number}")
    looks: list[tuple[str, int]] = []

    def watch(name: str) -> None:
        works = getattr(MessageTable, name)

        def watched(self: MessageTable, *args: object) -> object:
            looks.append((name, self.set_id))
            return works(self, *args)

        monkeypatch.setattr(MessageTable, name, watched)

    for name in ("take_hits", "take_responses", "delegate", "pending"):
        watch(name)
    for rank in (0, 1):
        network.submit(rank, [allreduce("x")], 1)
        network.send(rank)
        network.deliver_up(rank)
        network.respond()
        network.coordinator.stalled()
    assert {set_id for _, set_id in looks} == {1}
    assert len(network.down[0]) == 1


def test_a_set_works_in_the_same_moment_on_every_member() -> None:
    network = Network(3)
    set_id = add(network, (0, 2))
    for _ in range(3):
        ends = [network.submit(rank, [allreduce("x")], set_id) for rank in (0, 2)]
        network.settle()
        assert [e[0].response.error for e in ends if e is not None] == [None, None]
    assert not any(r.process_set for _, r in network.ranks[1].history)
    network.check_all()


def test_a_member_may_use_a_set_before_another_has_heard_of_it() -> None:
    network = Network(2)
    for rank in (0, 1):
        network.submit(rank, [Request(RequestType.ADD_PROCESS_SET, "add", ranks=(0, 1))])
        network.send(rank)
        network.deliver_up(rank)
    network.respond()
    network.deliver_down(0)
    network.submit(0, [allreduce("x")], 1)
    network.send(0)
    network.deliver_up(0)
    assert network.respond() is None
    network.deliver_down(1)
    network.submit(1, [allreduce("x")], 1)
    network.settle()
    network.check_all()


@pytest.mark.parametrize("cached", [False, True])
def test_removal_fails_what_is_pending(cached: bool) -> None:
    network = Network(3, sets=[(0, 1), (0, 1, 2)])
    pending = [allreduce("x"), *grouped("g", [(1,), (2,)])]
    if cached:
        network.everywhere(pending, 1)
    ends = network.submit(0, pending, 1)
    network.settle()
    assert ends is not None
    network.everywhere([removal()])
    assert [end.response.error for end in ends] == [GONE] * 3
    assert [end.response.only for end in ends] == [(0,)] * 3
    assert sorted(network.coordinator._sets) == [0, 2]
    network.check_all()


@pytest.mark.parametrize("cached", [False, True])
def test_what_is_ready_in_the_same_moment_still_runs(cached: bool) -> None:
    network = Network(2, sets=[(0, 1)])
    if cached:
        network.everywhere([allreduce("x")], 1)
    ends = []
    for rank in (0, 1):
        ends.append(network.submit(rank, [allreduce("x")], 1))
        network.submit(rank, [removal()])
        network.send(rank)
        network.deliver_up(rank)
    network.settle()
    assert len(network.answered) == 1 + cached
    assert [e[0].response.error for e in ends if e is not None] == [None, None]
    network.check_all()


def test_what_is_ready_with_the_removal_finds_its_set_as_it_was() -> None:
    """The set keeps its members and slots until the list is carried out, even if it adds another set."""
    network = Network(3, sets=[(0, 1)])
    for rank in range(3):
        network.submit(rank, [removal()])
        network.submit(rank, [Request(RequestType.ADD_PROCESS_SET, "add", ranks=(1, 2))])
        if rank < 2:
            network.submit(rank, [allreduce("x")], 1)
        network.send(rank)
        network.deliver_up(rank)
    network.respond()
    assert len(network.answered) == 1
    worker = network.ranks[0].worker
    todo = worker.process(network.answered[0])
    assert [(r.process_set, r.request.type, r.slot) for r in todo] == [
        (1, RequestType.ALLREDUCE, 0),
        (0, RequestType.REMOVE_PROCESS_SET, -1),
        (0, RequestType.ADD_PROCESS_SET, -1),
    ]
    assert worker.sets[1] == (0, 1)
    assert worker.request_of(1, 0).name == "x"
    worker.carried_out()
    assert worker.sets == {0: (0, 1, 2), 2: (1, 2)}


def test_refusals_of_a_removed_set_are_forgotten() -> None:
    network = Network(2, sets=[(0, 1)])
    network.refuse(0, allreduce("x"), 1)
    network.everywhere([removal()])
    assert add(network, (0, 1)) == 1
    ends = network.everywhere([allreduce("x")], 1)
    assert ends[0][0].response.error is None
    network.check_all()


@pytest.mark.parametrize("cached", [False, True])
def test_late_messages_to_a_removed_set_reach_nobody(cached: bool) -> None:
    """Late messages do not reach the new set that has the removed set's id."""
    network = Network(3, sets=[(0, 1)])
    if cached:
        network.everywhere([allreduce("x")], 1)
    for rank in (0, 1, 2):
        network.submit(rank, [removal()])
        network.send(rank)
        network.submit(rank, [Request(RequestType.ADD_PROCESS_SET, "add", ranks=(0, 1, 2))])
        network.send(rank)
    late = network.submit(0, [allreduce("x")], 1)
    network.send(0)
    network.refuse(0, allreduce("y"), 1)
    network.send(0)
    for _ in ("removal", "addition"):
        for rank in (0, 1, 2):
            network.deliver_up(rank)
        network.respond()
    network.settle()
    assert late is not None
    assert late[0].response.request.type == RequestType.REMOVE_PROCESS_SET, "failed by the removal itself"
    ends = network.everywhere([allreduce("x"), allreduce("y")], 1)
    assert [e.response.error for each in ends for e in each] == [None] * 6
    network.check_no_residue()
    network.check_slots()


def test_one_set_cannot_be_removed_twice() -> None:
    network = Network(2, sets=[(0, 1)])
    for rank in (0, 1):
        network.submit(rank, [removal()])
        network.submit(rank, [Request(RequestType.REMOVE_PROCESS_SET, "again", ranks=(1,))])
        network.send(rank)
        network.deliver_up(rank)
    with pytest.raises(InternalError, match="process set 1 was removed twice"):
        network.respond()


def test_ranks_that_add_different_sets() -> None:
    network = Network(2)
    ends = network.each([Request(RequestType.ADD_PROCESS_SET, "add", ranks=(r,)) for r in (0, 1)])
    assert all(e[0].response.error is not None for e in ends)
    assert sorted(network.coordinator._sets) == [0]


def test_a_silent_rank_outside_a_set_does_not_make_it_remember_for_ever() -> None:
    network = Network(3, capacity=2, sets=[(0, 1)])
    for step in range(50):
        network.everywhere([allreduce("x", (step,))], 1)
    retired = network.coordinator._sets[1].cache._retired
    assert sum(len(each) for each in retired.values()) <= 2
