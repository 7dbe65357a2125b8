"""The states of a process that another process can read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from pyhvd.common.kernel import node_of
from pyhvd.common.processes import ProcessPlace, ProcessState, here, state_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


def child(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process once it has run `code` up to {ready}, so that tests do not see it start."""
    said = "__import__('os').write(1, b'.')"
    process = subprocess.Popen([sys.executable, "-c", code.replace("{ready}", said)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"."
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    yield from child("import time; {ready}; time.sleep(60)")


@pytest.fixture
def counter() -> Iterator[subprocess.Popen[bytes]]:
    yield from child("{ready}\nwhile True: pass")


@pytest.fixture
def waiter() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process with two threads that wait for the GIL: each is runnable for a moment every 5 ms."""
    spin = "def spin():\n    while True: pass\n"
    waiting = "for _ in 'ab': threading.Thread(target=spin, daemon=True).start()\n"
    yield from child(f"import ctypes, threading\n{spin}{waiting}{{ready}}\nctypes.PyDLL(None).sleep(60)")


def of(process: subprocess.Popen[bytes]) -> ProcessState:
    mine = here()
    return state_of(ProcessPlace(mine.host, process.pid, mine.node), mine)


def becomes(look: Callable[[], ProcessState], state: ProcessState) -> bool:
    until = time.monotonic() + 20
    while look() is not state and time.monotonic() < until:
        time.sleep(0.01)
    return look() is state


def test_this_process_is_here() -> None:
    assert here().pid == os.getpid()
    assert here() == here()
    assert str(ProcessPlace("h", 7)) == "host h (pid 7)"


def test_without_proc_nothing_is_said_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as hidden:
        hidden.setattr("os.stat", fail)
        assert node_of("pid") == ""


def test_one_that_sleeps_is_stopped_and_killed(sleeper: subprocess.Popen[bytes]) -> None:
    assert becomes(lambda: of(sleeper), ProcessState.SLEEPING)
    sleeper.send_signal(signal.SIGSTOP)
    assert becomes(lambda: of(sleeper), ProcessState.STOPPED)
    sleeper.kill()
    assert becomes(lambda: of(sleeper), ProcessState.GONE)  # a zombie: no process has reaped it
    sleeper.wait(10)
    assert of(sleeper) is ProcessState.GONE


def test_one_that_computes(counter: subprocess.Popen[bytes]) -> None:
    assert becomes(lambda: of(counter), ProcessState.RUNNING)


def test_one_that_only_looks_for_the_gil_does_not_compute(waiter: subprocess.Popen[bytes]) -> None:
    assert becomes(lambda: of(waiter), ProcessState.SLEEPING)
    assert all(of(waiter) is ProcessState.SLEEPING for _ in range(100))


def test_one_that_cannot_be_seen() -> None:
    mine = here()
    assert state_of(ProcessPlace("other", mine.pid, "elsewhere"), mine) is ProcessState.UNKNOWN
    assert state_of(ProcessPlace("mac", mine.pid), ProcessPlace("mac", 1)) is ProcessState.UNKNOWN
