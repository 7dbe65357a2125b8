"""Links over MPI on several hosts: the bits of TCP, and the same errors when a host is lost."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

import pyhvd as hvd
from tests.bed import bed
from tests.hosts.faults import ReducingJob, strike
from tests.hosts.jobs import HostsJob, name_of
from tests.hosts.launch import Site
from tests.hosts.programs import random_round, run_round
from tests.hosts.test_faults import WITHIN_S
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


def test_a_lost_host_ends_the_wait(site: Site, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("carrier")
    with bed(["h0", "h1"], folder) as made:
        job = ReducingJob(Site(made, folder), (1, 2), {"PYHVD_LINK_CARRIER": "mpi"})
        try:
            job.wait_for_steps(3)
            strike(made, "cut", made.hosts["h1"], job, 2)
            ending = job.endings([0], WITHIN_S)[0]
            assert ending.error == "RankFailedError"
            assert "host h1 (ranks 1-2)" in ending.text
        finally:
            job.close()
