"""Discovery of hosts: scripts and functions that find some, fail, hang, or find rubbish; and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pyhvd.job.driver.discovery import CallDiscovery, Discovery, HostFinder, ScriptDiscovery
from pyhvd.job.machines.found_hosts import DiscoveryFailed, Found, parse_hosts
from pyhvd.job.machines.member_host import FoundHost
from tests.waiting import PATIENCE_S, wait_gone, wait_until

AT_ONCE_S = 5.0
"""Far less than a script here hangs."""


def test_hosts_are_read_with_their_slots() -> None:
    text = "# all hosts\n\nh1:2\n  h2 # a comment\n[fe80::1]:3\n[::1]\n10.0.0.7:04\r\nh1:5\n"
    hosts, problems = parse_hosts(text.splitlines(), 8)
    assert problems == ()
    assert hosts == (
        FoundHost("h1", 5),
        FoundHost("h2", 8),
        FoundHost("fe80::1", 3),
        FoundHost("::1", 8),
        FoundHost("10.0.0.7", 4),
    )


@pytest.mark.parametrize(
    "line",
    [
        *(
            "h1:",
            "h1:0",
            "h1:-1",
            "h1:x",
            "h1:²",
            "h1:99999999999",
            "h 1",
            "-oProxyCommand=x",
            ":2",
            "h1:2:3",
        ),
        *("[fe80::1", "[h1]:2", "[fe80::1]2", "[fe80::1]:", "fe80::1", "\x00", "<html>"),
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    hosts, problems = parse_hosts(f"h7\n{line}\nh8".splitlines())
    assert [host.name for host in hosts] == ["h7", "h8"]
    assert problems == (f"line 2, {line!r}: expected h, h:2 or [fe80::1]:2",)


def test_a_long_bad_line_is_cut() -> None:
    ((problem,),) = parse_hosts(["x " * 500])[1:]
    assert len(problem) < 140


@contextlib.contextmanager
def script(folder: Path, text: str, interval: float = 0.01, limit: float = PATIENCE_S) -> Iterator[Discovery]:
    path = folder / "discover"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    discovery = ScriptDiscovery([str(path)], 2, interval, limit)
    try:
        yield discovery
    finally:
        since = time.monotonic()
        discovery.close()
        discovery.close()
        assert time.monotonic() < since + AT_ONCE_S


def first(discovery: Discovery) -> Found | DiscoveryFailed:
    return take_some(discovery)[0]


def take_some(discovery: Discovery) -> list[Found | DiscoveryFailed]:
    found: list[Found | DiscoveryFailed] = []

    def look() -> bool:
        found.extend(discovery.take())
        return bool(found)

    wait_until(look)
    return found


def test_a_script_runs_again_and_again(tmp_path: Path) -> None:
    with script(
        tmp_path, f"echo x >> {tmp_path}/runs; echo h1; echo h2:$(wc -l < {tmp_path}/runs)"
    ) as discovery:
        found: list[Found | DiscoveryFailed] = []
        while len(found) < 3:
            found += take_some(discovery)
    assert found[:3] == [Found((FoundHost("h1", 2), FoundHost("h2", number)), ()) for number in (1, 2, 3)]


def test_rubbish_and_nothing_are_results(tmp_path: Path) -> None:
    with script(tmp_path, r"printf 'no host\n\377\376\n'") as discovery:
        result = first(discovery)
    assert isinstance(result, Found)
    assert result.hosts == ()
    assert len(result.problems) == 2
    with script(tmp_path, "") as discovery:
        assert first(discovery) == Found((), ())


def test_a_script_that_fails_says_why(tmp_path: Path) -> None:
    with script(tmp_path, "echo h1; echo no >&2; echo token >&2; exit 3") as discovery:
        assert first(discovery) == DiscoveryFailed("the script ended with code 3: no / token")
    with script(tmp_path, "kill -9 $$") as discovery:
        result = first(discovery)
    assert isinstance(result, DiscoveryFailed)
    assert "code 137" in result.why


def test_a_script_that_is_missing(tmp_path: Path) -> None:
    discovery = ScriptDiscovery([str(tmp_path / "none")], 1, PATIENCE_S)
    result = first(discovery)
    discovery.close()
    assert isinstance(result, DiscoveryFailed)
    assert "code 127" in result.why
    assert "not found" in result.why


def pids(path: Path) -> list[int]:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return list(map(int, path.read_text().split()))


def late(seconds: float) -> str:
    return f"the script, or a process that it started, has not ended within {seconds:g} s"


HANGS = "sleep 1000 & echo $$ $! > {0}/new; mv {0}/new {0}/pids; wait"


def test_a_script_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    with script(tmp_path, HANGS.format(tmp_path), interval=PATIENCE_S, limit=0.5) as discovery:
        assert first(discovery) == DiscoveryFailed(late(0.5))
        wait_gone(pids(tmp_path / "pids"))


def test_a_process_that_a_script_leaves_behind_is_killed(tmp_path: Path) -> None:
    leaves = f"sleep 1000 & echo $! > {tmp_path}/pids"
    with script(tmp_path, leaves, interval=PATIENCE_S, limit=0.5) as discovery:
        assert first(discovery) == DiscoveryFailed(late(0.5))
        wait_gone(pids(tmp_path / "pids"))


@pytest.mark.parametrize("how", ["", "exec >&- 2>&-; "])
def test_a_script_that_runs_ends_with_its_reader(tmp_path: Path, how: str) -> None:
    with script(tmp_path, how + HANGS.format(tmp_path)) as discovery:
        running = pids(tmp_path / "pids")
        assert discovery.take() == []
    wait_gone(running)


def test_a_script_that_prints_without_end_is_killed(tmp_path: Path) -> None:
    with script(
        tmp_path, "while :; do echo h1 h1 h1 h1 h1 h1 h1 h1; done | cat", interval=PATIENCE_S
    ) as discovery:
        assert first(discovery) == DiscoveryFailed("the script printed more than 1048576 bytes")


def test_a_script_that_complains_without_end_is_killed(tmp_path: Path) -> None:
    with script(tmp_path, "while :; do echo no >&2; done", interval=PATIENCE_S, limit=0.2) as discovery:
        assert first(discovery) == DiscoveryFailed(late(0.2))


def test_a_script_dies_with_the_driver(tmp_path: Path) -> None:
    code = (
        "import sys, threading; from pyhvd.job.driver.discovery import ScriptDiscovery;"
        " discovery = ScriptDiscovery(sys.argv[1:]); threading.Event().wait()"
    )
    driver = subprocess.Popen([sys.executable, "-c", code, "/bin/sh", "-c", HANGS.format(tmp_path)])
    try:
        running = pids(tmp_path / "pids")
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_gone(running)


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()
    with script(tmp_path, "echo h1") as discovery:
        first(discovery)
    after = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()
    assert len(after) == len(before)


@contextlib.contextmanager
def calls(
    find: Callable[[], Any] | HostFinder, interval: float = PATIENCE_S, limit: float = PATIENCE_S
) -> Iterator[Discovery]:
    discovery = CallDiscovery(find, 2, interval, limit)
    try:
        yield discovery
    finally:
        since = time.monotonic()
        discovery.close()
        discovery.close()
        assert time.monotonic() < since + AT_ONCE_S


class Finder:
    """Finds hosts as Horovod's classes do; it could be called too."""

    def __init__(self, hosts: Mapping[str, int]) -> None:
        self.hosts = hosts

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        return self.hosts

    def __call__(self) -> list[str]:
        raise AssertionError("the method comes first")


