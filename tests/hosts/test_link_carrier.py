"""Links over MPI on several hosts: the bits of TCP, and the same errors when a host is lost."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

import pyhvd as hvd
from tests.hosts.faults import KINDS, SHAPES as FAULT_SHAPES, SLACK_S, Fault, faulty_site, try_fault
from tests.hosts.jobs import HostsJob, name_of
from tests.hosts.programs import random_round, run_round
from tests.mpi.harness import hear_log

SHAPES = [(1, 1), (2, 2), (3, 1), (1, 1, 1, 1)]


def compare_carriers(shape: Sequence[int]) -> None:
    """Run the same rounds by both carriers; each round checks its results."""
    told = hear_log()
    everyone = tuple(range(sum(shape)))
    found = []
    for carrier in ("tcp", "mpi"):
        os.environ["PYHVD_LINK_CARRIER"] = carrier
        hvd.init()
        sets = {everyone: hvd.global_process_set}
        digests: dict[str, str] = {}
        for index in range(3):
            digests |= run_round(random_round(random.Random(index), [everyone], f"carried.{index}"), sets)
        found.append(digests)
        hvd.shutdown()
    del os.environ["PYHVD_LINK_CARRIER"]
    assert not any("use TCP" in text for text in told), told
    assert found[0] == found[1]


@pytest.mark.parametrize("job", SHAPES, indirect=True, ids=name_of)
def test_both_carriers_give_the_same_bits(job: HostsJob) -> None:
    job.run(compare_carriers, shape=job.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_that_waits_gets_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strike both shapes while links use MPI; the errors name the host, and come in time."""
    monkeypatch.setenv("PYHVD_LINK_CARRIER", "mpi")
    with faulty_site() as made:
        for seed in range(KINDS.index(kind), len(KINDS) * len(FAULT_SHAPES), len(KINDS)):
            outcome = try_fault(made, Fault.of(seed), SLACK_S)
            assert not outcome.wrong, "\n".join(outcome.wrong)
