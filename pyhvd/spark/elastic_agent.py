"""The agent beside a task of an elastic job, ``python -m pyhvd.spark.elastic_agent``.

It is that of :mod:`pyhvd.job.agent.host_agent`. :mod:`pyhvd.spark.elastic_task` starts it and tells it on
stdin whom to serve. No other module imports this one: Python would have it twice, and warn.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from pyhvd.job.agent.host_agent import exit_code, serve_on
from pyhvd.job.process.guardian import die_with_parent
from pyhvd.spark.elastic_task import DECOMMISSIONED, GO_ON_ELSEWHERE
from pyhvd.transport.tcp.connection import connect

_MOST_BYTES = 1 << 16


def main() -> int:
    """Run the agent; return its exit code."""
    die_with_parent(signal.SIGKILL, os.getppid())
    told = json.loads(sys.stdin.buffer.read(_MOST_BYTES))
    addresses = [(host, port) for host, port in told["addresses"]]
    stopped = ""

    def run() -> None:
        nonlocal stopped
        stopped = serve_on(connect(addresses, bytes.fromhex(told["key"])), told["task"])

    return exit_code(run) or (GO_ON_ELSEWHERE if stopped == DECOMMISSIONED else 0)


if __name__ == "__main__":
    sys.exit(main())
