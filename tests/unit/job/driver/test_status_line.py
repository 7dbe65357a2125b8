"""The line on a terminal that says how far the start of a job has come."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyhvd.job.driver.console import StatusLine
from pyhvd.job.driver.output import is_terminal
from pyhvd.job.errors import LaunchError
from pyhvd.job.machines.agent_pool import AgentPool
from pyhvd.job.machines.machine import HostTexts, JobMachine
from pyhvd.job.messages import Facts, HostNetwork, Member
from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rendezvous import assign
from tests.many_hosts import PATIENCE_S, Launcher, local_agent

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="agents need Linux")

ERASE = "\r\x1b[K"
INIT = """
    import os, sys
    import pyhvd as hvd
    hvd.init()
    if hvd.rank() == 0:
        print("all are up")
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ends = os.openpty()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def read_until(reader: int, end: str) -> str:
    """Return what was written to a terminal up to a text, or to the end if it does not come."""
    text = b""
    with contextlib.suppress(OSError):  # EIO: nobody has the other end open any more
        while end.encode() not in text:  # a read may end between two writes
            text += os.read(reader, 1 << 16)
    return text.decode()


def on_screen(text: str) -> list[str]:
    """Return the lines that stay on a terminal."""
    return re.sub(r"[^\n]*" + re.escape(ERASE), "", text.replace("\r\n", "\n")).splitlines()


def run(
    terminal: tuple[int, int],
    folder: Path,
    program: str,
    agent: str = "",
    term: str = "xterm",
    wait: str = "",
) -> str:
    """Return what a job writes to a terminal; once it has written `wait`, there is a file ``shown``."""
    try:
        local = local_agent(find_library().family)
    except LaunchError as exc:
        pytest.skip(str(exc))
    script = Launcher(folder).script(program)
    reader, writer = terminal
    command = ["-m", "pyhvd.run", "-H", "h1:1,h2:1", "--launch-agent", agent or local, script]
    environment = {**os.environ, "TERM": term, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    job = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    text = read_until(reader, wait) if wait else ""
    (folder / "shown").touch()
    text += read_until(reader, "\0")
    job.wait(PATIENCE_S)
    return text


def test_a_start_is_shown_until_the_first_output(terminal: tuple[int, int], tmp_path: Path) -> None:
    text = run(terminal, tmp_path, INIT)
    assert "pyhvd: 0 of 2 hosts are up" in text or "pyhvd: 1 of 2 hosts are up" in text, text
    assert on_screen(text) == ["[0]<stdout>:all are up"], text


def test_a_start_is_not_shown_without_a_terminal_that_can(terminal: tuple[int, int], tmp_path: Path) -> None:
    text = run(terminal, tmp_path, INIT, term="dumb")
    assert text == "[0]<stdout>:all are up\r\n"


def test_ranks_that_are_late_are_counted_and_nothing_is_left(
    terminal: tuple[int, int], tmp_path: Path
) -> None:
    program = """
        import os, time
        if os.environ["HOROVOD_RANK"] == "1":
            while not os.path.exists("first"):
                time.sleep(0.01)
            time.sleep(3.5)  # longer than the launcher waits before it names a host
        else:
            open("first", "w").close()
        from mpi4py import MPI
    """
    text = run(terminal, tmp_path, program)
    assert "2 of 2 hosts are up, 1 of 2 ranks are ready, waiting for h2" in text, text
    assert on_screen(text) == [], text


def test_an_error_stands_alone(terminal: tuple[int, int], tmp_path: Path) -> None:
    agent = "sh -c 'until [ -e shown ]; do sleep 0.1; done; echo {host}: no >&2; exit 255; {command}'"
    text = run(terminal, tmp_path, "pass", agent, wait="pyhvd: 0 of 2 hosts are up")
    lines = on_screen(text)
    assert [line.split(": ")[:2] for line in lines] == [["pyhvd", "host h1"], ["pyhvd", "host h2"]], text


def test_lines_of_the_launcher_stay_above(terminal: tuple[int, int]) -> None:
    reader, writer = terminal
    with open(writer, "w", closefd=False) as file:
        status = StatusLine(file, terminal=True)
        status.show("one")
        status.show("one")
        status.clear()
        status.show("one")
        status.show("x" * 1000)
        status.end()
        status.show("two")
        print("end", file=file)
    text = read_until(reader, "end\r\n")
    assert text == f"{ERASE}one{ERASE}{ERASE}one{ERASE}{'x' * 79}{ERASE}end\r\n"


def test_a_terminal_that_is_stopped_blocks_nobody(terminal: tuple[int, int]) -> None:
    reader, writer = terminal
    with open(writer, "w", closefd=False) as file:
        status = StatusLine(file, terminal=True)
        status.show("one")
        termios.tcflow(writer, termios.TCOOFF)
        status.show("lost")
        status.clear()
        status.end()
        termios.tcflow(writer, termios.TCOON)
        print("end", file=file)
    assert read_until(reader, "end\r\n") == f"{ERASE}oneend\r\n"


def test_what_is_no_terminal(terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert not is_terminal(io.StringIO())
    with open(terminal[1], "w", closefd=False) as file:
        assert is_terminal(file)
        monkeypatch.setenv("TERM", "dumb")
        assert not is_terminal(file)


def test_slow_hosts_are_named() -> None:
    names = [f"h{number}" for number in range(6)]
    machine = JobMachine(12, AgentPool(names, starts=True), HostTexts(12, names, 30.0), 30.0)
    machine.until = 100.0
    members = [
        Member(index, 0, f"hash{index}", name, 2, Facts("MPICH", "MPICH 5", True, "", HostNetwork()))
        for index, name in enumerate(names)
    ]
    assert machine.describe_start(1.0) == "pyhvd: 0 of 6 hosts are up"
    machine.register(members[0])
    assert machine.describe_start(2.0) == "pyhvd: 1 of 6 hosts are up"
    assert machine.describe_start(5.0) == "pyhvd: 1 of 6 hosts are up, waiting for h1, h2, h3 and 2 more"
    for member in members[1:]:
        machine.register(member)
    assert machine.describe_start(5.1) == "pyhvd: 6 of 6 hosts are up"
    assert machine.describe_start(9.0) == "pyhvd: 6 of 6 hosts are up"  # their ranks have not started
    machine.place(assign(member for member in members for _ in range(2)))
    for rank in range(11):
        machine.enter(rank, 0.0)
    assert machine.describe_start(9.1) == "pyhvd: 6 of 6 hosts are up, 11 of 12 ranks are ready"
    assert machine.describe_start(12.2).endswith("11 of 12 ranks are ready, waiting for h5")
    machine.end(11, 0.0)
    assert machine.describe_start(12.3) == ""
