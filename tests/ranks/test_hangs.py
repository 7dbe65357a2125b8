"""Test hang reports of ranks that are threads: on both paths, with joined ranks, and at the end."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.controller import Stalled
from pyhvd.negotiation.messages import bits_of
from pyhvd.observe.stall_inspector import Stall
from pyhvd.testing import RanksFailed, run_ranks

both_lanes = pytest.mark.parametrize("fast_lane", [False, True])


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "have not submitted" in r.getMessage()]


class Said(threading.Event):
    """An event that is set once a report has been logged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from pyhvd.observe import hang_report, hang_reporter

        def make(*arguments: Any) -> str:
            text = original(*arguments)
            self.set()
            return text

        original = hang_report.warning_of
        monkeypatch.setattr(hang_reporter, "warning_of", make)


def look_only_when(monkeypatch: pytest.MonkeyPatch, *missing: tuple[int, ...]) -> None:
    """Make rank 0 report only waits for these ranks, since a busy machine delays others."""
    from pyhvd.observe.stall_inspector import StallInspector

    look = StallInspector.look

    def seen(self: StallInspector, pending: Sequence[Stalled], now: float) -> Stall | None:
        return look(
            self, pending if {each.missing for each in pending} == {*map(bits_of, missing)} else [], now
        )

    monkeypatch.setattr(StallInspector, "look", seen)


def oversleep(said: threading.Event) -> None:
    assert said.wait(20)


@both_lanes
def test_the_late_rank_is_shown_where_it_is(
    fast_lane: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(monkeypatch)
    look_only_when(monkeypatch, (1,))

    def body() -> None:
        for _ in range(3):
            hvd.allreduce(np.ones(4), name="x")
        hvd.barrier()
        if hvd.rank() == 1:
            oversleep(said)
        assert hvd.allreduce(np.ones(4), name="x", op=hvd.Average).tolist() == [1.0] * 4

    run_ranks(3, body, timeout=30, knobs={"fast_lane": fast_lane, "stall_check_time_seconds": 0.3})
    text = reports(caplog)[0]
    assert re.search(r"  'x': not submitted by rank 1, submitted by ranks 0, 2 \(waiting for \d+ s\)", text)
    assert "has not submitted 'x': it is at" in text
    assert " in oversleep, inside test_hangs" not in text
    assert " in oversleep" in text
    assert "rank-1:" in text
    assert "rank-2:" not in text


@both_lanes
def test_every_rank_gets_the_error_with_the_facts(fast_lane: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Barrier(3)
    look_only_when(monkeypatch, (2,))

    def body() -> None:
        for _ in range(3):
            hvd.allreduce(np.ones(4), name="x")
        if hvd.rank() == 2:
            over.wait(20)
        with pytest.raises(hvd.StallError) as caught:
            hvd.allreduce(np.ones(4), name="x")
        if hvd.rank() != 2:
            over.wait(20)
        error = caught.value
        assert error.missing == {"x": [2]}
        assert error.stacks[2].startswith("rank 2 on host ")
        assert " in body" in error.stacks[2]
        assert error.stacks[2].splitlines()[0] in str(error)

    knobs = {"fast_lane": fast_lane, "stall_check_time_seconds": 0.2, "stall_shutdown_time_seconds": 0.4}
    run_ranks(3, body, timeout=30, knobs=knobs)


@both_lanes
def test_ranks_that_wait_for_each_other_are_told_so(
    fast_lane: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_only_when(monkeypatch, (0,), (1,))

    def body() -> None:
        for name in ("a", "b", "a", "b"):
            hvd.allreduce(np.ones(4), name=name)
        hvd.barrier()
        for name in ("a", "b") if hvd.rank() == 0 else ("b", "a"):
            hvd.allreduce(np.ones(4), name=name)

    knobs = {
        "fast_lane": fast_lane,
        "stall_check_time_seconds": 0.2,
        "stall_shutdown_time_seconds": 0.5,
    }
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, body, timeout=30, knobs=knobs)
    line = "deadlock: rank 0 waits for 'a', which rank 1 has not submitted, and rank 1 for 'b'"
    assert line in reports(caplog)[0]
    assert all(isinstance(error, hvd.StallError) for error in caught.value.errors.values())
    assert line in str(caught.value)


@both_lanes
def test_a_joined_rank_is_not_missing(
    fast_lane: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report names the missing rank but no joined rank; nor does it count a join() as a waiting call."""
    said = Said(monkeypatch)
    look_only_when(monkeypatch, (2,))

    def body() -> None:
        hvd.allreduce(np.ones(4), name="x")
        if hvd.rank() == 0:
            hvd.join()
            return
        if hvd.rank() == 2:
            oversleep(said)
        hvd.allreduce(np.ones(4), name="x")
        hvd.join()

    run_ranks(3, body, timeout=30, knobs={"fast_lane": fast_lane, "stall_check_time_seconds": 0.2})
    for text in reports(caplog):
        assert "'x': not submitted by rank 2, submitted by rank 1" in text
        assert "rank 0" not in text
    assert reports(caplog)


@both_lanes
def test_a_join_that_waits_names_who_has_not_joined(
    fast_lane: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(monkeypatch)
    look_only_when(monkeypatch, (1,))

    def body() -> None:
        for _ in range(3):
            hvd.allreduce(np.ones(4), name="x")
        if hvd.rank() == 1:
            hvd.allreduce(np.ones(4), name="y")
            oversleep(said)
        assert hvd.join() == 1

    run_ranks(3, body, timeout=30, knobs={"fast_lane": fast_lane, "stall_check_time_seconds": 0.3})
    (text,) = [r.getMessage() for r in caplog.records if "have not called" in r.getMessage()][:1]
    assert re.search(r"  join\(\): not called by rank 1, called by ranks 0, 2 \(waiting for \d+ s\)", text)
    assert "has not called join(): it is at" in text
    assert " in oversleep" in text
    assert "rank-2:" not in text


def test_what_was_submitted_before_the_answers_came_is_not_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyhvd.observe import hang_reporter

    submitted, asked = threading.Event(), threading.Event()

    def slowly(threads: Any) -> list[Any]:
        asked.set()
        assert submitted.wait(20)
        return []

    monkeypatch.setattr(hang_reporter, "user_stacks", slowly)

    def body() -> None:
        if hvd.rank() == 1:
            assert asked.wait(20)
            handle = hvd.allreduce_async(1.0, name="x")
            submitted.set()
            handle.result()
        else:
            hvd.allreduce(1.0, name="x")
        hvd.barrier()

    run_ranks(2, body, timeout=30, knobs={"fast_lane": False, "stall_check_time_seconds": 0.2})
    # The answer may overtake the submission; the submission never overtakes the answer.
    assert all("none of its threads" in text for text in reports(caplog))
