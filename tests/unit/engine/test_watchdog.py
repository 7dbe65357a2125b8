"""The time without progress, and the error with which a rank gives up without rank 0."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from pyhvd.common.processes import ProcessPlace, ProcessState
from pyhvd.config import Config
from pyhvd.engine.watchdog import (
    HostClaim,
    ProgressProbe,
    ProgressTimer,
    Watch,
    give_up_after,
    give_up_time,
)
from pyhvd.negotiation.messages import Request, RequestType
from pyhvd.observe.hang_report import (
    StallSnapshot,
    describe_late_end,
    describe_silence,
    describe_stall,
    error_of_stall,
)
from pyhvd.observe.hang_reporter import RankLocations
from pyhvd.queue import TensorEntry, TensorQueue

PLACES = [ProcessPlace("node", 100 + rank, "n") for rank in range(4)]


def test_only_what_waits_without_progress_counts() -> None:
    timer = ProgressTimer()
    assert timer.look(1, 10.0, waiting=True) == 0.0
    assert timer.look(1, 13.0, waiting=True) == 3.0
    assert timer.look(2, 14.0, waiting=True) == 0.0
    assert timer.look(2, 15.0, waiting=True) == 1.0
    assert timer.look(2, 99.0, waiting=False) == 0.0
    assert timer.look(2, 100.0, waiting=True) == 0.0


@given(looks=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.floats(0, 9)), min_size=1, max_size=30))
def test_it_is_never_longer_than_since_the_last_change(looks: list[tuple[bool, int, float]]) -> None:
    timer, now, changed = ProgressTimer(), 0.0, 0.0
    before: tuple[bool, int] = (False, -1)
    for waiting, progress, later in looks:
        now += later
        if not waiting or before != (True, progress):
            changed = now
        before = (waiting, progress)
        assert timer.look(progress, now, waiting=waiting) == now - changed


def test_a_time_in_which_nobody_looked_does_not_count() -> None:
    timer = ProgressTimer(longest=2.0)
    passed = [timer.look(0, now, waiting=True) for now in (100.0, 101.0, 102.0, 500.0, 501.0)]
    assert passed == [0.0, 1.0, 2.0, 4.0, 5.0]


def test_a_time_in_which_the_watchdog_itself_was_busy_counts() -> None:
    timer = ProgressTimer(longest=2.0)
    timer.look(0, 100.0, waiting=True)
    timer.look(0, 101.0, waiting=True)
    timer.resume(109.0)
    assert timer.look(0, 110.0, waiting=True) == 10.0


def test_rank_0_comes_first() -> None:
    """A rank gives up only after rank 0 had time to inspect the stall and to wait for answers."""
    for end_after in (0.1, 1.0, 60.0, 3600.0):
        assert give_up_after(end_after) > 1.25 * end_after + 2.0
    assert give_up_after(0.0) == 0.0


def test_the_thread_warns_and_then_ends() -> None:
    calls: list[str] = []
    ended = threading.Event()

    def warn(passed: float) -> None:
        calls.append("warn" if 0.05 <= passed < 0.3 else "wrong")

    def end(passed: float) -> None:
        calls.append("end" if passed >= 0.3 else "wrong")
        ended.set()

    Watch(0, 0.05, 0.3, lambda: (True, 0), warn, end).start()
    assert ended.wait(20)
    assert calls[-1] == "end"
    assert set(calls[:-1]) <= {"warn"}


def test_the_thread_leaves_those_alone_who_have_nothing_to_wait_for() -> None:
    looks = threading.Semaphore(0)

    def look() -> tuple[bool, int]:
        looks.release()
        return False, 0

    calls: list[float] = []
    watch = Watch(0, 0.02, 0.02, look, calls.append, calls.append)
    watch.start()
    assert all(looks.acquire(timeout=20) for _ in range(10))
    watch.stop()
    watch.join()
    assert calls == []
    assert "pyhvd-0-watch" not in {thread.name for thread in threading.enumerate()}


def test_the_thread_says_when_it_has_nothing_to_warn_of() -> None:
    progress = iter([0, 0, 0, 0, 0, 0, 1])
    calls: list[str] = []
    over = threading.Event()

    def warn(_: float) -> None:
        calls.append("warn")

    def calm() -> None:
        if calls and calls[-1] == "warn":
            calls.append("calm")
            over.set()

    watch = Watch(1, 0.04, 0.0, lambda: (True, next(progress, 2)), warn, lambda _: calls.append("end"), calm)
    watch.start()
    assert over.wait(20)
    watch.stop()
    watch.join()
    told = calls.index("calm")
    assert set(calls[:told]) == {"warn"}, "it warns once in a period, and a busy machine has several of them"


# -- what a rank warns of ------------------------------------------------------------------------------


class OneProbe:
    """A probe of a rank that waits for 'a', and the warnings that it logs."""

    def __init__(self, rank: int, caplog: pytest.LogCaptureFixture, *, running: bool, hosts: str) -> None:
        places = [ProcessPlace(host, 100 + each) for each, host in enumerate(hosts)]
        queue = TensorQueue(lambda: None, 0.0)
        entry = TensorEntry(0, Request(RequestType.BARRIER, "a"), None, None, lambda *_: None)
        queue.add([entry])
        devices = SimpleNamespace(work=SimpleNamespace(names=list))
        executor = SimpleNamespace(running=[entry] if running else [], ended=0, devices=devices)
        self.asked = 0
        self.answers = False
        self.claim = HostClaim(f"pyhvd-test-{os.getpid()}")
        self.probe = ProgressProbe(
            RankLocations(rank, places),
            queue,
            cast(Any, executor),
            None,
            cast(Any, SimpleNamespace(busy=False)),
            self._ask,
            self.claim,
        )
        self._caplog = caplog

    def _ask(self) -> bool:
        self.asked += 1
        return self.answers

    def warn(self) -> str:
        self._caplog.clear()
        self.probe.warn(61.0)
        return self._caplog.text


def test_a_rank_asks_rank_0_and_reports_its_silence(caplog: pytest.LogCaptureFixture) -> None:
    one = OneProbe(1, caplog, running=False, hosts="hh")
    assert (
        "rank 1 has waited for 'a' for 61 s: rank 0, which decides what runs, does not answer" in one.warn()
    )
    one.answers = True
    assert one.warn() == "", "rank 0 itself reports the stall"
    assert one.asked == 2
    two = OneProbe(2, caplog, running=True, hosts="hhh")
    assert two.warn() != "", "a rank with nothing to say leaves the word to another one"
    two.claim.release()


def test_rank_0_asks_nobody(caplog: pytest.LogCaptureFixture) -> None:
    zero = OneProbe(0, caplog, running=False, hosts="hh")
    assert zero.warn() == ""
    assert zero.asked == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no abstract names")
@pytest.mark.parametrize("running", [False, True])
def test_one_rank_of_a_host_speaks(caplog: pytest.LogCaptureFixture, running: bool) -> None:
    one, two = (OneProbe(rank, caplog, running=running, hosts="hhh") for rank in (1, 2))
    assert one.warn() != ""
    assert two.warn() == ""
    assert two.asked == 0
    assert one.warn() != "", "it goes on to speak"
    one.claim.release()
    assert two.warn() != ""
    two.claim.release()


def test_a_host_says_of_a_collective_only_what_rank_0_cannot_see(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = OneProbe(1, caplog, running=True, hosts="hgg")
    assert away.warn() == ""
    other = HostClaim(away.claim.name)
    assert other.take(), "it has said nothing"
    other.release()
    stopped = {0: ProcessState.UNKNOWN, 2: ProcessState.STOPPED}
    monkeypatch.setattr(RankLocations, "states", lambda *_: stopped)
    assert "rank 2 on host g (pid 102): its process is stopped" in away.warn()
    assert away.asked == 0, "its background thread is in the collective"
    away.claim.release()


@pytest.mark.parametrize("off", [{"stall_check_disable": True}, {"stall_check_time_seconds": 0.0}])
def test_nobody_gives_up_where_nothing_is_looked_for(off: dict[str, Any]) -> None:
    assert give_up_time(Config(stall_shutdown_time_seconds=90.0)) == give_up_after(90.0)
    assert give_up_time(Config(stall_shutdown_time_seconds=90.0, **off)) == 0.0
    assert give_up_time(Config()) == 0.0


def test_a_collective_that_does_not_end() -> None:
    states = {1: ProcessState.SLEEPING, 2: ProcessState.STOPPED, 3: ProcessState.GONE}
    snapshot = StallSnapshot(0, ["a", "b"], True, states, 61.2)
    assert describe_stall(snapshot, PLACES) == (
        "rank 0 has waited for 'a', 'b' for 61 s: all ranks have submitted them, but some do not carry them"
        " out\n"
        "rank 2 on host node (pid 102): its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT 102 lets it"
        " go on\n"
        "rank 3 on host node (pid 103): its process has ended"
    )
    error = error_of_stall(snapshot, PLACES)
    assert error.missing == {"a": [2, 3], "b": [2, 3]}
    assert error.stacks[3] == "rank 3 on host node (pid 103): its process has ended"
    assert str(error).startswith("rank 0 has given up: rank 0 has waited for 'a', 'b'")


def test_where_nobody_is_stopped_all_are_shown() -> None:
    snapshot = StallSnapshot(0, ["a"], True, {1: ProcessState.RUNNING, 2: ProcessState.SLEEPING}, 61.0)
    assert describe_stall(snapshot, PLACES).splitlines()[1:] == [
        "rank 1 on host node (pid 101): its process computes",
        "rank 2 on host node (pid 102): its process sleeps",
    ]


def test_a_shutdown_that_does_not_end() -> None:
    snapshot = StallSnapshot(0, [], False, {1: ProcessState.STOPPED, 2: ProcessState.SLEEPING}, 6.0)
    assert describe_late_end(snapshot, PLACES) == (
        "shutting down: not all ranks have shut down within 6 s\n"
        "rank 1 on host node (pid 101): its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT 101 lets it"
        " go on"
    )


def test_rank_0_should_have_said_why() -> None:
    snapshot = StallSnapshot(2, [], False, {0: ProcessState.UNKNOWN, 1: ProcessState.SLEEPING}, 100.0)
    assert describe_stall(snapshot, PLACES) == (
        "rank 2 has waited for the other ranks to join for 100 s: rank 0, which decides what runs, has not"
        " said why\n"
        "rank 0 on host node (pid 100): its process cannot be seen from here"
    )


def test_a_rank_that_has_given_up_before_is_not_the_cause() -> None:
    states = {0: ProcessState.STOPPED, 1: ProcessState.GONE}
    assert StallSnapshot(2, ["a"], False, states, 4.5).suspects == [0]
    assert StallSnapshot(2, ["a"], False, {**states, 0: ProcessState.SLEEPING}, 4.5).suspects == [0]
    assert StallSnapshot(
        2, ["a"], False, {0: ProcessState.SLEEPING, 1: ProcessState.STOPPED}, 4.5
    ).suspects == [1]


def test_what_is_known_of_a_rank_0_that_does_not_answer() -> None:
    head = "rank 2 has waited for 'a' for 61 s: rank 0, which decides what runs, does not answer"
    silent = "its background thread does not answer within 2 s, and its process"
    known = {
        ProcessState.STOPPED: "its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT 100 lets it go on",
        ProcessState.SLEEPING: f"{silent} sleeps: it is blocked, perhaps while it holds the GIL",
        ProcessState.UNKNOWN: f"{silent} cannot be seen from here",
    }
    for state, text in known.items():
        snapshot = StallSnapshot(2, ["a"], False, {}, 61.2)
        assert (
            describe_silence(snapshot, state, PLACES[0]) == f"{head}\nrank 0 on host node (pid 100): {text}"
        )
