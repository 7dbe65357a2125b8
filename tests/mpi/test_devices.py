"""Arrays on devices between real processes: through the window, and through MPI."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.backends.gpu import cuda_mpi
from pyhvd.devices import array_libraries
from pyhvd.transport.mpi import fabric
from pyhvd.transport.mpi.fabric import MpiFabric
from pyhvd.transport.mpi.probe import cuda_aware
from tests.devices.fake import FakeDevice, FakeLibrary, fake_array
from tests.mpi.harness import hear_log, on_ranks, run_function

PIECE = "65536"


def _verbs(way: str = "through the host", why: str = "ranks {} share a device, cuda:0") -> None:
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
        reason = why.format(", ".join(map(str, range(size))))
        assert lines == [f"arrays on the devices of {size} ranks go {way}: {reason}"]


@on_ranks(1, 2, 4, env={"PYHVD_STAGING_SIZE": PIECE})
def test_through_the_window() -> None:
    _verbs()


@on_ranks(2, 3, env={"PYHVD_STAGING_SIZE": PIECE, "PYHVD_FAST_LANE": "0"})
def test_through_mpi() -> None:
    _verbs()


BY_MPI = {"PYHVD_CUDA_AWARE_MPI": "1", "PYHVD_STAGING_SIZE": PIECE}
PLAYED = "by CUDA-aware MPI (the one under test), and reductions through the host"


@on_ranks(2, 3, 4, env=BY_MPI)
def test_by_an_mpi_that_takes_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, which takes the fake device's memory."""
    monkeypatch.setattr(MpiFabric, "takes_devices", lambda _: "the one under test")
    _verbs(PLAYED)


@on_ranks(2, env={**BY_MPI, "PYHVD_FAST_LANE": "0", "PYHVD_MPI_THREADS_DISABLE": "1"})
def test_blocks_longer_than_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MpiFabric, "takes_devices", lambda _: "the one under test")
    monkeypatch.setattr(fabric, "LARGEST", 10_000)
    _verbs(PLAYED)


@on_ranks(2, env=BY_MPI, alone=True)
def test_a_trial_that_does_not_end_leaves_nobody_behind() -> None:
    """One rank takes no part in it: what the other has sent stays on its way for ever."""
    array_libraries.register("tests", FakeLibrary())
    told = hear_log()
    hvd.init()
    logging.getLogger("pyhvd").setLevel(logging.INFO)
    MpiFabric.takes_devices = lambda _: "the one under test"  # type: ignore[assignment, method-assign]
    cuda_mpi.TRIAL_S = 0.3

    def fails(*given: object) -> None:
        raise OSError("cuIpcOpenMemHandle: invalid device context")

    if hvd.rank() == 1:
        MpiFabric.trade = fails  # type: ignore[assignment, method-assign]
    device = FakeDevice(0, seed=hvd.rank(), identity="one for all")
    with device.using(device.make_stream()):
        got = hvd.broadcast(fake_array(device, np.full(200_000, hvd.rank())), 1, name="b").get()
        assert got.tolist() == [1] * 200_000
        sent = np.repeat(np.arange(2), 300_000)
        assert hvd.alltoall(sent, [300_000] * 2, name="t")[0].tolist() == [hvd.rank()] * 600_000
    if hvd.rank() == 0:
        (line,) = [line for line in told if line.startswith("arrays on the devices")]
        assert line == (
            "arrays on the devices of 2 ranks go through the host: ranks 0, 1 share a device, cuda:0;"
            " CUDA-aware MPI does not connect them: rank 0 of the set: TimeoutError: MPI has not passed the"
            " blocks on within 0.3 s; rank 1 of the set: OSError: cuIpcOpenMemHandle: invalid device context"
        )


@on_ranks(2, env=BY_MPI)
def test_an_mpi_that_says_it_takes_no_devices_is_given_none() -> None:
    from mpi4py import MPI

    hvd.init()
    says = cuda_aware(MPI.__file__, MPI.Get_library_version())
    if says:
        pytest.skip("this MPI is CUDA-aware")
    name, version = MPI.get_vendor()
    known = "does not say that it takes" if says is None else "says that it does not take"
    share = "ranks 0, 1 share a device, cuda:0; CUDA-aware MPI cannot be used"
    each = f"{name} {'.'.join(map(str, version))} {known} memory on CUDA devices"
    hvd.shutdown()
    _verbs(why=f"{share}: rank 0: {each}; rank 1: {each}")


@on_ranks(2)
def test_a_mismatch_of_devices() -> None:
    array_libraries.register("tests", FakeLibrary())
    hvd.init()
    device = FakeDevice()
    with pytest.raises(
        hvd.MismatchError, match=r"Mismatched devices of allreduce 'x': rank 0: cuda:0; rank 1: cpu"
    ):
        hvd.allreduce(np.ones(3) if hvd.rank() else fake_array(device, np.ones(3)), name="x")


def _broken_trade() -> None:
    from mpi4py import MPI

    array_libraries.register("tests", FakeLibrary())
    hvd.init()
    MpiFabric.takes_devices = lambda _: "the one under test"  # type: ignore[assignment, method-assign]
    device = FakeDevice(0, seed=hvd.rank(), identity="one for all")
    array = fake_array(device, np.arange(300_000))
    hvd.broadcast_(array, 0, name="whole")
    if hvd.rank() == 1:

        def broken(*given: object) -> None:
            raise MPI.Exception(MPI.ERR_TRUNCATE)

        MpiFabric.trade = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(hvd.TransportError, match=r"allgather 'cut': MPI reported: .*truncated"):
        hvd.allgather(array, name="cut")
    assert hvd.rank() == 1, "the other rank is inside MPI, and cannot be reached"
    os.write(1, b"it has its error\n")
    hvd.shutdown()


def test_messages_that_fail_end_the_job() -> None:
    """Their rank gets an error; shutting down there ends the one that waits for the rest."""
    report = run_function(2, _broken_trade, timeout=20, env=BY_MPI)
    assert not report.timed_out, report.text
    assert report.returncode != 0
    assert "it has its error" in report.output, report.text
