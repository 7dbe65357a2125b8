"""Random programs on several hosts: equal bits on all ranks, and of first and cached calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import pyhvd as hvd
from tests.hosts.jobs import HostsJob
from tests.hosts.programs import run_program

SEEDS = 4


def run_programs(seeds: Sequence[int], shape: Sequence[int]) -> None:
    hvd.init()
    for seed in seeds:
        run_program(seed, shape)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "by message"])
def test_programs(job: HostsJob, fast: bool) -> None:
    env = {"PYHVD_DYNAMIC_PROCESS_SETS": "1", "PYHVD_FAST_LANE": str(int(fast))}
    seeds = range(SEEDS) if fast else range(SEEDS, SEEDS + 1)
    job.run(run_programs, env=env, seeds=list(seeds), shape=job.shape)
