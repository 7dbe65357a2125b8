"""A living rank: it makes one call after the other, until its agent sends an empty one.

State that a call leaves, such as modules, variables and MPI's world, is there for the next call. The first
call that fails ends the rank, and with it the job, as other ranks may wait for it in a collective.

Each answer has the bytes of :mod:`pyhvd.job.rank.pickles`. At the end the rank sends an empty result.
"""

from __future__ import annotations

import base64
import importlib
import os
import socket
from typing import Any

from pyhvd.job.process.rank_line import ANSWER, LOGGED, RESULT, read_code, tell
from pyhvd.job.rank.pickles import dump
from pyhvd.job.rank.rank import fail, prepare
from pyhvd.transport.tcp.session import MAX_RECORD

NEEDED = (
    "numpy",
    "pyhvd.api.collectives",
    "pyhvd.api.lifecycle",
    "pyhvd.api.objects",
    "pyhvd.engine.runtime",
    "pyhvd.transport.links",
)
"""Modules that every rank imports, except MPI's."""
# A value travels in one message.
_MOST_LOGGED = MAX_RECORD // 2
_control: socket.socket | None = None


def run_rank(control: socket.socket) -> int:
    """Make calls and send their results; return the exit code 0. After a failure, report it and exit.

    A child that a function forks ends as Python ends it: it sends nothing.
    """
    global _control
    _control = control
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


def log(value: Any) -> None:
    """Hand a value to the driver during a call; do nothing outside of living ranks.

    Raises
    ------
    ValueError
        The value's pickle is too large for a message.
    """
    import cloudpickle

    if _control is None:
        return
    data = cloudpickle.dumps(value)
    if len(data) > _MOST_LOGGED:
        raise ValueError(f"a value of {len(data)} bytes: at most {_MOST_LOGGED} can be logged")
    tell(_control.fileno(), LOGGED, base64.b64encode(data).decode())
