"""Forking a process whose graphs have run collectives."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable

import numpy as np

_PATIENCE_S = 60.0


def _do_nothing() -> None:
    pass


def _multiply() -> None:
    assert (np.ones((100, 100)) @ np.ones((100, 100)) == 100).all()


def fork_and_go_on(step: Callable[[], None]) -> None:
    """Make steps between children that are forked, and end; one of them uses numpy."""
    forking = multiprocessing.get_context("fork")
    for work in (_do_nothing, _multiply):
        step()
        child = forking.Process(target=work)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of its threads
            child.start()
        step()  # while the child runs
        child.join(_PATIENCE_S)
        assert child.exitcode == 0
        step()
