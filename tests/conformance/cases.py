"""Conformance cases, which are functions that every rank of an initialised world calls, and their runners.

Each case runs over every fabric: on ranks that are threads (:func:`on_threads`), and under mpiexec
(:func:`run`). After each case, one more collective must work, even if the case provoked errors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine.context import current_holder, playing_rank
from pyhvd.testing import run_ranks

ALL = (1, 2, 3, 4)
SEVERAL = (2, 3, 4)
SECONDS = 30.0
"""Limit of every wait in a case, so that a hang is a failure that names its line."""


@dataclass(frozen=True)
class Case:
    """One case, and its numbers of ranks."""

    name: str
    body: Callable[[], None]
    sizes: tuple[int, ...]

    def __call__(self) -> None:
        """Run the case on this rank, then check that one more collective works."""
        self.body()
        total = hvd.allreduce(np.arange(3), op=hvd.Sum, name=f"after {self.name}")
        assert total.tolist() == [0, hvd.size(), 2 * hvd.size()], f"the collective after {self.name}"


class Cases(list[Case]):
    """The cases of one subject."""

    def add(self, *sizes: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Decorate a case; without arguments it runs on all rank counts."""

        def decorate(body: Callable[[], None]) -> Callable[[], None]:
            self.append(Case(body.__name__, body, sizes or ALL))
            return body

        return decorate

    def add_each(
        self, names: Iterable[str], *sizes: int
    ) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
        """Decorate a case of one parameter; each value makes one case."""

        def decorate(body: Callable[[str], None]) -> Callable[[str], None]:
            for name in names:
                self.append(
                    Case(f"{body.__name__}-{name}", lambda name=name: body(name), sizes or ALL)  # type: ignore[misc]
                )
            return body

        return decorate


def each(cases: Iterable[Case], *sizes: int, count: str = "size") -> pytest.MarkDecorator:
    """Parametrise a test over cases and rank counts; the parameters are named ``case`` and `count`."""
    chosen = [(case, n) for case in cases for n in (sizes or ALL) if n in case.sizes]
    ids = [f"{case.name}-{n}" for case, n in chosen]
    return pytest.mark.parametrize(("case", count), chosen, ids=ids)


def on_threads(
    case: Callable[[], Any], size: int, hosts: Sequence[int] | None = None, **knobs: Any
) -> list[Any]:
    """Run a case on ranks that are threads, of several hosts if given; return the ranks' results."""
    return run_ranks(size, case, timeout=SECONDS, knobs=knobs or None, hosts=hosts)


def run(case: Case) -> None:
    """Start pyhvd on a rank under mpiexec, and run a case."""
    run_all([case])


def run_all(cases: Sequence[Case]) -> None:
    """Start pyhvd on a rank under mpiexec, and run cases in turn; the error of one names it."""
    hvd.init()
    for case in cases:
        try:
            case()
        except BaseException as exc:
            exc.add_note(f"in case {case.name}")
            raise


def last() -> int:
    """Return the last rank, which behaves differently from the others in many cases."""
    return hvd.size() - 1


def is_last() -> bool:
    """Return whether this rank is the last one."""
    return hvd.rank() == last()


def raised(handle: hvd.Handle) -> BaseException | None:
    """Wait for a handle, in bounded time, and return its error or None."""
    return handle.exception(SECONDS)


def outcome(call: Callable[[], Any]) -> BaseException | None:
    """Call, wait for the handle if the call returns one, and return the error of either or None."""
    try:
        got = call()
        if isinstance(got, hvd.Handle):
            got.result(SECONDS)
    except Exception as exc:
        return exc
    return None


class Spawned:
    """A further thread of the same rank; :meth:`join` raises its error."""

    def __init__(self, body: Callable[[], None]) -> None:
        slot = current_holder()
        self._error: BaseException | None = None

        def run() -> None:
            with playing_rank(slot):
                try:
                    body()
                except BaseException as exc:
                    self._error = exc

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread ends, and raise its error."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "a thread of this rank has not ended"
        if self._error is not None:
            raise self._error
