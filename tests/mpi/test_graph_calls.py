"""Collectives of compiled graphs, without a framework: calls, names, errors and the callback door."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.frameworks.callback import run_now
from pyhvd.frameworks.calls import TABLE, GraphCall
from pyhvd.frameworks.failures import cause_of
from pyhvd.frameworks.names import default_name
from pyhvd.testing import run_ranks
from tests.mpi.harness import on_ranks

pytestmark = pytest.mark.any_mpi

FLOAT = np.dtype(np.float32)


def add(verb: str, name: str, *dtypes: Any, **terms: Any) -> int:
    return TABLE.add(GraphCall.traced(verb, name, dtypes, **terms))


@on_ranks(1, 2)
def test_each_verb_runs_with_the_terms_of_its_key() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    mine = np.full((2 * size, 1), rank, np.float32)
    halves = add("allreduce", "halves", FLOAT, op=hvd.Sum, prescale_factor=0.5)
    both = add("grouped_allreduce", "both", FLOAT, np.dtype(np.int64), op=hvd.Max)
    for _ in range(3):
        (reduced,) = run_now(halves, mine)
        assert (reduced == sum(range(size)) / 2).all()
        assert (mine == rank).all()
        one, two = run_now(both, mine, np.array([rank]))
        assert (one == size - 1).all()
        assert two.tolist() == [size - 1]
        assert two.dtype == np.int64
    (gathered,) = run_now(add("allgather", "gathered", FLOAT), mine)
    assert gathered.ravel().tolist() == [float(r) for r in range(size) for _ in range(2 * size)]
    (sent,) = run_now(add("broadcast", "sent", FLOAT, root_rank=size - 1), mine)
    assert (sent == size - 1).all()
    splits = np.full(size, 2)
    turned = add("alltoall", "swapped", FLOAT, splits.dtype, has_splits=True)
    swapped, received = run_now(turned, mine, splits)
    assert swapped.ravel().tolist() == [float(r) for r in range(size) for _ in range(2)]
    assert received.tolist() == [2] * size
    (part,) = run_now(add("reducescatter", "part", FLOAT, op=hvd.Sum), mine)
    assert part.shape == (2, 1)


@on_ranks(2)
def test_an_error_keeps_its_exception_and_names_the_call_site() -> None:
    hvd.init()
    key = add("allreduce", "different", FLOAT)
    with pytest.raises(hvd.HorovodInternalError, match="different") as caught:
        run_now(key, np.ones(2 + hvd.rank(), np.float32))
    assert re.search(r"test_graph_calls\.py:\d+ in add\)$", str(caught.value))
    assert isinstance(caught.value.__cause__, hvd.MismatchError)
    carried = cause_of(RuntimeError(f"INTERNAL: {caught.value}"))
    assert isinstance(carried, hvd.MismatchError)
    assert cause_of(RuntimeError("another error")) is None


@on_ranks(1)
def test_a_call_that_was_traced_before_shutdown_is_refused() -> None:
    hvd.init()
    key = add("allreduce", "old", FLOAT)
    run_now(key, np.ones(2, np.float32))
    hvd.shutdown()
    hvd.init()
    with pytest.raises(hvd.HorovodInternalError, match="traced before pyhvd was shut down"):
        run_now(key, np.ones(2, np.float32))


@on_ranks(1)
def test_default_names_count_by_stem_since_init() -> None:
    hvd.init()
    assert [default_name("a"), default_name("b"), default_name("a")] == ["a.0", "b.0", "a.1"]
    hvd.shutdown()
    hvd.init()
    assert default_name("a") == "a.0"


def test_ranks_that_are_threads_have_no_graphs() -> None:
    def body() -> None:
        with pytest.raises(hvd.NotInitializedError, match="as processes"):
            add("allreduce", "x", FLOAT)

    run_ranks(1, body)
