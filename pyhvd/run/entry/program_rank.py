"""``python -P -m pyhvd.run.entry.program_rank LIFE CONTROL``: a guardian, and a rank that runs a program.

The agent of the rank's host starts it, and sends the program's arguments on the control socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from pyhvd.job.process.guardian import guard


def _run(control_fd: int) -> int:
    import msgspec

    from pyhvd.job.mpi.rank_env import let_hangup_end, read_generation, read_rank_env, set_defaults
    from pyhvd.job.process.rank_line import read_code
    from pyhvd.run.entry.user_script import run_script

    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # the agent runs in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.set_inheritable(control_fd, False)
    control = socket.socket(fileno=control_fd)
    program = msgspec.msgpack.decode(read_code(control), type=list[str])
    rank_env = read_rank_env()
    assert rank_env is not None
    known = read_generation(os.environ)
    message = set_defaults(rank_env, os.environ)
    let_hangup_end(os.environ)  # the launcher alone sends SIGHUP, and knows of nohup
    if message is not None and rank_env.rank == 0 and (known is None or not known.number):
        print(message, file=sys.stderr, flush=True)
    return run_script(program, rank_env, control.detach())


if __name__ == "__main__":
    life, control = map(int, sys.argv[1:])
    guard(life, lambda: _run(control))
