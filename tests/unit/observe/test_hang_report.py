"""The text of hang reports, word for word."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pyhvd.common.processes import ProcessPlace, ProcessState
from pyhvd.common.stacks import Frame, ThreadStack
from pyhvd.controller import Stalled
from pyhvd.negotiation.messages import (
    JOIN_NAME,
    PROTOCOL_VERSION,
    ErrorInfo,
    ErrorKind,
    StackReport,
    StackRequest,
    WaitAnswer,
    WaitQuestion,
    bits_of,
    decode_out_of_band,
    iter_bits,
)
from pyhvd.observe.hang_report import MAX_CHARACTERS, describe_state, error_of, names_of, warning_of
from pyhvd.observe.hang_reporter import HangReporter, RankLocations
from pyhvd.observe.stall_inspector import Answer, Stall, StallInspector

PLACES = [ProcessPlace(f"node{rank // 2}", 100 + rank, "n") for rank in range(6)]
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


def stalled(
    process_set: int, name: str, since: float, submitted: Iterable[int], missing: Iterable[int]
) -> Stalled:
    return Stalled(process_set, name, since, bits_of(submitted), bits_of(missing))


def text_of(*tensors: Stalled, answers: dict[int, Answer], pending: tuple[Stalled, ...] = ()) -> str:
    finding = Stall(tensors, pending or tensors, 60.0, ends_job=False)
    return warning_of(finding, answers, PLACES, 75.2)


def lines(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_one_rank_is_late() -> None:
    w1 = stalled(0, "grad/w1", 10.0, (0, 1, 2), (3,))
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
    join = stalled(0, JOIN_NAME, 10.0, (0, 1, 2), (3,))
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
    error = error_of(Stall((join,), (join,), 60.0, ends_job=True), {3: LOADING}, PLACES, 75.2)
    assert error.missing == {"join()": [3]}
    assert error.message.startswith("the job was ended: join() has waited for more than 60 s")


def test_ranks_that_say_nothing() -> None:
    x = stalled(0, "x", 10.0, (0,), (1, 2, 3, 4, 5))
    answers: dict[int, Answer] = {
        1: ProcessState.STOPPED,
        2: ProcessState.GONE,
        3: ProcessState.RUNNING,
        4: ProcessState.UNKNOWN,
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


@pytest.mark.parametrize("state", [ProcessState.SLEEPING, ProcessState.WAITING])
def test_a_rank_that_is_blocked(state: ProcessState) -> None:
    assert describe_state(state, PLACES[0]) == (
        f"its background thread does not answer within 2 s, and its process {state.value}:"
        " it is blocked, perhaps while it holds the GIL"
    )


def test_ranks_that_wait_for_each_other() -> None:
    a = stalled(0, "a", 10.0, (0,), (1,))
    b = stalled(2, "b", 11.0, (1,), (0,))
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
    a, b = stalled(0, "a", 10.0, (0,), (1,)), stalled(0, "b", 74.0, (1,), (2,))
    text = text_of(a, answers={1: LOADING}, pending=(a, b))
    assert "rank 1 has submitted 'b', which waits for rank 2" in text
    assert "deadlock" not in text


def test_many_of_everything_is_cut() -> None:
    tensors = [stalled(0, f"t{i}", 10.0, (0,), (1 + i % 40,)) for i in range(1000)]
    places = [ProcessPlace("n", rank, "n") for rank in range(50)]
    answers = dict.fromkeys(range(1, 17), LOADING)
    text = warning_of(Stall(tuple(tensors), tuple(tensors), 1.0, ends_job=False), answers, places, 20.0)
    assert "'t0', 't40', 't80', 't120', 't160', 't200' and 19 more: not submitted by rank 1," in text
    assert "  ... and 28 more lines of such tensors" in text
    assert "ranks 17-40: not asked, as they are too many for one report" in text
    assert len(text) < 16_000
    assert names_of(tensors[:6]) == "'t0', 't1', 't2', 't3', 't4', 't5'"


def test_the_error_says_the_same_with_the_stacks_apart() -> None:
    x = stalled(0, "x", 10.0, (0,), (1, 3))
    y = stalled(0, "y", 10.0, (0, 1), (3,))
    error = error_of(Stall((x, y), (x, y), 60.0, True), {1: ProcessState.GONE, 3: LOADING}, PLACES, 75.0)
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
    waiting = [stalled(0, "x", 0.0, (0,), (1,))]
    reporter = HangReporter(
        StallInspector(10.0, 20.0),
        RankLocations(0, [ProcessPlace("a", 1), ProcessPlace("b", 2)]),
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
    a, b = stalled(0, "a", 0.0, (0,), (1,)), stalled(0, "b", 0.0, (0,), (2,))
    waiting = [a, b]
    reporter = HangReporter(
        StallInspector(10.0, 0.0),
        RankLocations(0, [ProcessPlace("a", 1), ProcessPlace("b", 2), ProcessPlace("c", 3)]),
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


def test_who_said_nothing_is_looked_at_and_who_has_nothing_to_say_is_not() -> None:
    texts: list[str] = []
    reporter = HangReporter(
        StallInspector(10.0, 0.0),
        RankLocations(0, [ProcessPlace("a", 1), ProcessPlace("b", 2), ProcessPlace("c", 3)]),
        send=lambda rank, payload: None,
        pending=lambda now: [stalled(0, "x", 0.0, (0,), (1, 2))],
        count=lambda tensors, warned: None,
        warn=texts.append,
    )
    reporter.inspect(10.0)
    reporter.take(1, StackReport(PROTOCOL_VERSION, 0, []))
    reporter.inspect(12.0)
    (text,) = texts
    assert "rank 1 on host b (pid 2) has not submitted 'x': none of its threads runs Python code" in text
    assert "rank 2 on host c (pid 3) has not submitted 'x': its background thread does not answer" in text


def test_a_rank_that_asks_is_told_at_once_also_of_what_only_it_knows() -> None:
    """Others that wait for less than the warning time are in the answer, and nothing is logged."""
    sent: list[tuple[int, Any]] = []
    texts: list[str] = []
    reporter = HangReporter(
        StallInspector(10.0, 0.0),
        RankLocations(0, [ProcessPlace("a", 1), ProcessPlace("b", 2), ProcessPlace("c", 3)]),
        send=lambda rank, payload: sent.append((rank, decode_out_of_band(payload, 0))),
        pending=lambda now: [stalled(0, "x", 0.0, (0,), (1, 2))],
        count=lambda tensors, warned: None,
        warn=texts.append,
    )
    reporter.ask(1, WaitQuestion(PROTOCOL_VERSION, 7, "receive from rank 2", 2.0, [2]), 3.0)
    reporter.inspect(3.0)
    asked = [rank for rank, message in sent if isinstance(message, StackRequest)]
    assert asked == [1, 2]
    reporter.take(2, StackReport(PROTOCOL_VERSION, 0, []))
    reporter.inspect(5.0)
    rank, answer = sent[-1]
    assert (rank, answer.number) == (1, 7)
    assert "'x': not submitted by ranks 1-2, submitted by rank 0 (waiting for 5 s)" in answer.text
    assert "'receive from rank 2': not submitted by rank 2, submitted by rank 1" in answer.text
    assert not texts
    reporter.inspect(10.0)
    reporter.inspect(12.0)
    assert len(texts) == 1
    assert "receive" not in texts[0]


def test_a_rank_that_asks_while_nothing_waits_is_told_so() -> None:
    sent: list[tuple[int, Any]] = []
    reporter = HangReporter(
        StallInspector(10.0, 0.0),
        RankLocations(0, [ProcessPlace("a", 1)]),
        send=lambda rank, payload: sent.append((rank, decode_out_of_band(payload, 0))),
        pending=lambda now: [],
        count=lambda tensors, warned: None,
    )
    reporter.ask(0, WaitQuestion(PROTOCOL_VERSION, 1), 3.0)
    reporter.inspect(3.0)
    assert sent == [(0, WaitAnswer(PROTOCOL_VERSION, 1, ""))]


# -- many ranks

SIZE = 10_000
HOSTS = [ProcessPlace(f"h{rank // 8}", 1000 + rank, f"n{rank // 8}") for rank in range(SIZE)]
STEPPING = [ThreadStack("MainThread", [Frame("train.py", 71, "step", "loss = model(x)")], "pyhvd.wait")]


def reports(
    tensors: list[Stalled], answers: dict[int, Answer], places: list[ProcessPlace] = HOSTS
) -> tuple[str, ErrorInfo]:
    warned = Stall(tuple(tensors), tuple(tensors), 60.0, ends_job=False)
    ended = Stall(tuple(tensors), tuple(tensors), 60.0, ends_job=True)
    return warning_of(warned, answers, places, 75.0), error_of(ended, answers, places, 75.0)


def test_half_of_the_ranks_is_missing() -> None:
    halves = range(0, SIZE, 2), range(1, SIZE, 2)
    tensors = [stalled(0, f"grad{i}", 10.0, *halves) for i in range(161)]
    asked: list[int] = [*range(1, 33, 2)]
    answers: dict[int, Answer] = dict.fromkeys(asked[:14], STEPPING) | dict.fromkeys(
        asked[14:], ProcessState.UNKNOWN
    )
    warning, error = reports(tensors, answers)
    assert warning == lines("""
        161 tensors have waited for more than 60 s, because some ranks have not submitted them
          'grad0', 'grad1', 'grad2', 'grad3', 'grad4', 'grad5' and 155 more: not submitted by ranks 1, 3, 5, 7, ... 9997, 9999 (5,000 ranks: 4 ranks on each of 1,250 hosts: h0-h1249), submitted by ranks 0, 2, 4, 6, ... 9996, 9998 (5,000 ranks) (waiting for 65 s)
        ranks 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27 on hosts h0, h1, h2, h3 have not submitted 'grad0', 'grad1', 'grad2', 'grad3', 'grad4', 'grad5' and 155 more: they are at train.py:71 in step, inside pyhvd.wait
            MainThread:
              train.py:71 in step: loss = model(x)
        ranks 29, 31 on host h3 have not submitted 'grad0', 'grad1', 'grad2', 'grad3', 'grad4', 'grad5' and 155 more: of each rank, its background thread does not answer within 2 s, and its process cannot be seen from here
        ranks 33, 35, 37, 39, ... 9997, 9999 (4,984 ranks): not asked, as they are too many for one report
    """)  # noqa: E501
    assert error.message.splitlines()[1:3] == warning.splitlines()[1:3]
    assert error.missing["grad160"] == [*halves[1]]
    assert error.stacks[1].startswith("rank 1 on host h0 (pid 1001) has not submitted 'grad0', ")


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (range(17), "ranks 0-16 (all ranks of 2 hosts: h0, h1; 1 rank on host h2)"),
        (range(8, SIZE), "ranks 8-9999 (all ranks of 1,249 hosts: h1-h1249)"),
        (
            range(3, SIZE, 8),
            "ranks 3, 11, 19, 27, ... 9987, 9995 (1,250 ranks: 1 rank on each of 1,250 hosts: h0-h1249)",
        ),
        (range(16), "ranks 0-15"),
        (
            [*range(2, 5), *range(9, 32)],
            "ranks 2-4, 9-31 (all ranks of 2 hosts: h2, h3; 3-7 ranks on each of 2 hosts: h0, h1)",
        ),
    ],
)
def test_of_many_missing_ranks_the_hosts_are_told(missing: Sequence[int], text: str) -> None:
    warning, _ = reports([stalled(0, "x", 10.0, [5, 6], missing)], {})
    assert f"  'x': not submitted by {text}, submitted by ranks 5-6 (" in warning


def deep_stacks(rank: int) -> list[ThreadStack]:
    def frames(thread: int) -> list[Frame]:
        return [
            Frame("x" * 150, 10 * rank + i, f"function{thread}_" + "y" * 140, "z" * 160) for i in range(10)
        ]

    return [ThreadStack(f"thread-{thread}", frames(thread), "w" * 150, 7) for thread in range(8)]


@pytest.mark.parametrize(("name", "host"), [("g", "h"), ("n" * 3000, "host" * 15)], ids=["short", "long"])
@pytest.mark.parametrize("tensors", [1, 161])
@pytest.mark.parametrize("alike", [True, False], ids=["same ranks", "other ranks for each tensor"])
@pytest.mark.parametrize("deep", [True, False])
def test_a_report_has_a_limit(name: str, host: str, tensors: int, alike: bool, deep: bool) -> None:
    """With any names, stacks and sets of ranks; the headline and the last line are always there."""
    places = [ProcessPlace(f"{host}{rank // 8}", 1000 + rank, f"n{rank // 8}") for rank in range(SIZE)]
    random = Random(1)
    everyone, half = (1 << SIZE) - 1, bits_of(range(0, SIZE, 2))
    sets = [half if alike else random.getrandbits(SIZE) | 1 for _ in range(tensors)]
    waiting = [Stalled(0, f"{name}{i}", 10.0, ranks, everyone & ~ranks) for i, ranks in enumerate(sets)]
    asked = Stall(tuple(waiting), (), 60.0, ends_job=False).missing[:16]
    warning, error = reports(
        waiting, {rank: deep_stacks(rank) if deep else STEPPING for rank in asked}, places
    )
    for text in (warning, error.message):
        assert len(text) <= MAX_CHARACTERS
        assert "waited for more than 60 s" in text.splitlines()[0]
        assert ": not asked, as they are too many for one report" in text
    assert error.message.endswith("\n(60 s is PYHVD_STALL_SHUTDOWN_TIME_SECONDS)")
    assert warning.endswith("\nstacks are left out, with 2176 calls, as the report is long") == deep


def test_the_outermost_calls_are_cut_first() -> None:
    frames = [Frame("train.py", number, f"call{number}", "f(x) " * 30) for number in range(10)]
    answers: dict[int, Answer] = {
        rank: [ThreadStack("MainThread", [*frames[1:], Frame("last.py", rank, "f")], "", 2)]
        for rank in range(1, 6)
    }
    warning, _ = reports([stalled(0, "x", 10.0, [0], answers)], answers)
    assert len(warning) <= MAX_CHARACTERS
    for rank in answers:
        assert (
            f"rank {rank} on host h0 (pid {1000 + rank}) has not submitted 'x': it is at train.py:1 in call1"
            in warning
        )
    shown = warning.count(" in call3: ")
    assert (shown, warning.count("      ... and 9 calls further out")) == (5, 5)


def test_sets_of_ranks_that_wait_for_each_other_have_one_line() -> None:
    low, high = range(5000), range(5000, SIZE)
    tensors = [stalled(0, f"a{i}", 10.0, low, high) for i in range(80)]
    tensors += [stalled(0, f"b{i}", 10.0, high, low) for i in range(81)]
    warning, error = reports(tensors, dict.fromkeys(range(16), STEPPING))
    line = (
        "deadlock: ranks 0-4999 wait for 'a0', which ranks 5000-9999 have not submitted, and ranks 5000-9999"
        " for 'b0', which ranks 0-4999 have not: let all ranks submit both before they wait,"
        " or in the same order"
    )
    for text in (warning, error.message):
        assert text.count("deadlock") == 1
        assert line in text.splitlines()


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4))
def test_few_ranks_that_wait_for_each_other_are_told_pair_by_pair(sets: list[list[bool]]) -> None:
    tensors = [
        stalled(0, f"t{i}", 10.0, [r for r in range(4) if has[r]], [r for r in range(4) if not has[r]])
        for i, has in enumerate(sets)
    ]
    first: dict[tuple[int, int], str] = {}
    for tensor in tensors:
        for waiting in iter_bits(tensor.submitted):
            for missing in iter_bits(tensor.missing):
                first.setdefault((waiting, missing), tensor.name)
    expected = [
        f"deadlock: rank {a} waits for '{mine}', which rank {b} has not submitted, and rank {b} for"
        f" '{first[b, a]}', which rank {a} has not: let all ranks submit both before they wait, or in"
        " the same order"
        for (a, b), mine in first.items()
        if a < b and (b, a) in first
    ]
    warning, _ = reports(tensors, {})
    assert [line for line in warning.splitlines() if line.startswith("deadlock")] == expected
