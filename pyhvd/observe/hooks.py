"""Hooks: calls by which the engine tells instruments what it does.

Owns the list of instruments of one rank, and removes an instrument that raises: no instrument breaks a
collective. With no instrument a hook costs one test of an empty tuple, and a phase a ``nullcontext``. The
timeline is an instrument.

No hook tells of the fast lane, because the fast lane runs without Python. It writes records to a ring
(:class:`pyhvd.native.shared_memory.Trace`), which an instrument reads in :meth:`Instrument.look`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from pyhvd.backends.base import Phases
from pyhvd.negotiation.messages import Request, Response
from pyhvd.queue import TensorEntry

_log = logging.getLogger("pyhvd")
_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def read_clock() -> int:
    """Return CLOCK_MONOTONIC in ns; the C code reads the same clock."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Instrument:
    """Base class of instruments; each hook does nothing.

    The background thread calls all hooks except :meth:`queued`, which any thread calls. A hook is short and
    never waits for another rank.
    """

    def queued(self, entries: Sequence[TensorEntry]) -> None:
        """Note that a thread is about to submit tensors of one call, outside the fast lane."""

    def requested(self, rank: int, tensors: Sequence[tuple[int, Request]]) -> None:
        """Note on rank 0 that requests of a rank arrived, as (process set id, request)."""

    def list_taken(self, number: int, todo: Sequence[Response]) -> None:
        """Note that this rank starts a response list; ``todo`` holds the responses that concern it."""

    def batch_started(self, batch: Sequence[Response]) -> None:
        """Note that a batch of fused responses starts."""

    def batch_ended(self, batch: Sequence[Response]) -> None:
        """Note that a batch ended; its handles may have completed a little earlier."""

    def phase(self, name: str, begin: int, end: int) -> None:
        """Note a part of a batch, in ns of :func:`read_clock`; names are Horovod's activities."""

    def look(self, now: float) -> float | None:  # noqa: ARG002 - for those who override it
        """Do what is due at ``now`` (monotonic s); return the time of the next call, None for no need."""
        return None


def _dispatch(
    hook: Callable[Concatenate[Instrument, _Arguments], _Answer],
) -> Callable[Concatenate[Instruments, _Arguments], list[_Answer]]:
    """Return a method that calls a hook of every instrument and returns the answers."""
    name = hook.__name__

    def tell(self: Instruments, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> list[_Answer]:
        answers = []
        for each in self.active:
            try:
                answers.append(getattr(each, name)(*arguments, **named))
            except Exception as exc:
                self.remove(each)
                _log.error("%s is switched off because it raised %r", type(each).__name__, exc, exc_info=exc)
        return answers

    tell.__doc__ = f"See :meth:`Instrument.{name}`."
    return tell


class Instruments(Phases):
    """The instruments of one rank.

    Any thread may add and remove. ``active`` is replaced, never changed, so that readers need no lock.
    ``phase(name)`` returns a context manager that tells the instruments of a part of a batch.
    """

    def __init__(self) -> None:
        self.active: tuple[Instrument, ...] = ()
        self._lock = threading.Lock()

    def add(self, instrument: Instrument) -> None:
        """Call an instrument's hooks from now on."""
        with self._lock:
            self._set((*self.active, instrument))

    def remove(self, instrument: Instrument) -> None:
        """Call an instrument's hooks no longer."""
        with self._lock:
            self._set(tuple(each for each in self.active if each is not instrument))

    def _set(self, active: tuple[Instrument, ...]) -> None:
        self.active = active
        self.phase = partial(_time_phase, self) if active else nullcontext

    queued = _dispatch(Instrument.queued)
    requested = _dispatch(Instrument.requested)
    list_taken = _dispatch(Instrument.list_taken)
    batch_started = _dispatch(Instrument.batch_started)
    batch_ended = _dispatch(Instrument.batch_ended)
    tell_phase = _dispatch(Instrument.phase)
    _look = _dispatch(Instrument.look)

    def look(self, now: float) -> float | None:
        """See :meth:`Instrument.look`; return the earliest time."""
        return min((due for due in self._look(now) if due is not None), default=None)


@contextmanager
def _time_phase(instruments: Instruments, name: str) -> Iterator[None]:
    """Tell the instruments when a phase began and ended, even if the phase raises."""
    begin = read_clock()
    try:
        yield
    finally:
        instruments.tell_phase(name, begin, read_clock())
