"""``run``: calls a training function with a state that survives the loss of ranks and hosts."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from pyhvd.api.topology import rank
from pyhvd.elastic import exchange
from pyhvd.elastic.session import RankSession, current
from pyhvd.elastic.state import State
from pyhvd.errors import (
    CorruptionError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InternalError,
    MismatchError,
    ShutDownError,
    StallError,
)
from pyhvd.job.errors import MadeRoom

_log = logging.getLogger("pyhvd")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

# This rank's own errors, and a stall, of which no agent knows: they end the rank at once.
_ENDS_AT_ONCE = (MismatchError, CorruptionError, InternalError, ValueError, StallError)
# The time in which the agent of a rank that has lost others must have killed it.
_LAST_WAIT_S = 10.0
# The same for a rank that has lost one which has ended: perhaps to make room for the next generation.
_RETURNED_WAIT_S = 1.0
_TOGETHER = "all ranks must return from the program together, after equally many steps"


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a function go on from the last commit after ranks were started again.

    After a failure, and after a change of hosts, an elastic job starts all its ranks again, as new processes.
    They run the program from its beginning. When it calls the function, the state, its first argument, is
    brought to the last commit. Before the first commit, and in a job that is not elastic, all ranks get the
    state of rank 0.

    Parameters
    ----------
    func : callable
        Takes a :class:`State` first. In an elastic job all calls must be given the same state.

    Examples
    --------
    >>> @hvd.elastic.run  # doctest: +SKIP
    ... def train(state, batches):
    ...     while state.batch < len(batches):
    ...         step(state, batches[state.batch])
    ...         state.batch += 1
    ...         state.commit()
    """

    @functools.wraps(func)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        session = current()
        try:
            state.begin()
            result = func(state, *args, **kwargs)
            if session is not None:
                session.check_interrupt()
            return result
        except HostsUpdatedInterrupt:
            if session is None:
                raise
            _make_room(session)
        except HorovodInternalError as exc:
            if session is not None and not isinstance(exc, _ENDS_AT_ONCE):
                _flush()
                state.on_failure()
                _flush()
                returned = isinstance(exc, ShutDownError) and exc.rank not in (-1, rank())
                time.sleep(_RETURNED_WAIT_S if returned else _LAST_WAIT_S)
                if returned:
                    exc.args = (f"{exc}, while this rank went on: {_TOGETHER}",)
            raise

    return wrapper


def _make_room(session: RankSession) -> NoReturn:
    """End this rank, whose state is committed, for the next generation or a later run of the job."""
    if session.stores and rank() == 0 and (why := exchange.store_before_suspension(session)):
        _log.warning("the last commit is not stored: %s", why)
    session.vault.left = session.generation + 1
    raise MadeRoom(0)


def _flush() -> None:
    """Write out what was printed: a rank that is killed loses the rest."""
    sys.stdout.flush()
    sys.stderr.flush()
