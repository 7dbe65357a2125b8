"""Arrays on devices between real processes: through the window, and through MPI."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.common.text import describe_ranks
from pyhvd.devices import array_libraries
from pyhvd.transport.mpi import fabric
from pyhvd.transport.mpi.fabric import MpiFabric
from tests.devices.fake import FakeDevice, FakeLibrary, fake_array
from tests.mpi.harness import hear_log, on_ranks, run_function

PIECE = "65536"


def _verbs() -> None:
    array_libraries.register("tests", FakeLibrary())
    told = hear_log()
    hvd.init()
    logging.getLogger("pyhvd").setLevel(logging.INFO)
    rank, size = hvd.rank(), hvd.size()
    device = FakeDevice(0, seed=rank, identity="one for all")
    with device.using(device.make_stream()):
        large = np.random.default_rng(7).standard_normal(300_000).astype(np.float32)
        for _ in range(3):
            got = hvd.allreduce(fake_array(device, large * (rank + 1)), name="large", op=hvd.Average).get()
            want = hvd.allreduce(large * (rank + 1), name="large.host", op=hvd.Average)
            assert got.tobytes() == want.tobytes()
        counts = (1, 3000, 7, 50_000)
        group = [fake_array(device, np.full(n, rank, np.int64)) for n in counts]
        for n, part in zip(counts, hvd.grouped_allreduce(group, name="g", op=hvd.Sum), strict=True):
            assert part.get().tolist() == [size * (size - 1) // 2] * n
        rows = fake_array(device, np.full((rank + 1, 20_000), rank, np.int16))
        gathered = hvd.allgather(rows, name="a").get()
        assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
        assert (gathered == gathered[:, :1]).all()
        assert (
            hvd.broadcast_(fake_array(device, np.full(90_000, rank)), size - 1, name="b").get()[-1]
            == size - 1
        )
        part = hvd.reducescatter(fake_array(device, np.arange(100_001.0)), name="r", op=hvd.Sum).get()
        assert part[0] % size == 0
        sent = np.repeat(np.arange(size) + 10 * rank, 40_000)
        received, splits = hvd.alltoall(fake_array(device, sent), [40_000] * size, name="t")
        assert splits.tolist() == [40_000] * size
        assert received.get()[::40_000].tolist() == [rank + 10 * r for r in range(size)]
    lines = [line for line in told if line.startswith("arrays on the devices")]
    assert len(lines) == (rank == 0)
    if rank == 0 and size > 1:
        ranks = describe_ranks(range(size))
        assert lines == [
            f"arrays on the devices of {size} ranks go through the host: {ranks} share a device, cuda:0"
        ]


@on_ranks(1, 2, 4, env={"PYHVD_STAGING_SIZE": PIECE})
def test_through_the_window() -> None:
    _verbs()


@on_ranks(2, 3, env={"PYHVD_STAGING_SIZE": PIECE, "PYHVD_FAST_LANE": "0"})
def test_through_mpi() -> None:
    _verbs()


@on_ranks(2, env={"PYHVD_STAGING_SIZE": PIECE, "PYHVD_FAST_LANE": "0", "PYHVD_MPI_THREADS_DISABLE": "1"})
def test_blocks_longer_than_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "LARGEST", 10_000)
    _verbs()


@on_ranks(2)
def test_a_mismatch_of_devices() -> None:
    array_libraries.register("tests", FakeLibrary())
    hvd.init()
    device = FakeDevice()
    with pytest.raises(
        hvd.MismatchError, match=r"Mismatched devices of allreduce 'x': rank 0: cuda:0; rank 1: cpu"
    ):
        hvd.allreduce(np.ones(3) if hvd.rank() else fake_array(device, np.ones(3)), name="x")


def _broken_exchange() -> None:
    from mpi4py import MPI

    array_libraries.register("tests", FakeLibrary())
    hvd.init()
    device = FakeDevice(0, seed=hvd.rank(), identity="one for all")
    array = fake_array(device, np.arange(300_000))
    hvd.broadcast_(array, 0, name="whole")
    if hvd.rank() == 1:

        def broken(*given: object) -> None:
            raise MPI.Exception(MPI.ERR_TRUNCATE)

        MpiFabric.exchange = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(hvd.TransportError, match=r"alltoall 'cut': MPI reported: .*truncated"):
        hvd.alltoall(array, name="cut")
    assert hvd.rank() == 1, "the other rank is inside MPI, and cannot be reached"
    os.write(1, b"it has its error\n")
    hvd.shutdown()


def test_messages_that_fail_end_the_job() -> None:
    """The rank whose messages fail gets an error; its shutdown ends the rank that waits for the others."""
    report = run_function(2, _broken_exchange, timeout=20, env={"PYHVD_FAST_LANE": "0"})
    assert not report.timed_out, report.text
    assert report.returncode != 0
    assert "it has its error" in report.output, report.text
