"""PYHVD_CHECK in real jobs: every verb passes it, and a wrong result is the same error on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.backends.host import HostBackend
from tests.mpi.harness import on_ranks

pytestmark = pytest.mark.any_mpi

CHECKED = {"PYHVD_CHECK": "results,finite"}


@on_ranks(1, 2, 3, env=CHECKED)
def test_every_verb_passes() -> None:
    hvd.init()
    for _ in range(3):
        total = hvd.allreduce(np.full(70_000, hvd.rank(), np.float32), name="a", op=hvd.Sum)
        assert total[0] == sum(range(hvd.size()))
        hvd.allreduce(np.ones(5, np.int32), name="b", op=hvd.Min)
        hvd.reducescatter(np.arange(70_001.0), name="c", op=hvd.Sum)
        hvd.allgather(np.ones((hvd.rank(), 2)), name="d")
        hvd.broadcast(np.full(9, hvd.rank()), 0, name="e")
        hvd.alltoall(np.arange(hvd.size() * 2), name="f")


@on_ranks(2, 3, env={"PYHVD_CHECK": "1"})
@pytest.mark.parametrize("fast_lane", ["0", "1"])
def test_a_corrupted_result_is_an_error_everywhere(fast_lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYHVD_FAST_LANE", fast_lane)
    hvd.init()
    if hvd.rank() == 1:
        corrupt(hvd_backend())
    x = np.full(100_000, 1.0, np.float32)
    with pytest.raises(hvd.CorruptionError) as caught:
        hvd.allreduce(x, name="w1", op=hvd.Max)
    assert caught.value.name == "w1"
    assert 1 in caught.value.ranks
    assert "element 77777 of 100000 (float32)" in str(caught.value)
    assert hvd.allreduce(1, op=hvd.Sum, name="on") == hvd.size()


def hvd_backend() -> HostBackend:
    """This rank's backend of all ranks."""
    from pyhvd.engine import context

    return context.current().runtime._executor.backends[0]


def corrupt(backend: Any) -> None:
    """Make the next allreduce of a backend end with one wrong bit on this rank."""
    right = backend.allreduce

    def wrong(sources: Any, targets: Any, *rest: Any) -> None:
        right(sources, targets, *rest)
        targets[0].bytes[4 * 77_777] ^= 1
        backend.allreduce = right

    backend.allreduce = wrong
