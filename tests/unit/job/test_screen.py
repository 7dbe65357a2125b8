"""The lines of many ranks on one screen."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from pyhvd.job.driver.output import Screen

_PREFIX = re.compile(rb"\[(\d)\]<std(out|err)>:")


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 2), st.text("ab\r\n", max_size=6), st.integers(0, 3)),
        max_size=30,
    ),
    st.booleans(),
)
def test_no_line_is_mixed_and_no_byte_is_lost(writes: list[tuple[int, int, str, int]], apart: bool) -> None:
    screen = Screen(apart=apart)
    shown = {1: b"", 2: b""}
    written: dict[tuple[int, int], bytes] = {}
    for now, (rank, stream, letters, flush) in enumerate(writes):
        data = letters.encode()
        written[rank, stream] = written.get((rank, stream), b"") + data
        shown[stream if apart else 1] += screen.take(rank, stream, data, now)
        if not flush:
            for other, piece in screen.take_begun(now):
                shown[other if apart else 1] += piece
    for other, piece in screen.end():
        shown[other if apart else 1] += piece
    assert screen.waits_since is None
    seen: dict[tuple[int, int], bytes] = {}
    for line in re.findall(rb"[^\r\n]*(?:\r\n|\r|\n|$)", shown[1] + shown[2]):
        if line:
            prefix = _PREFIX.match(line)
            assert prefix, shown
            who = int(prefix[1]), {b"out": 1, b"err": 2}[prefix[2]]
            seen[who] = seen.get(who, b"") + line[prefix.end() :]
    for who, text in written.items():
        # A line that another one interrupts is ended; nothing else is added.
        assert without_ends(seen.get(who, b"")) == without_ends(text)
        assert seen.get(who, b"").count(b"\r") == text.count(b"\r")


def without_ends(text: bytes) -> bytes:
    return text.replace(b"\n", b"").replace(b"\r", b"")


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["one\r", "two\r", "\n"], "[0]<stdout>:one\r|[0]<stdout>:two\r\n"),
        (["50 %\r100 %\rdone\n"], "[0]<stdout>:50 %\r[0]<stdout>:100 %\r[0]<stdout>:done\n"),
    ],
)
def test_a_carriage_return_ends_a_line(pieces: list[str], lines: str) -> None:
    screen = Screen()
    shown = [screen.take(0, 1, piece.encode(), 0.0).decode() for piece in pieces]
    assert "|".join(filter(None, shown)) == lines


def test_a_line_that_is_interrupted() -> None:
    screen = Screen(apart=False)
    shown = screen.take(0, 1, b"Name: ", 0.0)
    assert shown == b""
    assert screen.waits_since == 0.0
    assert screen.take_begun(0.1) == [(1, b"[0]<stdout>:Name: ")]
    assert screen.take(1, 2, b"warning\n", 0.2) == b"\n[1]<stderr>:warning\n"
    assert screen.take(0, 1, b"x\n", 0.3) == b"[0]<stdout>:x\n"


def test_colours() -> None:
    screen = Screen(coloured=True)
    assert screen.take(0, 1, b"x\n", 0.0) == b"\x1b[36m[0]<stdout>:\x1b[mx\n"
