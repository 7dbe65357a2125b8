"""Random programs of all verbs, with process sets, threads, changed sizes and joins."""

from __future__ import annotations

import pytest

import pyhvd as hvd
from pyhvd.testing import run_ranks
from tests import thinning
from tests.ranks.verb_programs import run_program

PROGRAMS = 1000 if thinning.long else 200 if thinning.full else 40
STEPS = 6
AT_ONCE = 20
HOSTS = ([0, 1], [0, 0, 1, 1], [0, 1, 1, 2, 1], [0, 1, 0, 1], list(range(9)))
"""Programs of one job."""


def run_programs(first: int, ranks: int) -> dict[str, int]:
    for seed in range(first, first + AT_ONCE):
        run_program(seed, STEPS, ranks)
    return {verb: lanes.get("fast", 0) for verb, lanes in hvd.metrics().tensors.items()}


@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))
def test_programs(first: int) -> None:
    size = 2 + first // AT_ONCE % 3
    knobs = {"fast_lane": True, "dynamic_process_sets": True}
    for counts in run_ranks(size, run_programs, first, size, timeout=120, knobs=knobs):
        for verb in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"):
            assert counts[verb] > 0, f"no {verb} was remembered"


@pytest.mark.parametrize("chunk_size", [1 << 14, 1 << 18])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_programs_on_hosts(hosts: list[int], chunk_size: int) -> None:
    knobs = {"fast_lane": True, "dynamic_process_sets": True, "chunk_size": chunk_size}
    first, size = 5000, len(hosts)
    for _ in range(3 if thinning.long else 1):
        for counts in run_ranks(size, run_programs, first, size, timeout=180, knobs=knobs, hosts=hosts):
            for verb in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"):
                assert counts[verb] > 0, f"no {verb} was remembered"
        first += AT_ONCE


def test_programs_by_message_and_with_few_slots() -> None:
    for knobs in ({"cache_capacity": 0}, {"cache_capacity": 5}, {"fast_lane": False}):
        run_ranks(3, run_programs, 0, 3, timeout=120, knobs={"dynamic_process_sets": True, **knobs})
