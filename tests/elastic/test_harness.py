"""What the faults are drawn by, and how a log is judged."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.elastic.faults import add
from tests.elastic.jobs import Ended, Line
from tests.elastic.plans import EARLY, Plan, draw_plan


def ended(*texts: str) -> Ended:
    """Return a job with these lines in its log: the generation, and what the rank wrote."""
    words = [text.split() for text in texts]
    lines = [Line(float(when), int(each[0]), each[1], each[2:]) for when, each in enumerate(words)]
    return Ended(0, "", "", lines)


_FIRST = ("0 begin 0 0 of 4 on 2", "0 step 1 1", "0 copy 1", "0 step 2 3")


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        (("0 copy 2", "1 begin 2 3 of 4 on 2", "1 step 3 6"), 0),
        (("0 copy 2", "1 begin 1 1 of 4 on 2", "1 step 2 3"), 1),
        (("1 begin 1 1 of 2 on 1", "1 step 2 3"), 0),  # not committed: the other host lacked it
        (("1 begin 0 0 of 2 on 1", "1 step 1 1"), 1),
        (("0 copy 2", "1 begin 3 6 of 4 on 2", "1 step 4 10"), 0),  # committed, but not logged
        (("0 step 4 10",), 1),
    ],
)
def test_lost_steps_are_counted(lines: Sequence[str], lost: int) -> None:
    assert ended(*_FIRST, *lines).lost_steps() == lost


def test_wrong_values_are_found() -> None:
    assert ended(*_FIRST).wrong_values() == []
    assert [line.words[1] for line in ended(*_FIRST, "0 step 3 5", "0 end 3 6").wrong_values()] == ["5"]


def test_faults_of_a_plan_leave_a_commit_between_three_failures() -> None:
    for seed in range(300):
        points = {
            int(number): point
            for point, number, *_ in (
                fault.split(":") for fault in draw_plan(random.Random(seed), 2, True, 8).inner
            )
        }
        in_a_row = 0
        for generation in range(20):
            point = points.get(generation)
            in_a_row = 0 if point is None else in_a_row + 1 if point in EARLY else 1
            assert in_a_row < 3, points


def test_a_plan_knows_when_a_fault_from_outside_would_be_the_third() -> None:
    plan = Plan(("func:1:0", "init:2:1", "init:5:0"), ())
    allowed = [[count for count in (1, 2) if plan.may_strike(number, count)] for number in range(7)]
    assert allowed == [[1], [], [1], [1], [1], [1, 2], [1, 2]]


def test_reports_are_added() -> None:
    saved = {"mpi": "old", "wrong": {"hangs": 1}, "seconds": {"kill": [0.1]}}
    new = {"mpi": "new", "wrong": {"hangs": 2}, "seconds": {"kill": [0.2], "stop": [0.3]}}
    assert add(saved, new) == {
        "mpi": "new",
        "wrong": {"hangs": 3},
        "seconds": {"kill": [0.1, 0.2], "stop": [0.3]},
    }
