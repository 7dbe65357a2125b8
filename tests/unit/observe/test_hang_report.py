"""The text of hang reports, word for word."""

from __future__ import annotations

import textwrap

import pytest

from pyhvd.common.processes import Place, State
from pyhvd.common.stacks import Frame, ThreadStack
from pyhvd.controller import Stalled
from pyhvd.negotiation.messages import JOIN_NAME, ErrorKind
from pyhvd.observe.hang_report import describe_state, error_of, names_of, warning_of
from pyhvd.observe.hang_reporter import HangReporter, RankLocations
from pyhvd.observe.stall_inspector import Answer, Finding, StallInspector

PLACES = [Place(f"node{rank // 2}", 100 + rank, "n") for rank in range(6)]
LOADING = [
    ThreadStack(
        "MainThread",
        [
            Frame("train.py", 41, "load_batch", "row = next(self.rows)"),
            Frame("train.py", 60, "<module>", "main()"),
        ],
    ),
    ThreadStack("reader", [Frame("data.py", 7, "read")], "socket.SocketIO.readinto", 3),
]


def text_of(*stalled: Stalled, answers: dict[int, Answer], pending: tuple[Stalled, ...] = ()) -> str:
    finding = Finding(stalled, pending or stalled, 60.0, ends_job=False)
    return warning_of(finding, answers, PLACES, 75.2)


