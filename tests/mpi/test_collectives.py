"""Every verb, dtype and array kind under mpiexec."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance import kinds_of_arrays, movements, reductions
from tests.conformance.cases import Case, each, run
from tests.conformance.oracle import exchanged, inputs, reduced, same
from tests.mpi.harness import on_ranks

CASES = [*reductions.CASES, *movements.CASES, *kinds_of_arrays.CASES]


@each(CASES, 1, 2, 3, 4, count="nranks")
@on_ranks(warm=True)
def test_case(case: Case) -> None:
    run(case)


CROSSING = (
    *("every_dtype_and_op-allreduce_async", "every_dtype_and_op-grouped_allreduce_async_"),
    *("every_dtype_scattered-grouped_reducescatter_async", "every_dtype_gathered-allgather_async"),
    *("every_dtype_gathered-grouped_allgather_async", "every_dtype_broadcast-broadcast_async_"),
    *("every_dtype_in_an_alltoall-uneven", "every_dtype_in_an_alltoall-from one"),
    *("layouts-column", "layouts-transposed"),
)


@pytest.mark.parametrize("name", CROSSING)
@on_ranks(3, env={"PYHVD_STAGING_SIZE": "24"})
def test_small_windows_and_small_messages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All paths work with windows of a few elements, and with at most 8 bytes per MPI message."""
    from pyhvd.backends import host
    from pyhvd.transport.mpi import fabric

    monkeypatch.setattr(host, "FLAT", 0)
    monkeypatch.setattr(fabric, "LARGEST", 8)
    (case,) = [case for case in CASES if case.name == name]
    run(case)


@on_ranks(3, env={"PYHVD_STAGING_SIZE": "24"})
def test_messages_of_a_thousand_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyhvd.backends import host
    from pyhvd.transport.mpi import fabric

    monkeypatch.setattr(host, "FLAT", 0)
    monkeypatch.setattr(fabric, "LARGEST", 1000)
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    parts = inputs("float64", (1201,), size)
    same(
        hvd.allgather(parts[rank][: 400 * rank + 1]),
        np.concatenate([p[: 400 * r + 1] for r, p in enumerate(parts)]),
    )
    same(hvd.broadcast(parts[rank], 2), parts[2])
    splits = [[(400 * (r + k)) % 1200 // 3 for k in range(size)] for r in range(size)]
    same(hvd.alltoall(parts[rank], splits[rank])[0], exchanged(parts, splits, rank))
    same(hvd.allreduce(parts[rank], op=hvd.Sum), reduced(hvd.Sum, parts))


@on_ranks(2)
def test_average_is_deprecated() -> None:
    hvd.init()
    for average, want in ((True, 1.5), (False, 3.0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = hvd.allreduce(np.array([1.0 + hvd.rank()]), average=average)
        assert got.tolist() == [want]
        assert [each.category for each in caught] == [DeprecationWarning]
        assert caught[0].filename == __file__