def lines() -> Iterable[str]:
    yield "h1"
    yield "# no host"
    yield "[fe80::1]:3"


@pytest.mark.parametrize(
    ("find", "hosts"),
    [
        (lambda: {"h1": 2, "fe80::1": 3}, [("h1", 2), ("fe80::1", 3)]),
        (Finder({"h2": 1}), [("h2", 1)]),
        (lines, [("h1", 2), ("fe80::1", 3)]),
        (lambda: {"h1", "h1:5"} - {"h1"}, [("h1", 5)]),
        (dict, []),
    ],
)
def test_a_function_finds_hosts(find: HostFinder, hosts: list[tuple[str, int]]) -> None:
    with calls(find) as discovery:
        assert first(discovery) == Found(tuple(FoundHost(*host) for host in hosts), ())


LINE = "expected h, h:2 or [fe80::1]:2"
SLOTS = "expected a whole number above 0"


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"h 1": 2}, "host 'h 1': expected a host name or an IPv6 address"),
        ({7: 2}, "host 7: expected a host name or an IPv6 address"),
        ({"-oProxyCommand=x": 2}, "host '-oProxyCommand=x': expected a host name or an IPv6 address"),
        ({"h1": 0}, f"host 'h1', slots 0: {SLOTS}"),
        ({"h1": None}, f"host 'h1', slots None: {SLOTS}"),
        ({"h1": True}, f"host 'h1', slots True: {SLOTS}"),
        ({"h1": "2"}, f"host 'h1', slots '2': {SLOTS}"),
        (["h1:0"], f"line 1, 'h1:0': {LINE}"),
        (["# no host", ("h1", 2)], f"line 2, ('h1', 2): {LINE}"),
        ([[0] * 500], f"line 1, [{'0, ' * 26}0...: {LINE}"),
    ],
)
def test_a_bad_host_of_a_function_is_named(found: Any, problem: str) -> None:
    good: Any = {**found, "h8": 1} if isinstance(found, dict) else [*found, "h8:1"]
    with calls(lambda: good) as discovery:
        assert first(discovery) == Found((FoundHost("h8", 1),), (problem,))


