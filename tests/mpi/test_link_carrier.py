"""Links over MPI: the same frames and bits as over TCP, between ranks that stand for hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from pyhvd.arrays import address
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.transport.hosts import HostsFabric, open_hosts_fabric
from pyhvd.transport.links import LinkOptions
from pyhvd.transport.mpi.carrier import open_mpi_carrier
from pyhvd.transport.mpi.fabric import MpiFabric, open_mpi_window
from tests.mpi.harness import hear_log, on_ranks

CHUNK = 1 << 16
LENGTHS = (1, 33, 4096, 4097, 20_000, 33_333, 700_001)


@contextmanager
def linked(hosts: Sequence[int], carrier: str, chunk: int = CHUNK) -> Iterator[HostsFabric]:
    """Yield a fabric of all ranks; ``hosts`` has the host that each rank plays."""
    comm = MPI.COMM_WORLD.Dup()
    options = LinkOptions(timeout=30.0, carrier=carrier, open_mpi=open_mpi_carrier)
    ranks = range(comm.Get_size())
    made = open_hosts_fabric(
        MpiFabric(comm), ranks, hosts, open_mpi_window, options, chunk, chunk, agreement=False
    )
    assert isinstance(made, HostsFabric), made
    try:
        yield made
    finally:
        made.close()


def reduce(fabric: HostsFabric, values: NDArray[np.float32], inplace: bool) -> bytes:
    source = values.copy()
    target = source if inplace else np.empty_like(source)
    src, dst = (np.array([address(each.view(np.uint8))], np.int64) for each in (source, target))
    starts = np.array([0, values.size], np.int64)
    assert fabric.window.allreduce(src, dst, starts, Code.FLOAT32, ReduceOp.SUM, 1.0, 0.5)
    return target.tobytes()


def results(hosts: Sequence[int], carrier: str) -> list[bytes]:
    rng = np.random.default_rng(hosts[MPI.COMM_WORLD.Get_rank()] + 10 * MPI.COMM_WORLD.Get_rank())
    with linked(hosts, carrier) as fabric:
        assert (fabric.choice.mpi is not None) == (carrier == "mpi")
        return [
            reduce(fabric, rng.standard_normal(length).astype(np.float32), inplace)
            for _ in range(3)
            for length in LENGTHS
            for inplace in (True, False)
        ]


@pytest.mark.parametrize("shape", ["apart", "first host has two"])
@on_ranks(3, 4)
def test_mpi_gives_the_bits_of_tcp(nranks: int, shape: str) -> None:
    hosts = list(range(nranks))
    if shape != "apart":
        hosts[1] = 0
    found = results(hosts, "mpi")
    assert found == results(hosts, "tcp")
    assert all(each == found for each in MPI.COMM_WORLD.allgather(found))


@on_ranks(2)
def test_many_operations_one_behind_the_other() -> None:
    """Each rank is late in turn, so frames of the next operation wait at the other one."""
    rank = MPI.COMM_WORLD.Get_rank()
    with linked([0, 1], "mpi") as fabric:
        for turn in range(300):
            values = np.full((1, 4097, 60_000)[turn % 3], turn + rank, np.float32)
            assert reduce(fabric, values, True) == np.full_like(values, turn + 0.5).tobytes()


@on_ranks(2)
def test_a_late_rank_is_waited_for_asleep() -> None:
    with linked([0, 1], "mpi") as fabric:
        for length in (100, 300_000):
            if MPI.COMM_WORLD.Get_rank() == 0:
                time.sleep(1.0)
            before = time.thread_time()
            reduce(fabric, np.ones(length, np.float32), True)
            assert time.thread_time() - before < 0.3


@on_ranks(2)
def test_a_warning_says_why_mpi_cannot_carry() -> None:
    told = hear_log()
    comm = MPI.COMM_WORLD.Dup()
    options = LinkOptions(timeout=30.0, carrier="mpi")
    made = open_hosts_fabric(
        MpiFabric(comm), [0, 1], [0, 1], open_mpi_window, options, CHUNK, CHUNK, agreement=False
    )
    assert isinstance(made, HostsFabric), made
    assert made.choice.mpi is None
    made.close()
    wanted = "the links between the hosts of 2 ranks use TCP: the ranks are not processes of MPI"
    assert told == ([wanted] if MPI.COMM_WORLD.Get_rank() == 0 else [])
