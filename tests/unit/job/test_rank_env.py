"""The variables that are set for a rank."""

from __future__ import annotations

import pytest

from pyhvd.job.generation_env import Generation
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, RankEnv, set_defaults

_ELASTIC = Generation(3).variables()


@pytest.mark.parametrize(
    ("launcher", "given", "found"),
    [
        (MPICH, _ELASTIC, "^sm"),
        (MPICH, _ELASTIC | {"UCX_TLS": "tcp,self"}, "tcp,self"),
        (MPICH, {}, None),
        (OPENMPI, _ELASTIC, None),
    ],
)
def test_ranks_of_elastic_jobs_get_no_shared_memory_of_ucx(
    launcher: str, given: dict[str, str], found: str | None
) -> None:
    environ = dict(given)
    set_defaults(RankEnv(launcher, 0, 4, 0, 4), environ)
    assert environ.get("UCX_TLS") == found
