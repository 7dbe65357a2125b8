"""The stall inspector: when it looks, what it finds, when it ends the job, and which ranks it asks."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from pyhvd.common.stacks import ThreadStack
from pyhvd.controller import Stalled
from pyhvd.negotiation.messages import PROTOCOL_VERSION, StackReport, bits_of
from pyhvd.observe.stall_inspector import ANSWER_SECONDS, MOST_ASKED, Inquiry, Stall, StallInspector


def stalled(name: str, since: float, missing: tuple[int, ...] = (1,)) -> Stalled:
    return Stalled(0, name, since, 1, bits_of(missing))


def test_nothing_is_found_before_its_time() -> None:
    inspector = StallInspector(60.0, 0.0)
    assert inspector.look([stalled("x", 100.0)], 159.9) is None
    assert inspector.look([], 200.0) is None


def test_a_finding_holds_what_is_late_and_what_waits_as_well() -> None:
    pending = [stalled("x", 10.0, (1, 2)), stalled("late", 95.0), stalled("other", 20.0, (3,))]
    finding = StallInspector(60.0, 0.0).look(pending, 100.0)
    assert finding == Stall((pending[0], pending[2]), tuple(pending), 60.0, ends_job=False)
    assert finding.missing == [1, 2, 3]


def test_one_finding_in_each_interval() -> None:
    inspector = StallInspector(60.0, 0.0)
    assert inspector.look([stalled("x", 0.0)], 60.0) is not None
    assert inspector.next_look == 120.0
    assert inspector.look([stalled("x", 0.0)], 119.0) is None


def test_the_end_is_about_what_is_over_its_time() -> None:
    inspector = StallInspector(60.0, 90.0)
    pending = [stalled("x", 0.0, (1, 3)), stalled("young", 80.0), stalled("warned", 25.0)]
    warning = inspector.look(pending, 89.0)
    assert warning is not None
    assert not warning.ends_job
    finding = inspector.look(pending, 90.0)
    assert finding == Stall((pending[0],), tuple(pending), 90.0, ends_job=True)


def test_a_warning_does_not_hold_up_the_end() -> None:
    pending = [stalled("x", 10.0)]
    warning = Stall(tuple(pending), tuple(pending), 0.5, ends_job=False)
    assert StallInspector(0.5, 0.0).answers_until(warning, 10.5) == 10.5 + ANSWER_SECONDS
    assert StallInspector(0.5, 1.0).answers_until(warning, 10.5) == 11.0
    assert StallInspector(0.5, 60.0).answers_until(warning, 10.5) == 10.5 + ANSWER_SECONDS
    end = Stall(tuple(pending), tuple(pending), 1.0, ends_job=True)
    assert StallInspector(0.5, 1.0).answers_until(end, 11.0) == 11.0 + ANSWER_SECONDS


def test_what_has_been_submitted_meanwhile_is_stalled_no_longer() -> None:
    pending = [stalled("x", 0.0, (1, 3)), stalled("y", 0.0), stalled("z", 0.0)]
    finding = Stall(tuple(pending), tuple(pending), 60.0, ends_job=False)
    now = [stalled("x", 0.0, (3,)), stalled("y", 59.0)]  # y has ended, and was submitted again
    left = finding.still(now)
    assert left == Stall((now[0],), tuple(now), 60.0, ends_job=False)
    assert left.missing == [3]
    assert finding.still([]) is None


def inquiry(missing: tuple[int, ...]) -> Inquiry:
    tensor = stalled("x", 0.0, missing)
    return Inquiry(7, Stall((tensor,), (tensor,), 60.0, ends_job=False), until=62.0)


def report(number: int, name: str) -> StackReport:
    return StackReport(PROTOCOL_VERSION, number, [ThreadStack(name, [])])


def test_an_inquiry_ends_with_the_last_answer_or_in_time() -> None:
    asking = inquiry((1, 3))
    assert asking.asked == [1, 3]
    asking.take(1, report(7, "a"))
    assert not asking.is_over(61.9)
    assert asking.is_over(62.0)
    asking.take(3, report(7, "b"))
    assert asking.is_over(60.0)


def test_answers_to_earlier_questions_do_not_count() -> None:
    asking = inquiry((1,))
    asking.take(1, report(6, "old"))
    assert not asking.is_over(60.0)


def test_no_more_ranks_are_asked_than_can_be_read() -> None:
    asking = inquiry(tuple(range(1, 1000)))
    assert asking.asked == list(range(1, MOST_ASKED + 1))


@pytest.mark.parametrize("end", [60.0, 61.0, 75.0, 119.0, 121.0, 500.0])
def test_the_end_comes_on_time(end: float) -> None:
    """The inspector ends the job at most half a second late if it is called at the times that it asks for."""
    inspector = StallInspector(60.0, end)
    pending = [stalled("x", 3.0)]
    now: float = 3.0
    for _ in range(1000):
        finding = inspector.look(pending, now)
        if finding is not None and finding.ends_job:
            break
        look = inspector.next_look
        assert look > now
        now = look
    assert now == pytest.approx(3.0 + end, abs=0.5)


@given(
    warn=st.floats(0.1, 100),
    extra=st.floats(0, 100),
    ages=st.lists(st.floats(0, 300), min_size=1, max_size=5),
)
def test_looks_are_ahead_and_neither_rare_nor_frantic(warn: float, extra: float, ages: list[float]) -> None:
    now = 1000.0
    inspector = StallInspector(warn, warn + extra)
    finding = inspector.look([stalled(f"t{i}", now - age) for i, age in enumerate(ages)], now)
    look = inspector.next_look
    assert (finding is not None and finding.ends_job) or now < look <= now + warn + 1e-6
