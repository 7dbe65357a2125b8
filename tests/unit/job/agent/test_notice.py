"""The notice that a host will be taken away: by SIGTERM, or by a command."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pyhvd.job.agent import notice as module
from pyhvd.job.agent.notice import Notice
from tests.waiting import wait_gone, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="agents need Linux")


@pytest.fixture
def notice() -> Iterator[Notice]:
    with closing(Notice()) as made:
        yield made


def has_succeeded(notice: Notice) -> bool:
    notice.check(time.monotonic())
    return bool(notice.why)


def test_the_first_sigterm_is_a_notice_and_wakes_the_waiting_thread(notice: Notice) -> None:
    notice.watch("")
    os.kill(os.getpid(), signal.SIGTERM)
    assert select.select([notice], [], [], 10)[0]
    assert notice.why == "its agent got SIGTERM"
    notice.clear()
    assert not select.select([notice], [], [], 0)[0]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    notice.watch("")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_first_sigterm_after_a_command_that_succeeded_ends_nothing(notice: Notice) -> None:
    notice.watch("true")
    wait_until(lambda: has_succeeded(notice))
    notice.watch("true")  # for the next generation
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.why == "the preemption command has succeeded"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_at_the_end_sigterm_has_its_meaning_again() -> None:
    with closing(Notice()) as notice:
        notice.watch("")
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_command_is_started_again_until_it_succeeds(
    notice: Notice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    count, taken = tmp_path / "count", tmp_path / "taken"
    notice.watch(f"echo >> {count}; test -e {taken}")
    wait_until(lambda: has_succeeded(notice) or (count.exists() and len(count.read_text()) > 2))
    assert notice.why == ""
    taken.touch()
    wait_until(lambda: has_succeeded(notice))
    assert notice.why == "the preemption command has succeeded"
    runs = count.read_text()
    for _ in range(5):
        notice.check(time.monotonic() + 10)
    assert count.read_text() == runs


def test_a_command_that_waits_ends_with_the_agent(tmp_path: Path) -> None:
    with closing(Notice()) as notice:
        notice.watch(f"echo $$ > {tmp_path}/pid; sleep 1000")
        wait_until(lambda: has_succeeded(notice) or (tmp_path / "pid").exists())
        wait_until(lambda: (tmp_path / "pid").read_text())
    wait_gone([int((tmp_path / "pid").read_text())])


def test_a_command_that_is_not_there_is_told_once(notice: Notice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    notice.watch("/nowhere/preempted")
    wait_until(lambda: has_succeeded(notice) or notice.remarks)
    for _ in range(20):
        time.sleep(0.01)
        notice.check(time.monotonic())
    assert notice.why == ""
    assert notice.remarks == ["the preemption command cannot be run (code 127): /nowhere/preempted"]
