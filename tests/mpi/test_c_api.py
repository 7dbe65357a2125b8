"""Submissions from C by call ids, between processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pyhvd as hvd
from tests.c_callers import compile_callers, id_of
from tests.mpi.harness import on_ranks

pytestmark = pytest.mark.any_mpi


@on_ranks(2)
def test_a_c_thread_submits_a_thousand_times(tmp_path: Path) -> None:
    hvd.init()
    folder = tmp_path / str(hvd.rank())
    folder.mkdir(parents=True)
    callers = compile_callers(folder)
    number = id_of("allreduce", np.ones(1, np.float32), "x", op=hvd.Sum)
    assert callers.repeat(number, 1000, waits=True) == 0
    assert callers.repeat(number, 1000, waits=False) == 0
    tensors = [np.ones(n) for n in (3, 5)]
    group = id_of("grouped_allreduce", tensors, "g", op=hvd.Sum)
    for _ in range(50):
        results = [np.zeros_like(each) for each in tensors]
        assert callers.run(group, tensors, results) == ""
        assert [each.tolist() for each in results] == [[2] * 3, [2] * 5]
    hvd.shutdown()
