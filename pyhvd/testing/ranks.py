"""Ranks as threads of one process, for tests of programs that use pyhvd.

Every rank runs the real engine; only the transports differ from a job under mpiexec. A hang ends within the
timeout, with the stacks of all ranks.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pyhvd.api import lifecycle
from pyhvd.engine.context import ContextHolder, playing_rank
from pyhvd.errors import RankFailedError, ShutDownError, TransportError
from pyhvd.transport.inprocess import ThreadWorlds

T = TypeVar("T")
_SECONDARY = (RankFailedError, ShutDownError, TransportError)


class RanksFailed(AssertionError):
    """A rank raised, or exceeded the timeout; ``errors`` holds the exceptions by rank."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


def run_ranks(
    size: int,
    function: Callable[..., T],
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    knobs: dict[str, Any] | None = None,
    hosts: Sequence[int] | None = None,
) -> list[T]:
    """Run a function on ``size`` ranks that are threads of this process.

    Parameters
    ----------
    size : int
        Number of ranks.
    function : callable
        Called as ``function(*args)`` on each rank; pyhvd's functions act for that rank there. A thread that
        the function starts itself is not a rank.
    *args
        Arguments; every rank gets the same objects.
    timeout : float
        Time limit (s) of all ranks.
    init : bool
        Whether to call ``init()`` before, and ``shutdown()`` after, on each rank.
    knobs : dict, optional
        Fields of :class:`pyhvd.Config`; they override the environment.
    hosts : sequence of int, optional
        By rank, the number of its simulated host: ranks of several hosts share no memory. By default all
        ranks are on one host.

    Returns
    -------
    list
        The results, in rank order.

    Raises
    ------
    RanksFailed
        A rank raised: ``__cause__`` is the first error that does not follow from another rank's. Or the ranks
        hang: the text has all ranks' stacks.

    Examples
    --------
    >>> import numpy as np, pyhvd as hvd
    >>> from pyhvd.testing import run_ranks
    >>> [float(x) for x in run_ranks(3, lambda: hvd.allreduce(np.float32(hvd.rank()), op=hvd.Sum))]
    [3.0, 3.0, 3.0]
    """
    return _Crew(ThreadWorlds(size, timeout, hosts), dict(knobs or {}), init).run(function, args)


@dataclass
class _Crew:
    """The shared state of one :func:`run_ranks`."""

    worlds: ThreadWorlds
    knobs: dict[str, Any]
    init: bool
    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Start the ranks, wait for them, and return their results or raise the first error."""
        threads = [
            threading.Thread(target=self.play, args=(r, function, args), name=f"rank-{r}", daemon=True)
            for r in range(self.worlds.size)
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + self.worlds.timeout
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        if hung := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
            text = f"ranks {hung} have not ended within {self.worlds.timeout:g} s\n{_stacks()}"
            self.worlds.abort()
            raise RanksFailed(text, self.errors)
        if self.errors:
            # An error that follows from another rank's comes after the errors that do not.
            rank = min(self.errors, key=lambda rank: (isinstance(self.errors[rank], _SECONDARY), rank))
            error = self.errors[rank]
            text = f"rank {rank} of {self.worlds.size} raised {type(error).__name__}: {error}"
            raise RanksFailed(text, self.errors) from error
        return [self.results[rank] for rank in range(self.worlds.size)]

    def play(self, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Run one rank."""
        holder = ContextHolder()
        holder.make_world = lambda: self.worlds.world(rank)
        holder.overrides = self.knobs
        cause: BaseException | None = None
        with playing_rank(holder):
            try:
                if self.init:
                    lifecycle.init()
                self.results[rank] = function(*args)
            except BaseException as exc:
                self.errors[rank] = cause = exc
            finally:
                if holder.context is not None:
                    lifecycle.leave(holder, cause)
                elif cause is not None:
                    self.worlds.abort()


def _stacks() -> str:
    """Return the Python stacks of all threads of the process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = "".join(traceback.format_stack(frame))
        parts.append(f"--- thread {names.get(ident, ident)} ---\n{lines}")
    return "\n".join(parts)
