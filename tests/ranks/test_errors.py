"""Test mismatches, refused calls and joined ranks on ranks that are threads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.testing import run_ranks
from tests.conformance import disagreements, joining, refusals
from tests.conformance.cases import SECONDS, Case, Cases, each, on_threads


@each(disagreements.CASES)
def test_disagreement(case: Case, size: int) -> None:
    on_threads(case, size)


@each(refusals.CASES)
def test_refusal(case: Case, size: int) -> None:
    on_threads(case, size)


@each(joining.CASES)
def test_join(case: Case, size: int) -> None:
    on_threads(case, size)


@each(Cases([*disagreements.CASES, *refusals.CASES]), 3)
def test_without_cache_and_fusion(case: Case, size: int) -> None:
    on_threads(case, size, cache_capacity=0, fusion_threshold=0)


def raise_exception(handle: hvd.Handle) -> None:
    error = handle.exception()
    assert error is not None
    raise error


@pytest.mark.parametrize("raise_it", [lambda handle: handle.result(), raise_exception])
def test_a_raised_error_keeps_no_array_alive(raise_it: Callable[[hvd.Handle], Any]) -> None:
    """The error's traceback refers to a frame that has the handle, into which no garbage collector looks."""
    kept: list[weakref.ref[Any]] = []

    def fail() -> None:
        array = np.ones(2 + hvd.rank())
        kept.append(weakref.ref(array))
        handle = hvd.allreduce_async(array, name="a")
        with pytest.raises(hvd.MismatchError):
            raise_it(handle)

    def rank() -> None:
        for _ in range(3):
            hvd.allreduce(np.ones(2), name="a")  # a cached response: the handle is of the fast lane
        fail()

    run_ranks(2, rank, timeout=SECONDS)
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
