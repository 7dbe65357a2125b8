"""Hosts with IPv6 alone, and hosts without room in /dev/shm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine.context import current
from tests.bed import bed
from tests.conformance import movements, reductions
from tests.conformance.cases import Case, run
from tests.hosts.jobs import HostsJob, name_of
from tests.hosts.launch import Site
from tests.hosts.programs import run_program
from tests.mpi.harness import hear_log

SHAPE = (1, 2)
TIGHT = "h1"  # the host without room in /dev/shm
NAMES = ("every_dtype_and_op-allreduce_async", "every_dtype_gathered-allgather_async")
CASES = [case for case in (*reductions.CASES, *movements.CASES) if case.name in NAMES]
DYNAMIC = {"PYHVD_DYNAMIC_PROCESS_SETS": "1"}


def finished(job: HostsJob) -> Iterator[HostsJob]:
    yield job
    job.finish()


@pytest.fixture(scope="module")
def ipv6_job(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsJob]:
    folder = tmp_path_factory.mktemp("ipv6")
    with bed(["h0", "h1"], folder, ipv4=False) as made:
        yield from finished(HostsJob(Site(made, folder), SHAPE))


@pytest.fixture(scope="module", params=[SHAPE, SHAPE[::-1]], ids=name_of)
def tight_job(
    request: pytest.FixtureRequest, site: Site, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostsJob]:
    """A job whose second host, with two ranks or one, has no room in /dev/shm once MPI has started."""
    folder = tmp_path_factory.mktemp("tight")
    with bed(["h0", TIGHT], folder) as made:
        job = HostsJob(Site(made, folder), request.param)
        job.run(start_mpi)
        made.hosts[TIGHT].do("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm")
        yield from finished(job)


def start_mpi() -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


def check_hosts_by_ipv6() -> None:
    lines = Path("/proc/net/route").read_text().splitlines()
    assert lines[1:] == [], "a host has a route for IPv4"
    run_programs(SHAPE)
    check_the_carrier("LINKS")


def check_the_carrier(name: str) -> None:
    """Check what carries the bytes of all ranks."""
    hvd.init()
    assert current().runtime._executor.backends[0].name == name
    hvd.barrier()  # the first rank to return shuts the others down


def check_that_windows_fail() -> None:
    """All ranks, and a set of two ranks on one host, have no shared memory there; the log says why."""
    told = hear_log()
    hvd.init()
    assert hvd.rank() or any("no links between the hosts of 3 ranks" in text for text in told), told
    added = hvd.add_process_set([1, 2])
    if added.included():
        total = hvd.allreduce(np.full(3, hvd.rank()), op=hvd.Sum, process_set=added)
        assert total.tolist() == [3, 3, 3]
        assert added.rank() or any("/dev/shm" in text for text in told), told
    assert hvd.remove_process_set(added)


def run_programs(shape: tuple[int, ...]) -> None:
    hvd.init()
    run_program(0, shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_by_ipv6(ipv6_job: HostsJob, case: Case) -> None:
    ipv6_job.run(run, case=case)


def test_program_by_ipv6(ipv6_job: HostsJob) -> None:
    ipv6_job.run(check_hosts_by_ipv6, env=DYNAMIC)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_without_room_for_windows(tight_job: HostsJob, case: Case) -> None:
    tight_job.run(run, case=case)


def test_one_host_without_room_for_a_window(tight_job: HostsJob) -> None:
    if tight_job.shape == SHAPE:
        tight_job.run(check_that_windows_fail, env=DYNAMIC)
    else:  # a rank alone shares no memory
        tight_job.run(check_the_carrier, name="LINKS")


def test_program_without_room_for_windows(tight_job: HostsJob) -> None:
    tight_job.run(run_programs, env=DYNAMIC, shape=SHAPE)
