"""Links over MPI on several hosts: the choice, the bits of TCP, and the same errors when a host is lost."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Sequence

import pytest

import pyhvd as hvd
from pyhvd.engine import context
from pyhvd.tools.doctor import ranks
from pyhvd.transport import link_carrier
from tests.bed import bed, why_not
from tests.hosts.faults import KINDS, SHAPES as FAULT_SHAPES, SLACK_S, Fault, faulty_site, try_fault
from tests.hosts.jobs import HostsJob, name_of
from tests.hosts.launch import Site
from tests.hosts.programs import random_round, run_round
from tests.mpi.harness import hear_log

SHAPES = [(1, 1), (2, 2), (3, 1), (1, 1, 1, 1)]
# Links use the first network of a bed with two, MPI the second.
LINKS, MPI = 0, 1
_INTERFACE_OF_MPI = dict.fromkeys(("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include"), "eth1")


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


def check_the_choice(taken: str) -> None:
    """Call init() as on fast networks: all ranks use the same carrier, for the same reason."""
    from mpi4py import MPI

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_carrier, "has_fast_network", lambda: True)
        hvd.init()
    (choice,) = set(MPI.COMM_WORLD.allgather(context.current().carrier))
    hvd.shutdown()
    assert re.fullmatch(rf"{taken}: 1 MiB takes \S+ ms by TCP, \S+ ms by MPI", choice), choice


@pytest.fixture(scope="module")
def two_networks(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if reason := why_not("1gbit"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("two_networks")
    with bed(["h0", "h1", "h2"], folder, nics=2) as made:
        yield Site(made, folder)


def test_the_carrier_with_the_faster_network_is_taken(two_networks: Site) -> None:
    made = HostsJob(two_networks, (2, 1, 1), _INTERFACE_OF_MPI)
    for slow, taken in ((LINKS, "MPI"), (MPI, "TCP")):
        two_networks.bed.limit("100mbit", [slow])
        made.run(check_the_choice, env={"PYHVD_LINK_INTERFACES": "eth0"}, taken=taken)
        two_networks.bed.limit("", [slow])
    made.finish()


def check_the_doctor() -> None:
    """Run the doctor's trial with small tensors, without a fast network on one host."""
    from mpi4py import MPI

    fast = MPI.COMM_WORLD.Get_rank() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "RING_SIZES", [1])
        patch.setattr(ranks, "LARGE_BYTES", 1 << 20)
        patch.setattr(link_carrier, "has_fast_network", lambda: fast)
        found = ranks.measure(lambda stage: None)
    assert found.carrier.startswith("TCP: not every host has InfiniBand"), found.carrier
    assert [lane.name for lane in found.lanes] == ["MPI", "links"]


@pytest.mark.parametrize("job", [(1, 1)], indirect=True, ids=name_of)
def test_the_doctor_says_why_tcp_is_used(job: HostsJob) -> None:
    job.run(check_the_doctor)
