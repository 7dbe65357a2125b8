"""The line between a rank and its watcher: messages that arrive in any pieces."""

from __future__ import annotations

import base64
import os
from typing import Any

import pytest

from pyhvd.job.process.exit_report import EXCEPTION, ExitReport
from pyhvd.job.process.rank_line import (
    ANSWER,
    ENTERING,
    LOGGED,
    MAX_LINE,
    RESULT,
    TENTATIVE,
    UP,
    RankLine,
    take_messages,
    tell,
    tell_report,
)


def _sent(*calls: tuple[object, ...]) -> bytes:
    """Return the bytes of these messages, as a rank writes them."""
    read, write = os.pipe()
    for what, *rest in calls:
        if isinstance(what, ExitReport):
            tell_report(write, what, *rest)  # type: ignore[arg-type]
        else:
            tell(write, what, *rest)  # type: ignore[arg-type]
    os.close(write)
    with os.fdopen(read, "rb") as file:
        return file.read()


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_messages_arrive_in_pieces(size: int) -> None:
    report = ExitReport(3, EXCEPTION, 1, "failed\n\udce4\n", 2.5, "Traceback", titled=True)
    data = _sent(
        *((ENTERING, True), (ENTERING, False), (UP, True), (TENTATIVE, "stopped in\nMPI")),
        *((report, b"\x80\n"), (RESULT, 5, b"ab\n", memoryview(b"cd"))),
    )
    entered: list[bool] = []
    reports: list[tuple[ExitReport, bytes]] = []
    result = bytearray()
    line = RankLine(entered.append, lambda *both: reports.append(both), result.extend)
    for start in range(0, len(data), size):
        line.feed(data[start : start + size])
    assert (entered, line.up, line.tentative) == ([True, False], True, "stopped in\nMPI")
    assert reports == [(report, b"\x80\n")]
    assert (bytes(result), line.left) == (b"ab\ncd", 0)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_living_rank_answers_call_after_call(size: int) -> None:
    value = base64.b64encode(b"value\n").decode()
    data = _sent(
        *((ENTERING, True), (ANSWER, 3, b"ab\n"), (LOGGED, value), (ANSWER, 2, b"[]"), (ENTERING, False)),
        *((ANSWER, 1, b"\n"), (RESULT, 0)),
    )
    told: list[Any] = []
    answer = bytearray()

    def end() -> None:
        told.append(bytes(answer))
        answer.clear()

    line = RankLine(told.append, print, answer.extend, end, told.append)
    for start in range(0, len(data), size):
        line.feed(data[start : start + size])
    assert told == [True, b"ab\n", b"value\n", b"[]", False, b"\n"]
    assert (line.left, line.answers) == (0, False)


def test_an_empty_result_is_told() -> None:
    parts: list[bytes] = []
    line = RankLine(print, print, parts.append)
    line.feed(_sent((RESULT, 0)))
    assert (parts, line.left) == ([b""], 0)


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        RankLine(print, print).feed(b"x\n")
    with pytest.raises(ValueError, match=f"a line of more than {MAX_LINE} bytes"):
        list(take_messages(bytearray(MAX_LINE + 1)))
