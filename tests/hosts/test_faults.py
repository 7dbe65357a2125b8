"""Faults of hosts and ranks: every waiting rank gets its error in time, and nothing is left.

``make test-hosts-faults`` makes many more.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import pyhvd as hvd
from tests import thinning
from tests.bed import why_not
from tests.hosts.connections import CONNECTIONS, reset_mpi
from tests.hosts.fault_programs import LARGE, VERBS
from tests.hosts.faults import KINDS, SHAPES, SLACK_S, Fault, faulty_site, try_fault
from tests.hosts.jobs import HostsJob, Shape, name_of
from tests.hosts.launch import Site
from tests.mpi.launch import mpi_version, mpiexec_path

SEEDS = range(len(KINDS) * len(SHAPES))


@pytest.fixture(scope="module")
def faulty() -> Iterator[Site]:
    if reason := "no mpiexec" if mpiexec_path() is None else why_not():
        pytest.skip(reason)
    with faulty_site() as made:
        yield made


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"{Fault.of(seed).kind}-{seed}")
def test_every_rank_that_waits_gets_an_error(faulty: Site, seed: int) -> None:
    outcome = try_fault(faulty, Fault.of(seed), SLACK_S)
    assert not outcome.wrong, "\n".join(outcome.wrong)


SIZES = (60, 12_000, LARGE)
"""Floats: a payload, one chunk, many."""
STRUCK = [("cut", LARGE), ("kill", SIZES[0])]


@pytest.mark.any_mpi  # links give the errors; the random programs above meet each fault under both MPIs
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("kind", "length"), [(k, n) for k in KINDS for n in SIZES] if thinning.full else STRUCK
)
def test_a_fault_ends_each_verb(faulty: Site, verb: str, kind: str, length: int) -> None:
    fault = Fault(0, kind, (2, 2), host=1, rank=2, moment=0.5, verb=verb, length=length)
    outcome = try_fault(faulty, fault, SLACK_S)
    assert not outcome.wrong, "\n".join(outcome.wrong)


@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_a_reset_connection_names_both_hosts(faulty: Site, shape: Shape, connection: str) -> None:
    fault = Fault(1, "reset", shape, host=1, rank=shape[0], moment=0.5, connection=connection)
    outcome = try_fault(faulty, fault, SLACK_S)
    assert not outcome.wrong, "\n".join(outcome.wrong)


def _outlive_mpi() -> None:
    hvd.init()
    size = hvd.size()
    for name in ("a", "b"):
        assert hvd.allreduce(np.ones(1000), op=hvd.Sum, name=name)[0] == size
    hvd.barrier()
    if hvd.rank() == 1:
        assert reset_mpi() > 0
    hvd.barrier()
    for count in range(1, 200):
        out = hvd.allreduce(np.ones(1000 * count), op=hvd.Sum, name=f"new.{count}")
        assert out[-1] == size
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce(np.ones(10 + hvd.rank()), op=hvd.Sum, name="differs")
    hvd.shutdown()


def test_calls_outlive_the_connections_of_mpi(faulty: Site) -> None:
    if mpi_version().startswith("Open MPI"):
        pytest.skip("Open MPI ends the job when it finds a connection reset")
    job = HostsJob(faulty, (1, 1))
    job.run(_outlive_mpi)
    with pytest.raises(AssertionError, match="mpiexec exited with 15"):  # MPICH's MPI_Finalize fails
        job.finish()


def test_successive_seeds_have_all_kinds_and_shapes() -> None:
    faults = [Fault.of(seed) for seed in SEEDS]
    assert {(fault.kind, fault.shape) for fault in faults} == {(k, shape) for k in KINDS for shape in SHAPES}
