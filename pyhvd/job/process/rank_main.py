"""``python -m pyhvd.job.process.rank_main LIFE CONTROL``: a keeper, and the rank proper, forked from it.

A Spark task starts it; the arguments are descriptors.
"""

from __future__ import annotations

import socket
import sys

from pyhvd.job.process.guardian import keep


def _run(control_fd: int) -> int:
    from pyhvd.job.rank import run_rank

    return run_rank(socket.socket(fileno=control_fd))


if __name__ == "__main__":
    life, control = map(int, sys.argv[1:])
    keep(life, lambda: _run(control))
