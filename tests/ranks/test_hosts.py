"""Test ranks that are threads of several simulated hosts."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine.context import current
from pyhvd.testing import run_ranks
from pyhvd.transport.world import Topology
from tests.conformance.cases import SECONDS


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        ([0, 0, 1, 1], [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        ([5, 5, 5, 2], [(0, 3, 0, 2), (1, 3, 0, 1), (2, 3, 0, 1), (0, 1, 1, 2)]),
        ([0, 1, 0, 1], [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
    ],
)
def test_place_of_a_rank(hosts: list[int], places: list[tuple[int, ...]]) -> None:
    lowest = tuple(hosts.index(host) for host in hosts)
    even = len({hosts.count(host) for host in hosts}) == 1
    for rank, place in enumerate(places):
        assert astuple(Topology.of(rank, hosts)) == (rank, 4, *place, even, lowest)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 2]])
def test_collectives_and_sets_over_several_hosts(hosts: list[int]) -> None:
    def rank() -> None:
        here = hvd.rank()
        assert hvd.local_size() == hosts.count(hosts[here])
        half = hvd.add_process_set([1, 2])
        for step in range(3):
            assert hvd.allreduce(np.full(3, here), name="a", op=hvd.Sum).tolist() == [6, 6, 6]
            gathered = hvd.allgather(np.full(here + 1, step), name="b")
            assert gathered.tolist() == [step] * 10
            if here in (1, 2):
                assert hvd.allreduce(np.ones(2), name="c", op=hvd.Sum, process_set=half).tolist() == [2, 2]
        assert hvd.join() in range(4)

    run_ranks(4, rank, timeout=SECONDS, knobs={"dynamic_process_sets": True}, hosts=hosts)


def test_sets_of_several_hosts_have_links() -> None:
    def rank() -> list[str]:
        sets = [0, *(hvd.add_process_set(ranks).process_set_id or 0 for ranks in ([0, 1], [1, 2]))]
        backends = current().runtime._executor._backends
        names = [backends[each].name for each in sets if each in backends]
        hvd.barrier()
        return names

    knobs = {"dynamic_process_sets": True}
    assert run_ranks(4, rank, timeout=SECONDS, knobs=knobs, hosts=[0, 0, 1, 1])[1] == [
        "LINKS",
        "SHM",
        "LINKS",
    ]


def test_each_rank_needs_a_host() -> None:
    with pytest.raises(ValueError, match="hosts has 2 numbers, but needs one for each of 3 ranks"):
        run_ranks(3, lambda: None, hosts=[0, 1])
