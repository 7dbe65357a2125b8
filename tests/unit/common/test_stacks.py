"""Stacks in reports: the user's calls, innermost first, and the library function that they called."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyhvd.common import stacks
from pyhvd.common.stacks import (
    MAX_FRAMES,
    MAX_THREADS,
    ThreadStack,
    user_stacks,
)
from pyhvd.testing import run_ranks

HERE = str(Path(__file__).resolve())


def line_of(mark: str) -> int:
    (number,) = [i for i, line in enumerate(Path(HERE).read_text().splitlines(), 1) if line.endswith(mark)]
    return number


class Sleeper:
    """A thread that waits in a function of this file until the context ends."""

    def __init__(
        self, rest: Callable[[threading.Event, threading.Event], None], name: str = "sleeper"
    ) -> None:
        self._go_on = threading.Event()
        there = threading.Event()
        self._thread = threading.Thread(target=rest, args=(there, self._go_on), name=name)
        self._thread.start()
        assert there.wait(10)

    def stack(self) -> ThreadStack:
        """Return the thread's stack."""
        (found,) = user_stacks([self._thread.ident or 0])
        return found

    def __enter__(self) -> Sleeper:
        return self

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._thread.join(10)


def load(there: threading.Event, go_on: threading.Event) -> None:
    there.set()
    go_on.wait(30)  # rests here


def deep(there: threading.Event, go_on: threading.Event, depth: int = 30) -> None:
    if depth:
        deep(there, go_on, depth - 1)
    else:
        load(there, go_on)


def test_a_frame_of_the_users_and_the_library_function_that_it_is_in() -> None:
    with Sleeper(load) as sleeper:
        stack = sleeper.stack()
    assert stack.name == "sleeper"
    assert stack.inside == "threading.Event.wait"
    assert stack.left_out == 0
    (frame,) = stack.frames  # no frame of threading below it
    assert frame.file.endswith("test_stacks.py")
    assert (frame.line, frame.function) == (line_of("# rests here"), "load")
    assert frame.text == "go_on.wait(30)  # rests here"
    assert str(frame) == f"{frame.file}:{frame.line} in load"


def test_deep_stacks_are_cut_at_the_outer_end() -> None:
    with Sleeper(deep) as sleeper:
        stack = sleeper.stack()
    assert [frame.function for frame in stack.frames] == ["load", *["deep"] * (MAX_FRAMES - 1)]
    assert stack.left_out == 31 - (MAX_FRAMES - 1)


def test_a_callback_of_a_library_shows_the_user_on_both_sides() -> None:
    def rest(there: threading.Event, go_on: threading.Event) -> None:
        class Odd:
            def default(self, _: object) -> str:
                load(there, go_on)
                return ""

        json.dumps(object(), default=Odd().default)

    with Sleeper(rest) as sleeper:
        stack = sleeper.stack()
    assert [frame.function for frame in stack.frames] == ["load", "Odd.default", "rest"]


def test_threads_without_code_of_the_users_are_left_out() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, args=(30,), daemon=True)
    thread.start()
    try:
        assert user_stacks([thread.ident or 0]) == []
    finally:
        go_on.set()
        thread.join(10)


def test_the_main_thread_comes_first_and_there_are_not_too_many() -> None:
    sleepers = [Sleeper(load, f"s{i}") for i in range(MAX_THREADS + 3)]
    try:
        found = user_stacks()
        assert len(found) == MAX_THREADS
        assert found[0].name == threading.main_thread().name
    finally:
        for sleeper in sleepers:
            sleeper.__exit__()


def test_pyhvds_own_frames_are_folded_into_what_was_called() -> None:
    stood: list[ThreadStack] = []

    def look(ident: int) -> None:
        until = time.monotonic() + 20
        while (found := user_stacks([ident])) and not found[0].inside.startswith("pyhvd"):
            if time.monotonic() > until:
                break
            time.sleep(0.001)
        stood.extend(found)
        go_on.set()

    def body() -> None:
        import pyhvd as hvd

        ident = threading.get_ident()
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(1.0, name="x")
            threading.Thread(target=look, args=(ident,)).start()
            handle.result()
        else:
            assert go_on.wait(30)
            hvd.allreduce(1.0, name="x")

    go_on = threading.Event()
    run_ranks(2, body, timeout=30)
    (stack,) = stood
    assert stack.inside == "pyhvd.result"
    assert [frame.function for frame in stack.frames] == ["body"]  # no frame of pyhvd.testing


def test_paths_are_shown_as_one_names_them_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(HERE).parent)
    assert stacks.shorten_path(HERE) == "test_stacks.py"
    assert stacks.shorten_path("/elsewhere/x.py") == "/elsewhere/x.py"
    assert stacks.shorten_path("<string>") == "<string>"
    assert stacks.shorten_path("bad\udcff.py") == "bad\\udcff.py"  # invalid text could not be sent


def test_the_current_directory_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert stacks.shorten_path(HERE) == HERE
