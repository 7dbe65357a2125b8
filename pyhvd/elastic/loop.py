"""``run``: calls a training function with a state that survives the loss of ranks and hosts."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from pyhvd.elastic.session import Session, current
from pyhvd.elastic.state import State
from pyhvd.errors import (
    CorruptionError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InternalError,
    MismatchError,
)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

# Errors of this rank's own, which would come again.
_OWN = (MismatchError, CorruptionError, InternalError)
# A rank that has lost others waits so long to be killed by its agent, and else fails itself.
_LAST_WAIT_S = 2.0


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a function go on from the last commit after ranks were started again.

    In an elastic job every rank and every change of hosts starts all ranks again, as new processes: they run
    the program from its beginning, and the state, the first argument, comes back. In any other job the function
    is called once, after the state of rank 0 was given to all ranks.

    Parameters
    ----------
    func : callable
        Takes a :class:`State` first.

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
            return func(state, *args, **kwargs)
        except HostsUpdatedInterrupt:
            if session is None:
                raise
            _make_room(state, session)
        except HorovodInternalError as exc:
            if session is not None and not isinstance(exc, _OWN):
                _wait_for_the_end()
            raise

    return wrapper


def _make_room(state: State, session: Session) -> None:
    """Commit, and end this rank: its agent starts the next generation."""
    state.seal()
    session.vault.left = True
    raise SystemExit(0)


def _wait_for_the_end() -> None:
    """Write out what was printed, and wait: the agent kills this rank, and starts it again."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_LAST_WAIT_S)