def lines(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_one_rank_is_late() -> None:
    w1 = Stalled(0, "grad/w1", 10.0, (0, 1, 2), (3,))
    assert text_of(w1, answers={3: LOADING}) == lines("""
        a tensor has waited for more than 60 s, because some ranks have not submitted it
          'grad/w1': not submitted by rank 3, submitted by ranks 0-2 (waiting for 65 s)
        rank 3 on host node1 (pid 103) has not submitted 'grad/w1': it is at train.py:41 in load_batch
            MainThread:
              train.py:41 in load_batch: row = next(self.rows)
              train.py:60 in <module>: main()
            reader:
              data.py:7 in read
              ... and 3 calls further out
    """)


def test_a_join_that_waits() -> None:
    join = Stalled(0, JOIN_NAME, 10.0, (0, 1, 2), (3,))
    assert text_of(join, answers={3: LOADING}) == lines("""
        join() has waited for more than 60 s, because some ranks have not called it
          join(): not called by rank 3, called by ranks 0-2 (waiting for 65 s)
        rank 3 on host node1 (pid 103) has not called join(): it is at train.py:41 in load_batch
            MainThread:
              train.py:41 in load_batch: row = next(self.rows)
              train.py:60 in <module>: main()
            reader:
              data.py:7 in read
              ... and 3 calls further out
    """)
    error = error_of(Finding((join,), (join,), 60.0, ends_job=True), {3: LOADING}, PLACES, 75.2)
    assert error.missing == {"join()": [3]}
    assert error.message.startswith("the job was ended: join() has waited for more than 60 s")


def test_ranks_that_say_nothing() -> None:
    x = Stalled(0, "x", 10.0, (0,), (1, 2, 3, 4, 5))
    answers: dict[int, Answer] = {
        1: State.STOPPED,
        2: State.GONE,
        3: State.RUNNING,
        4: State.UNKNOWN,
        5: [],
    }
    assert text_of(x, answers=answers) == lines("""
        a tensor has waited for more than 60 s, because some ranks have not submitted it
          'x': not submitted by ranks 1-5, submitted by rank 0 (waiting for 65 s)
        rank 1 on host node0 (pid 101) has not submitted 'x': its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT 101 lets it go on
        rank 2 on host node1 (pid 102) has not submitted 'x': its process has ended
        rank 3 on host node1 (pid 103) has not submitted 'x': its background thread does not answer within 2 s, and a thread of its process computes: probably C code that holds the GIL
        rank 4 on host node2 (pid 104) has not submitted 'x': its background thread does not answer within 2 s, and its process cannot be seen from here
        rank 5 on host node2 (pid 105) has not submitted 'x': none of its threads runs Python code of the program
    """)  # noqa: E501


@pytest.mark.parametrize("state", [State.SLEEPING, State.WAITING])
def test_a_rank_that_is_blocked(state: State) -> None:
    assert describe_state(state, PLACES[0]) == (
        f"its background thread does not answer within 2 s, and its process {state.value}:"
        " it is blocked, perhaps while it holds the GIL"
    )


def test_ranks_that_wait_for_each_other() -> None:
    a = Stalled(0, "a", 10.0, (0,), (1,))
    b = Stalled(2, "b", 11.0, (1,), (0,))
    waiting = [ThreadStack("MainThread", [Frame("m.py", 5, "f")], "pyhvd.allreduce")]
    assert text_of(a, b, answers={0: waiting, 1: waiting}) == lines("""
        2 tensors have waited for more than 60 s, because some ranks have not submitted them
          'a': not submitted by rank 1, submitted by rank 0 (waiting for 65 s)
          'b' of process set 2: not submitted by rank 0, submitted by rank 1 (waiting for 64 s)
        rank 0 on host node0 (pid 100) has not submitted 'b' of process set 2: it is at m.py:5 in f, inside pyhvd.allreduce
            MainThread:
              m.py:5 in f
            rank 0 has submitted 'a', which waits for rank 1
        rank 1 on host node0 (pid 101) has not submitted 'a': it is at m.py:5 in f, inside pyhvd.allreduce
            MainThread:
              m.py:5 in f
            rank 1 has submitted 'b' of process set 2, which waits for rank 0
        deadlock: rank 0 waits for 'a', which rank 1 has not submitted, and rank 1 for 'b' of process set 2, which rank 0 has not: let all ranks submit both before they wait, or in the same order
    """)  # noqa: E501


def test_the_late_one_waits_for_something_that_is_not_late_yet() -> None:
    a, b = Stalled(0, "a", 10.0, (0,), (1,)), Stalled(0, "b", 74.0, (1,), (2,))
    text = text_of(a, answers={1: LOADING}, pending=(a, b))
    assert "rank 1 has submitted 'b', which waits for rank 2" in text
    assert "deadlock" not in text


def test_many_of_everything_is_cut() -> None:
    stalled = [Stalled(0, f"t{i}", 10.0, (0,), (1 + i % 40,)) for i in range(1000)]
    places = [Place("n", rank, "n") for rank in range(50)]
    answers = dict.fromkeys(range(1, 17), LOADING)
    text = warning_of(Finding(tuple(stalled), tuple(stalled), 1.0, ends_job=False), answers, places, 20.0)
    assert "'t0', 't40', 't80', 't120', 't160', 't200' and 19 more: not submitted by rank 1," in text
    assert "  ... and 28 more lines of such tensors" in text
    assert "ranks 17-40: not asked, as they are too many for one report" in text
    assert len(text) < 16_000
    assert names_of(stalled[:6]) == "'t0', 't1', 't2', 't3', 't4', 't5'"


def test_the_error_says_the_same_with_the_stacks_apart() -> None:
    x = Stalled(0, "x", 10.0, (0,), (1, 3))
    y = Stalled(0, "y", 10.0, (0, 1), (3,))
    error = error_of(Finding((x, y), (x, y), 60.0, True), {1: State.GONE, 3: LOADING}, PLACES, 75.0)
    assert error.kind == ErrorKind.STALL
    assert error.message == lines("""
        the job was ended: 2 tensors have waited for more than 60 s, because some ranks have not submitted them
          'x': not submitted by ranks 1, 3, submitted by rank 0 (waiting for 65 s)
          'y': not submitted by rank 3, submitted by ranks 0-1 (waiting for 65 s)
        rank 1 on host node0 (pid 101) has not submitted 'x': its process has ended
        rank 3 on host node1 (pid 103) has not submitted 'x', 'y': it is at train.py:41 in load_batch
        (60 s is PYHVD_STALL_SHUTDOWN_TIME_SECONDS)
    """)  # noqa: E501
    assert error.missing == {"x": [1, 3], "y": [3]}
    assert sorted(error.stacks) == [1, 3]
    assert error.stacks[1].splitlines() == [
        "rank 1 on host node0 (pid 101) has not submitted 'x': its process has ended",
        "    rank 1 has submitted 'y', which waits for rank 3",
    ]
    assert "      train.py:41 in load_batch: row = next(self.rows)" in error.stacks[3].splitlines()


@pytest.mark.parametrize("suspended", [False, True])
def test_a_job_that_was_suspended_is_not_ended_for_it(suspended: bool) -> None:
    """Rank 0 is suspended from 10 s to 100 s; the time of the stall starts anew at 100 s."""
    waiting = [Stalled(0, "x", 0.0, (0,), (1,))]
    reporter = HangReporter(
        StallInspector(10.0, 20.0),
        RankLocations(0, [Place("a", 1), Place("b", 2)]),
        send=lambda rank, payload: None,
        pending=lambda now: waiting,
        count=lambda tensors, warned: None,
    )
    assert reporter.inspect(0.0) == (10.0, None)
    now = 100.0
    if suspended:
        reporter.resumed(now)
    for _ in range(50):
        look, error = reporter.inspect(now)
        if error is not None:
            break
        now = max(look, now)
    # The other rank does not answer within 2 s.
    assert now == (122.0 if suspended else 102.0)


def test_a_rank_that_submits_while_others_are_asked_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    a, b = Stalled(0, "a", 0.0, (0,), (1,)), Stalled(0, "b", 0.0, (0,), (2,))
    waiting = [a, b]
    reporter = HangReporter(
        StallInspector(10.0, 0.0),
        RankLocations(0, [Place("a", 1), Place("b", 2), Place("c", 3)]),
        send=lambda rank, payload: None,
        pending=lambda now: list(waiting),
        count=lambda tensors, warned: None,
    )
    reporter.inspect(0.0)
    reporter.inspect(10.0)
    waiting.remove(a)
    with caplog.at_level("WARNING", "pyhvd"):
        reporter.inspect(12.0)
    assert "rank 2 on host c (pid 3) has not submitted 'b'" in caplog.text
    assert "rank 1" not in caplog.text
