"""``walk_program.py [restart]``: the program of a walk's ranks; its calls are not part of the walk.

With ``restart`` the job is elastic, and rank 1 of the first generation kills itself after a commit.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading


def main(*arguments: str) -> None:
    """Be a rank: what pyhvd does for this function is not recorded, and what it has other processes do is."""
    profile = sys.getprofile()
    sys.setprofile(None)
    threading.setprofile(None)
    (train_again if arguments else train)()
    atexit.register(sys.setprofile, None)  # what hvd does at exit is this function's doing
    sys.setprofile(profile)


def train() -> None:
    """Be up, and down."""
    import pyhvd as hvd

    hvd.init()
    hvd.shutdown()


def train_again() -> None:
    """Commit a step in each generation."""
    import pyhvd as hvd

    hvd.init()

    @hvd.elastic.run
    def body(state: hvd.elastic.ObjectState) -> None:
        state.step += 1
        state.commit()
        if hvd.elastic.generation() == 0 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()

    body(hvd.elastic.ObjectState(step=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
