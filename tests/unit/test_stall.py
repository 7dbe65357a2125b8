"""The stall inspector: when it looks, what it says, and when it gives up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyhvd.controller import Stalled
from pyhvd.messages import ErrorKind
from pyhvd.stall import StallInspector


def stalled(name: str, since: float, missing: tuple[int, ...] = (1,)) -> Stalled:
    return Stalled(0, name, since, (0,), missing)


def test_off_means_never() -> None:
    assert StallInspector(0.0, 0.0).next_look(5.0) is None


def test_nothing_is_said_before_its_time() -> None:
    inspector = StallInspector(60.0, 0.0)
    assert inspector.look([stalled("x", 100.0)], 159.9) == ("", None)
    assert inspector.look([], 200.0) == ("", None)


def test_the_warning_names_tensors_and_ranks() -> None:
    inspector = StallInspector(60.0, 0.0)
    names = [stalled(f"t{i}", 10.0 + i, (1, 2, 5)) for i in range(8)]
    warning, error = inspector.look([*names, stalled("late", 95.0), stalled("other", 20.0, (3,))], 100.0)
    assert error is None
    assert warning == (
        "some ranks wait for tensors that others have not submitted: 't0', 't1', 't2', 't3', 't4', 't5', ..."
        " not submitted by ranks 1-2, 5 (for 90 s); 'other' not submitted by rank 3 (for 80 s)"
    )


def test_six_names_are_told_without_dots() -> None:
    warning, _ = StallInspector(1.0, 0.0).look([stalled(f"t{i}", 0.0) for i in range(6)], 2.0)
    assert "'t5' not submitted" in warning
    assert "..." not in warning


def test_one_warning_in_each_interval() -> None:
    inspector = StallInspector(60.0, 0.0)
    assert inspector.look([stalled("x", 0.0)], 60.0)[0]
    assert inspector.next_look(60.0) == 120.0


def test_the_end_names_what_it_died_of() -> None:
    inspector = StallInspector(60.0, 90.0)
    pending = [stalled("x", 0.0, (1, 3)), stalled("young", 80.0)]
    assert inspector.look(pending, 89.0)[1] is None
    warning, error = inspector.look(pending, 90.0)
    assert warning == ""
    assert error is not None
    assert error.kind == ErrorKind.STALL
    assert error.message == (
        "the job was ended after 90 s (PYHVD_STALL_SHUTDOWN_TIME_SECONDS)"
        " 'x' not submitted by ranks 1, 3 (for 90 s)"
    )
    assert error.missing == {"x": [1, 3]}


@pytest.mark.parametrize("end", [60.0, 61.0, 75.0, 119.0, 121.0, 500.0])
def test_the_end_comes_on_time(end: float) -> None:
    """Whoever looks whenever told to, ends the job no later than half a second after its time."""
    inspector = StallInspector(60.0, end)
    pending = [stalled("x", 3.0)]
    now: float = 3.0
    for _ in range(1000):
        _, error = inspector.look(pending, now)
        if error is not None:
            break
        look = inspector.next_look(now)
        assert look is not None
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
    _, error = inspector.look([stalled(f"t{i}", now - age) for i, age in enumerate(ages)], now)
    look = inspector.next_look(now)
    assert look is not None
    assert error is not None or now < look <= now + warn + 1e-6
