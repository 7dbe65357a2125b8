"""The same input gives the same bits: alone or fused, with all settings, on processes and on threads."""

from __future__ import annotations

import os

import pytest

import pyhvd as hvd
from pyhvd.testing import run_ranks
from tests.conformance import determinism
from tests.conformance.cases import Case, each, run
from tests.mpi.harness import on_ranks

pytestmark = pytest.mark.any_mpi

SETTINGS = (
    {"PYHVD_FUSION_THRESHOLD": "0"},
    {"PYHVD_FUSION_THRESHOLD": "3000"},
    {"PYHVD_CACHE_CAPACITY": "0"},
    {"PYHVD_DISABLE_GROUP_FUSION": "1", "PYHVD_CYCLE_TIME": "0"},
)


@each(determinism.CASES, 3, 4, count="nranks")
@on_ranks(warm=True)
def test_case(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("nranks", [3, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_bits() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    want = determinism.digests()
    assert determinism.digests() == want
    # Ranks as threads: another fabric, the same bits.
    assert run_ranks(size, determinism.digests, timeout=30)[rank] == want
    for env in SETTINGS:
        hvd.shutdown()
        os.environ.update(env)
        hvd.init()
        assert determinism.digests() == want, env
        for name in env:
            del os.environ[name]
