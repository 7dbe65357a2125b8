"""``python -P -m pyhvd.job.agent.arriving_agent``: an agent that connects to its driver by itself.

A task of Spark or an actor of Ray starts it by :func:`start_agent`, which tells it on stdin whom to serve. It
dies with the process that has started it. Otherwise it is the agent of :mod:`pyhvd.job.agent.host_agent`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from pyhvd.job.process.guardian import die_with_parent
from pyhvd.transport.tcp.connection import Address, Secret, connect

GO_ON_ELSEWHERE = 75
"""The exit code of an agent that its driver has stopped for the reason `moves_for`."""
_MOST_BYTES = 1 << 16


def start_agent(
    addresses: Sequence[Address],
    secret: Secret,
    number: int,
    env: Mapping[str, str],
    executable: str | None = None,
    moves_for: str = "",
) -> subprocess.Popen[bytes]:
    """Start an agent beside this process, and return its process.

    Parameters
    ----------
    addresses : sequence of (str, int)
        Where the driver listens.
    secret : Secret
        The job's key.
    number : int
        What tells this agent from the job's others: its :attr:`~pyhvd.job.messages.Hello.task`.
    env : mapping of str to str
        The whole environment of the agent.
    executable : str, optional
        The Python of agent and ranks; by default that of this process.
    moves_for : str
        The reason by which the driver stops an agent that shall run on another host; empty for none.
    """
    agent = subprocess.Popen(
        [executable or sys.executable, "-P", "-m", "pyhvd.job.agent.arriving_agent"],
        stdin=subprocess.PIPE,
        stdout=2,  # the starter's stdout is not its own
        env=dict(env),
    )
    told = {
        "key": secret.reveal().hex(),
        "addresses": addresses,
        "number": number,
        "parent": os.getpid(),
        "moves_for": moves_for,
    }
    assert agent.stdin is not None
    with agent.stdin as stdin:
        stdin.write(json.dumps(told).encode())
    return agent


def main() -> int:
    """Run the agent; return its exit code."""
    from pyhvd.job.agent.host_agent import exit_code, serve_on  # what starts an agent needs none of it

    told = json.loads(sys.stdin.buffer.read(_MOST_BYTES))
    die_with_parent(signal.SIGKILL, told["parent"])
    addresses = [(host, port) for host, port in told["addresses"]]
    stopped = ""

    def run() -> None:
        nonlocal stopped
        stopped = serve_on(connect(addresses, bytes.fromhex(told["key"])), told["number"])

    return exit_code(run) or (GO_ON_ELSEWHERE if stopped and stopped == told["moves_for"] else 0)


if __name__ == "__main__":
    sys.exit(main())
