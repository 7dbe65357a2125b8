"""``python -P -m pyhvd.job.rank.function_rank LIFE CONTROL``: a guardian, and a rank that runs a function.

The agent of the rank's host starts it, and sends the pickled function on the control socket.
"""

from __future__ import annotations

import os
import socket
import sys

from pyhvd.job.process.guardian import guard


def _run(control_fd: int) -> int:
    from pyhvd.job.rank.rank import PATHS, run_rank

    given = filter(None, os.environ.pop(PATHS, "").split(os.pathsep))
    sys.path[:0] = [path for path in given if path not in sys.path]
    return run_rank(socket.socket(fileno=control_fd), sends_exception=True)


if __name__ == "__main__":
    life, control = map(int, sys.argv[1:])
    guard(life, lambda: _run(control))
