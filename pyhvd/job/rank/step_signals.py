"""SIGTERM from Slurm to a rank of an elastic job: the rank goes on, as its agent decides what follows.

Before the end of a job, and for ``sbatch --signal=TERM@90``, Slurm sends SIGTERM to every process of a job
step. To the agent it is a notice (:mod:`pyhvd.job.agent.notice`): the ranks shall commit and leave. Without
this module they would be killed first.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

from pyhvd.job.mpi.rank_env import read_generation


def leave_sigterm_to_agent(environ: Mapping[str, str]) -> None:
    """Let SIGTERM end this rank only if the launcher has sent it, in an elastic job; call it inside Slurm.

    A handler of the program replaces this one. Processes that the rank starts end at SIGTERM as ever.
    """
    if read_generation(environ) is None:
        return
    from pyhvd.job.commits.vault import DESCRIPTORS, Vault  # in these jobs alone: it imports numpy

    if threading.current_thread() is not threading.main_thread():
        return
    vault, rank = Vault([int(environ[name]) for name in DESCRIPTORS]), os.getpid()

    def hear(number: int, _: object) -> None:
        if os.getpid() != rank or vault.ending:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, hear)
