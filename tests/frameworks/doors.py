"""Tests of the frameworks' adapters on ranks, once through each door of :mod:`pyhvd.frameworks`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.mpi.harness import on_ranks

NATIVE, CALLBACK = "native", "callback"
KNOBS = {NATIVE: "auto", CALLBACK: "callback"}
"""The doors, by their values of ``PYHVD_GRAPH_OPS``."""
ONE_CORE = "TEST_ONE_CORE"
"""A variable of ranks that call :func:`use_one_core`; they have a job of their own."""
VARIABLES = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
"""For all ranks that import a framework."""


def on_doors(
    *doors: str, timeout: float = 200.0, sizes: tuple[int, ...] = (2,), **env: str
) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Run the decorated module-level test on ranks whose graphs submit collectives through each door.

    Parameters
    ----------
    doors : str
        NATIVE, CALLBACK, or both, which is the default.
    timeout : float
        Seconds, with the import of the framework if it is the first test.
    sizes : tuple of int
        Numbers of ranks.
    **env : str
        Environment variables of the ranks.
    """
    chosen = doors or (NATIVE, CALLBACK)

    def decorate(function: Callable[[], None]) -> Callable[..., None]:
        by_door: dict[str, Any] = {
            door: on_ranks(
                *sizes, timeout=timeout, env={"PYHVD_GRAPH_OPS": KNOBS[door], **_OF_ALL, **env}, warm=True
            )(function)
            for door in chosen
        }

        def test(door: str, nranks: int, shared_jobs: Any) -> None:
            by_door[door](nranks=nranks, shared_jobs=shared_jobs)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(function, name))
        test.rank_function = function  # type: ignore[attr-defined]
        test.pytestmark = [  # type: ignore[attr-defined]
            pytest.mark.timeout(timeout + 60),
            pytest.mark.parametrize("door", chosen),
            pytest.mark.parametrize("nranks", sizes, ids=[f"n{size}" for size in sizes]),
        ]
        return test

    return decorate


_OF_ALL = {**VARIABLES, "KERAS_BACKEND": "tensorflow", "PYHVD_DYNAMIC_PROCESS_SETS": "1"}


def use_one_core() -> None:
    """Run on one core, as under ``taskset -c 0``: call it before the framework makes its threads."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
