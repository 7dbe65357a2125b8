"""Tests of the frameworks' adapters on two ranks, once through each door of :mod:`pyhvd.frameworks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.mpi.harness import on_ranks

NATIVE, CALLBACK = "native", "callback"
KNOBS = {NATIVE: "auto", CALLBACK: "callback"}
"""The doors, by their values of ``PYHVD_GRAPH_OPS``."""
VARIABLES = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
"""For all ranks that import a framework."""


def on_doors(
    *doors: str, timeout: float = 200.0, **env: str
) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Run the decorated module-level test on two ranks, whose graphs submit collectives through each door.

    Parameters
    ----------
    doors : str
        NATIVE, CALLBACK, or both, which is the default.
    timeout : float
        Seconds, with the import of the framework if it is the first test.
    **env : str
        Environment variables of the ranks.
    """
    chosen = doors or (NATIVE, CALLBACK)

    def decorate(function: Callable[[], None]) -> Callable[..., None]:
        by_door: dict[str, Any] = {
            door: on_ranks(
                2, timeout=timeout, env={"PYHVD_GRAPH_OPS": KNOBS[door], **_OF_ALL, **env}, warm=True
            )(function)
            for door in chosen
        }

        def test(door: str, shared_jobs: Any) -> None:
            by_door[door](nranks=2, shared_jobs=shared_jobs)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(function, name))
        test.rank_function = function  # type: ignore[attr-defined]
        test.pytestmark = [pytest.mark.timeout(timeout + 60), pytest.mark.parametrize("door", chosen)]  # type: ignore[attr-defined]
        return test

    return decorate


_OF_ALL = {**VARIABLES, "KERAS_BACKEND": "tensorflow", "PYHVD_DYNAMIC_PROCESS_SETS": "1"}