def fails() -> None:
    raise ValueError("no\ntoken")


def fails_late() -> Iterator[str]:
    yield "h1"
    raise KeyError("late")


def endless() -> Iterator[str]:
    while True:
        yield "h1"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def fails_without_text() -> None:
    raise Unprintable


WHAT = "expected a mapping of hosts to slots, or an iterable of lines such as 'h' or 'h:2'"


@pytest.mark.parametrize(
    ("find", "why"),
    [
        (fails, "the call raised ValueError: no\ntoken"),
        (fails_late, "the call raised KeyError: 'late'"),
        (
            fails_without_text,
            "the call raised tests.unit.job.driver.test_discovery.Unprintable: <exc",
        ),
        (lambda: sys.exit(3), "the call raised SystemExit: 3"),
        (endless, "the call returned more than 65536 lines"),
        (lambda: None, f"the call returned None: {WHAT}"),
        (lambda: "h1:2", f"the call returned 'h1:2': {WHAT}"),
    ],
)
def test_a_function_that_fails_says_why(find: Callable[[], Any], why: str) -> None:
    with calls(find) as discovery:
        result = first(discovery)
    assert isinstance(result, DiscoveryFailed)
    assert result.why.startswith(why)


def test_calls_follow_each_other_in_other_threads() -> None:
    threads: list[threading.Thread] = []
    running = 0

    def find() -> dict[str, int]:
        nonlocal running
        running += 1
        threads.append(threading.current_thread())
        alone = running == 1
        running -= 1
        return {"h1": len(threads)} if alone else {}

    with calls(find, interval=0.01) as discovery:
        found: list[Found | DiscoveryFailed] = []
        while len(found) < 3:
            found += take_some(discovery)
    assert found[:3] == [Found((FoundHost("h1", number),), ()) for number in (1, 2, 3)]
    assert threading.current_thread() not in threads
    for thread in threads:
        thread.join(PATIENCE_S)  # the last result may come before its thread has ended
        assert not thread.is_alive()


def test_after_a_call_that_was_too_slow_comes_the_next() -> None:
    """Each limit it is said again, its result does not count, and no other call runs beside it."""
    began, go = threading.Semaphore(0), threading.Event()

    def find() -> dict[str, int]:
        began.release()
        if not go.is_set():
            go.wait(PATIENCE_S)
            return {"late": 1}
        return {"h1": 1}

    slow = DiscoveryFailed("the call has not returned within 0.1 s")
    with calls(find, interval=0.01, limit=0.1) as discovery:
        found: list[Found | DiscoveryFailed] = []
        while len(found) < 2:
            found += take_some(discovery)
        assert found[:2] == [slow, slow]
        assert began.acquire(blocking=False)
        assert not began.acquire(blocking=False)
        go.set()
        while found[-1] == slow:
            found += take_some(discovery)
    assert Found((FoundHost("late", 1),), ()) not in found
    assert found[-1] == Found((FoundHost("h1", 1),), ())


def test_a_call_that_hangs_does_not_hold_up_the_end() -> None:
    hangs = threading.Event()
    with calls(lambda: hangs.wait(PATIENCE_S), limit=0.05) as discovery:
        assert isinstance(first(discovery), DiscoveryFailed)
    hangs.set()
    wait_until(lambda: all(thread.name != "pyhvd.job.discovery.call" for thread in threading.enumerate()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_a_call_that_leaves_a_forked_process_behind() -> None:
    children: list[int] = []

    def find() -> dict[str, int]:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
            os._exit(0)
        children.append(child)
        return {"h1": 1}

    try:
        with calls(find, limit=2.0) as discovery:
            assert first(discovery) == Found((FoundHost("h1", 1),), ())
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_nothing_is_left_open_after_calls() -> None:
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with calls(lambda: {"h1": 1}) as discovery:
        first(discovery)
    assert (len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0) == before
