"""Random programs on several hosts: equal bits on all ranks, of first and cached calls, and on every way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from unittest.mock import patch

import pyhvd as hvd
from tests import thinning
from tests.hosts.jobs import HostsJob
from tests.hosts.programs import run_program
from tests.ranks.verb_programs import run_program as run_verb_program

SEEDS = 4 if thinning.full else 2
WAYS = {
    "links": {"PYHVD_FAST_LANE": "1"},
    "links, by message": {"PYHVD_CACHE_CAPACITY": "0"},
    "links, few cache slots": {"PYHVD_CACHE_CAPACITY": "4"},
    "MPI": {"PYHVD_LINKS": "0"},
    "MPI, without windows": {"PYHVD_FAST_LANE": "0"},
}


def run_programs(seeds: Sequence[int], shape: Sequence[int]) -> None:
    for seed in seeds:
        found: dict[str, str] = {}
        for way, env in WAYS.items():
            with patch.dict(os.environ, env):
                hvd.init()
                for name, digest in run_program(seed, shape).items():
                    assert found.setdefault(name, digest) == digest, f"{way}: other bits of {name}"
                hvd.shutdown()


def run_verb_programs(seeds: Sequence[int]) -> None:
    hvd.init()
    for seed in seeds:
        run_verb_program(seed, 6, hvd.size())
    hvd.shutdown()


def test_programs_of_all_verbs(job: HostsJob) -> None:
    env = {"PYHVD_DYNAMIC_PROCESS_SETS": "1", "PYHVD_FAST_LANE": "1"}
    job.run(run_verb_programs, timeout=240, env=env, seeds=list(range(30 if thinning.full else 5)))


def test_programs(job: HostsJob) -> None:
    env = {"PYHVD_DYNAMIC_PROCESS_SETS": "1"}
    job.run(run_programs, timeout=120, env=env, seeds=list(range(SEEDS)), shape=job.shape)
