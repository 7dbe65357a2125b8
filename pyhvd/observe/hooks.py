"""Hooks: what happens in the engine, told to whoever has asked for it.

Owns: the list of hooks, and that one of them that raises is taken out instead of breaking a collective. Where
nobody listens, a hook costs one look at an empty tuple. The timeline plugs in here; so may others.

What the fast lane does is told by no hook, since it runs without Python: it is recorded in a ring
(:class:`pyhvd.native.shared_memory.Trace`), which an instrument reads in :meth:`Instrument.look`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from pyhvd.negotiation.messages import Request, Response
from pyhvd.queue import TensorEntry

_log = logging.getLogger("pyhvd")


def read_clock() -> int:
    """Return the time in ns, of the clock that the C code reads as well: CLOCK_MONOTONIC."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Instrument:
    """Base of what plugs in: every hook does nothing.

    But for :meth:`queued`, which comes from any thread, all hooks come from the background thread. A hook is
    short and never waits for another rank.
    """

    def queued(self, entries: Sequence[TensorEntry]) -> None:
        """A thread is about to submit tensors as one unit, past the fast lane."""

    def requested(self, rank: int, tensors: Sequence[tuple[int, Request]]) -> None:
        """On rank 0: another rank's, or this one's, requests have come in, as (process set id, request)."""

    def list_taken(self, number: int, todo: Sequence[Response]) -> None:
        """A response list is about to be carried out here; ``todo`` is what it means for this rank."""

    def batch_started(self, batch: Sequence[Response]) -> None:
        """Responses that ride together are about to be carried out."""

    def batch_ended(self, batch: Sequence[Response]) -> None:
        """... and have been. Their handles may have completed a little earlier."""

    def phase(self, name: str, begin: int, end: int) -> None:
        """A part of a batch, in ns of :func:`read_clock`; names are Horovod's activities."""

    def look(self, now: float) -> float | None:  # noqa: ARG002 - for those who override it
        """Do what is due (monotonic s); return when to be called again at the latest, None for no need."""
        return None


class Instruments:
    """The hooks of one rank. Any thread may add and remove; ``active`` is replaced, never changed."""

    def __init__(self) -> None:
        self.active: tuple[Instrument, ...] = ()
        self._lock = threading.Lock()

    def add(self, instrument: Instrument) -> None:
        """Let an instrument hear from now on."""
        with self._lock:
            self.active = (*self.active, instrument)

    def remove(self, instrument: Instrument) -> None:
        """Tell it nothing any longer."""
        with self._lock:
            self.active = tuple(each for each in self.active if each is not instrument)

    def queued(self, entries: Sequence[TensorEntry]) -> None:
        """See :meth:`Instrument.queued`."""
        for each in self.active:
            try:
                each.queued(entries)
            except Exception as exc:
                self._drop(each, exc)

    def requested(self, rank: int, tensors: Sequence[tuple[int, Request]]) -> None:
        """See :meth:`Instrument.requested`."""
        for each in self.active:
            try:
                each.requested(rank, tensors)
            except Exception as exc:
                self._drop(each, exc)

    def list_taken(self, number: int, todo: Sequence[Response]) -> None:
        """See :meth:`Instrument.list_taken`."""
        for each in self.active:
            try:
                each.list_taken(number, todo)
            except Exception as exc:
                self._drop(each, exc)

    def batch_started(self, batch: Sequence[Response]) -> None:
        """See :meth:`Instrument.batch_started`."""
        for each in self.active:
            try:
                each.batch_started(batch)
            except Exception as exc:
                self._drop(each, exc)

    def batch_ended(self, batch: Sequence[Response]) -> None:
        """See :meth:`Instrument.batch_ended`."""
        for each in self.active:
            try:
                each.batch_ended(batch)
            except Exception as exc:
                self._drop(each, exc)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager around a part of a batch."""
        return _Phase(self, name) if self.active else _NOBODY

    def tell_phase(self, name: str, begin: int, end: int) -> None:
        """See :meth:`Instrument.phase`."""
        for each in self.active:
            try:
                each.phase(name, begin, end)
            except Exception as exc:
                self._drop(each, exc)

    def look(self, now: float) -> float | None:
        """See :meth:`Instrument.look`; returns the earliest time."""
        earliest: float | None = None
        for each in self.active:
            try:
                due = each.look(now)
            except Exception as exc:
                self._drop(each, exc)
                continue
            if due is not None and (earliest is None or due < earliest):
                earliest = due
        return earliest

    def _drop(self, instrument: Instrument, exc: Exception) -> None:
        """An instrument must not break what it watches."""
        self.remove(instrument)
        _log.error("%s is switched off, as it raised: %r", type(instrument).__name__, exc, exc_info=exc)


_NOBODY: AbstractContextManager[None] = nullcontext()


class _Phase:
    """Times one phase."""

    __slots__ = ("_begin", "_instruments", "_name")

    def __init__(self, instruments: Instruments, name: str) -> None:
        self._instruments = instruments
        self._name = name
        self._begin = 0

    def __enter__(self) -> None:
        self._begin = read_clock()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._instruments.tell_phase(self._name, self._begin, read_clock())
