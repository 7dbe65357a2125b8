"""A living rank: it makes one call after the other, until its agent sends an empty one.

State that a call leaves, such as modules, variables and MPI's world, is there for the next call. The first
call that fails ends the rank, and with it the job, as other ranks may wait for it in a collective.

Each answer has the bytes of :mod:`pyhvd.job.rank.pickles`. At the end the rank sends an empty result.
"""

from __future__ import annotations

import importlib
import os
import socket

from pyhvd.job.process.rank_line import ANSWER, RESULT, read_code, tell
from pyhvd.job.rank.pickles import dump
from pyhvd.job.rank.rank import fail, prepare

NEEDED = (
    "numpy",
    "pyhvd.api.collectives",
    "pyhvd.api.lifecycle",
    "pyhvd.api.objects",
    "pyhvd.engine.runtime",
    "pyhvd.transport.links",
)
"""Modules that every rank imports, except MPI's."""


def run_rank(control: socket.socket) -> int:
    """Make calls and send their results; return the exit code 0. After a failure, report it and exit.

    A child that a function forks ends as Python ends it: it sends nothing.
    """
    rank_env, pid = prepare(control), os.getpid()
    import cloudpickle

    while code := read_code(control):
        try:
            function, args, kwargs = cloudpickle.loads(code)
            pieces = dump(function(*args, **kwargs))
        except BaseException as exc:
            if os.getpid() != pid:
                raise
            fail(control, exc, rank_env.rank, pickles=True)
        if os.getpid() != pid:
            return 0
        tell(control.fileno(), ANSWER, sum(map(len, pieces)), *pieces)
        del function, args, kwargs, pieces  # they may be large, and the next call may come late
    tell(control.fileno(), RESULT, 0)
    return 0


def load_modules() -> None:
    """Do what takes a rank's first ``init()`` most of its time: its imports, and MPI_Init."""
    for name in (*NEEDED, "mpi4py.MPI"):
        importlib.import_module(name)
