"""Which rank waits in a circle with a round, and when rank 0 gives the round back. Pure."""

from __future__ import annotations

import pytest

from pyhvd.controller import Coordinator, Stalled
from pyhvd.engine.rounds import RoundKeeper, find_circle
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    PROTOCOL_VERSION,
    ErrorKind,
    MergedList,
    RequestList,
    StackReport,
    StackRequest,
    StillInRound,
    decode_out_of_band,
)
from pyhvd.observe.hang_reporter import RankLocations
from tests.unit.negotiation.simulation import allreduce

PREFIX = "gradients.0: "


def waits(name: str, submitted: int, missing: int, set_id: int = GLOBAL_SET) -> Stalled:
    return Stalled(set_id, name, 1.0, submitted, missing)


FLAGS = waits(f"{PREFIX}flags", 0b011, 0b100)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        pytest.param([waits("metric", 0b100, 0b011)], [2], id="it waits for those in the round"),
        pytest.param([waits("metric", 0b100, 0b001)], [2], id="it waits for one of them"),
        pytest.param([], [], id="it has submitted nothing"),
        pytest.param([waits("of two", 0b100, 0b1000, 1)], [], id="it waits for a rank elsewhere"),
        pytest.param(
            [waits("metric", 0b100, 0b011), waits("of two", 0b100, 0b1000, 1)],
            [],
            id="it may wait for either",
        ),
        pytest.param(
            [waits("metric", 0b100, 0b011), waits(f"{PREFIX}0.weight", 0b100, 0b011)],
            [],
            id="it is in its backward pass",
        ),
        pytest.param(
            [waits("metric", 0b100, 0b011), waits("gradients.1: flags", 0b100, 0b011)],
            [2],
            id="it is in another optimizer's backward pass",
        ),
    ],
)
def test_circles(others: list[Stalled], found: list[int]) -> None:
    bucket = waits(f"{PREFIX}0.weight", 0b011, 0b100)
    assert [*find_circle([FLAGS, bucket, *others], GLOBAL_SET, PREFIX)] == found
    assert find_circle(others, GLOBAL_SET, PREFIX) == {}
    assert find_circle([FLAGS, *others], 1, PREFIX) == {}


class Job:
    """Three ranks: 0 and 1 are in a round, and rank 2 is not."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(3, 8)
        self.asked: list[tuple[int, int]] = []
        self.keeper = RoundKeeper(self.coordinator, RankLocations(0, []), self._send)
        for rank in (0, 1):
            self.submit(rank, f"{PREFIX}flags")
        self.submit(2, "metric")

    def submit(self, rank: int, name: str) -> None:
        message = RequestList(PROTOCOL_VERSION, 0, requests=[(GLOBAL_SET, allreduce(name))])
        self.coordinator.receive(MergedList.of(rank, message), 1.0)

    def _send(self, rank: int, payload: bytes) -> None:
        message = decode_out_of_band(payload, 7)
        assert isinstance(message, StackRequest)
        self.asked.append((rank, message.number))

    def report(self, number: int, *, waits: bool = True) -> StackReport:
        return StackReport(PROTOCOL_VERSION, number, [], waits)

    def tell(self, *, answer: bool | None = True) -> list[tuple[str, ErrorKind]]:
        """Tell rank 0 of the round, let rank 2 answer, and return the errors that the ranks get."""
        before = len(self.asked)
        self.keeper.hear(StillInRound(PROTOCOL_VERSION, GLOBAL_SET, PREFIX), 2.0)
        for rank, number in self.asked[before:]:
            if answer is not None:
                self.keeper.take(rank, self.report(number, waits=answer), 2.1)
        found = self.coordinator.respond()
        given = [] if found is None else found.responses
        return [(each.request.name, ErrorKind(each.error.kind)) for each in given if each.error is not None]


GIVEN_BACK = [(f"{PREFIX}flags", ErrorKind.WITHDRAWN)]


def test_a_rank_must_have_waited_twice() -> None:
    job = Job()
    assert job.tell() == []
    assert job.tell() == GIVEN_BACK
    assert job.tell() == []
    assert [rank for rank, _ in job.asked] == [2, 2]


@pytest.mark.parametrize("answer", [False, None])
def test_a_rank_that_computes_or_does_not_answer_is_waited_for(answer: bool | None) -> None:
    job = Job()
    job.tell()
    for _ in range(2):
        assert job.tell(answer=answer) == []
    assert job.tell() == (GIVEN_BACK if answer is None else [])
    assert job.tell() == ([] if answer is None else GIVEN_BACK)


def test_what_a_rank_waits_for_must_be_the_same() -> None:
    job = Job()
    job.tell()
    for rank in (0, 1):
        job.submit(rank, "metric")
    job.coordinator.respond()
    assert job.tell() == []
    job.submit(2, "another")
    assert job.tell() == []
    assert job.tell() == GIVEN_BACK


def test_an_answer_to_an_earlier_question_counts_for_nothing() -> None:
    job = Job()
    job.tell(answer=None)
    job.tell(answer=None)
    (_, first), (_, second) = job.asked
    for _ in range(2):
        job.keeper.take(2, job.report(first), 2.2)
    assert job.coordinator.respond() is None
    for _ in range(2):
        job.keeper.take(2, job.report(second), 2.2)
    assert job.coordinator.respond() is not None
