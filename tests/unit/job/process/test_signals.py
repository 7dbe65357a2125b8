"""Signals that Slurm sends to every process of a job step."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from pyhvd.job.process.signals import FORWARDED
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guardians need Linux")

_PROGRAM = """
import signal, sys, time
from pyhvd.job.process.guardian import guard

if signal.getsignal({number}) == signal.SIG_IGN:  # nohup has started the tests
    signal.signal({number}, signal.SIG_DFL)

def body():
    print({number!s}, signal.getsignal({number}) in (signal.SIG_DFL, signal.default_int_handler), flush=True)
    time.sleep(1000)

guard(int(sys.argv[1]), body)
"""
_AGENT = "pyhvd.job.agent.host_agent"


@pytest.mark.parametrize("number", FORWARDED)
def test_a_guardian_outlives_a_signal_to_all_and_its_process_does_not(number: signal.Signals) -> None:
    mine, its = socket.socketpair()
    with mine, its:
        argv = [sys.executable, "-c", _PROGRAM.format(number=int(number)), str(its.fileno())]
        guardian = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, pass_fds=[its.fileno()])
        its.close()
        assert guardian.stdout is not None
        try:
            assert guardian.stdout.readline() == f"{int(number)} True\n"
            pid = int(mine.recv(100))
            guardian.send_signal(number)
            os.kill(pid, number)
            code = int(mine.recv(100))
            assert code == -number or (number == signal.SIGINT and code == 1)
            assert guardian.wait(10) == 0
        finally:
            guardian.kill()
            guardian.wait()
            guardian.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_an_agent_takes_no_notice_of_a_users_signal(number: signal.Signals) -> None:
    """A line that is no key ends it with its own error."""
    agent = subprocess.Popen(
        [sys.executable, "-P", "-m", _AGENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        wait_until(lambda: _handles(agent.pid, number))
        agent.send_signal(number)
        _, said = agent.communicate("no key\n", 20)
        assert "pyhvdrun starts this program" in said
        assert agent.returncode == 1
    finally:
        agent.kill()


def _handles(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        caught = next(line for line in file if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> number - 1 & 1)
