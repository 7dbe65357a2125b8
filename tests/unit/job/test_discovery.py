"""Discovery of hosts: scripts that print, hang, fail, print rubbish or nothing, and their reader's end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyhvd.job.discovery import Discovery, Failed, Found, parse_hosts
from pyhvd.job.membership import FoundHost
from tests.waiting import PATIENCE_S, wait_gone, wait_until

AT_ONCE_S = 5.0
"""Far less than a script here hangs."""


def test_hosts_are_read_with_their_slots() -> None:
    text = "# all hosts\n\nh1:2\n  h2 # a comment\n[fe80::1]:3\n[::1]\n10.0.0.7:04\r\nh1:5\n"
    hosts, problems = parse_hosts(text, 8)
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
    hosts, problems = parse_hosts(f"h7\n{line}\nh8")
    assert [host.name for host in hosts] == ["h7", "h8"]
    assert problems == (f"line 2, {line!r}: expected h, h:2 or [fe80::1]:2",)


def test_a_long_bad_line_is_cut() -> None:
    ((problem,),) = parse_hosts("x " * 500)[1:]
    assert len(problem) < 140


@contextlib.contextmanager
def script(folder: Path, text: str, interval: float = 0.01, limit: float = PATIENCE_S) -> Iterator[Discovery]:
    path = folder / "discover"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    discovery = Discovery([str(path)], 2, interval, limit)
    try:
        yield discovery
    finally:
        since = time.monotonic()
        discovery.close()
        discovery.close()
        assert time.monotonic() < since + AT_ONCE_S


def first(discovery: Discovery) -> Found | Failed:
    assert select.select([discovery], [], [], PATIENCE_S)[0]
    return discovery.take()[0]


def test_a_script_runs_again_and_again(tmp_path: Path) -> None:
    with script(
        tmp_path, f"echo x >> {tmp_path}/runs; echo h1; echo h2:$(wc -l < {tmp_path}/runs)"
    ) as discovery:
        found: list[Found | Failed] = []
        while len(found) < 3:
            assert select.select([discovery], [], [], PATIENCE_S)[0]
            found += discovery.take()
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
        assert first(discovery) == Failed("the script ended with code 3: no / token")
    with script(tmp_path, "kill -9 $$") as discovery:
        result = first(discovery)
    assert isinstance(result, Failed)
    assert "code 137" in result.why


def test_a_script_that_is_missing(tmp_path: Path) -> None:
    discovery = Discovery([str(tmp_path / "none")], interval=PATIENCE_S)
    result = first(discovery)
    discovery.close()
    assert isinstance(result, Failed)
    assert "code 127" in result.why
    assert "not found" in result.why


def pids(path: Path) -> list[int]:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return list(map(int, path.read_text().split()))


HANGS = "sleep 1000 & echo $$ $! > {0}/new; mv {0}/new {0}/pids; wait"


def test_a_script_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    with script(tmp_path, HANGS.format(tmp_path), interval=PATIENCE_S, limit=0.5) as discovery:
        assert first(discovery) == Failed("the script has not ended within 0.5 s")
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
        assert first(discovery) == Failed("the script printed more than 1048576 bytes")


def test_a_script_that_complains_without_end_is_killed(tmp_path: Path) -> None:
    with script(tmp_path, "while :; do echo no >&2; done", interval=PATIENCE_S, limit=0.2) as discovery:
        assert first(discovery) == Failed("the script has not ended within 0.2 s")


def test_a_script_dies_with_the_driver(tmp_path: Path) -> None:
    code = (
        "import sys, threading; from pyhvd.job.discovery import Discovery;"
        " discovery = Discovery(sys.argv[1:]); threading.Event().wait()"
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
