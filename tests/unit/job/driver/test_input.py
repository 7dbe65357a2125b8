"""Rank 0's input, as the launcher reads it."""

from __future__ import annotations

import os
import selectors
from contextlib import closing

import pytest

from pyhvd.job.driver import console
from pyhvd.job.driver.console import InputReader


def test_a_terminal_is_not_watched_in_its_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that wait there are another program's, and would wake the launcher again and again."""
    background = True
    monkeypatch.setattr(console, "is_in_background", lambda _: background)
    reader, writer = os.pipe()
    os.write(writer, b"typed")
    sent: list[bytes] = []
    with closing(selectors.DefaultSelector()) as selector:
        made = InputReader(reader, selector, sent.append)
        made.check()
        assert selector.select(0) == []
        background = False
        made.check()
        for key, _ in selector.select(0):
            key.data()
        assert sent == [b"typed"]
        background = True
        made.check()
        os.write(writer, b"more")
        assert selector.select(0) == []
        made.close()
    os.close(reader)
    os.close(writer)
