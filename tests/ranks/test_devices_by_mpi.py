"""Arrays of devices given to MPI as they are: ranks as threads, whose fabric plays an MPI that takes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.backends.gpu import cuda_mpi, select
from pyhvd.backends.gpu.nccl_init import NcclTransport
from pyhvd.devices import array_libraries
from pyhvd.observe.hooks import Instruments
from pyhvd.testing import RanksFailed, run_ranks
from pyhvd.transport.fabric import Block
from pyhvd.transport.inprocess import ThreadFabric
from tests.conformance.oracle import rows, same
from tests.devices.fake import FakeDevice, FakeLibrary, fake_array

SEEDS = range(3)
Body = Callable[[FakeDevice], Any]
Trade = Callable[..., None]

TRIED = (
    "arrays on the devices of {} ranks go by CUDA-aware MPI (Any MPI 5.0), and reductions through the host"
)
STAGED = "arrays on the devices of {} ranks go through the host: {}"
SHARED = "ranks 0, 1 share a device, cuda:0"


class Mpi:
    """What ranks have given to MPI as it lay on a device: (rank, bytes), the trial's left out."""

    def __init__(self) -> None:
        self.asked = 0
        self.sent: list[tuple[int, int]] = []
        self.phases: set[str] = set()


def no_nccl() -> Any:
    raise ImportError("there is none")


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> Mpi:
    seen = Mpi()
    trade = ThreadFabric.trade

    def takes_devices(fabric: ThreadFabric) -> str:
        seen.asked += 1
        return "Any MPI 5.0"

    def noted(
        fabric: ThreadFabric, send: Sequence[Block], recv: Sequence[Block], patience: float | None = None
    ) -> None:
        if patience is None:
            seen.sent += [(fabric.rank, len(block)) for _, block in send]
        trade(fabric, send, recv, patience)

    monkeypatch.setattr(array_libraries, "_libraries", {"tests": FakeLibrary()})
    monkeypatch.setattr(select, "CARRIERS", [NcclTransport(no_nccl)])
    monkeypatch.setattr(ThreadFabric, "takes_devices", takes_devices)
    monkeypatch.setattr(ThreadFabric, "trade", noted)
    phase = Instruments.phase

    def begun(hooks: Instruments, name: str) -> Any:
        seen.phases.add(name)
        return phase(hooks, name)

    monkeypatch.setattr(Instruments, "phase", begun)
    return seen


def on_devices(size: int, body: Body, seed: int = 0, **knobs: Any) -> list[Any]:
    """Run ``body(device)`` on ranks that share a device, each by a handle of its own, on its own stream."""
    devices = [FakeDevice(0, seed=17 * seed + r, identity="one") for r in range(size)]

    def rank_body() -> Any:
        device = devices[hvd.rank()]
        with device.using(device.make_stream()):
            return body(device)

    given = {"staging_size": 256, "cuda_aware_mpi": True, "dynamic_process_sets": True, **knobs}
    return run_ranks(size, rank_body, timeout=30, knobs=given)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "arrays on the devices" in r.getMessage()]


def mine(rank: int, *shape: int) -> Any:
    return np.random.default_rng([rank, *shape]).integers(0, 9, shape).astype(np.float32)


def total(size: int, *shape: int) -> Any:
    return np.sum([mine(r, *shape) for r in range(size)], axis=0, dtype=np.float32)


def some(device: FakeDevice) -> None:
    """Two verbs, the results of which are right."""
    r, size = hvd.rank(), hvd.size()
    same(
        hvd.allgather(fake_array(device, mine(r, 300)), name="g").get()[300 * r : 300 * r + 300], mine(r, 300)
    )
    same(hvd.allreduce(fake_array(device, mine(r, 300)), op=hvd.Sum, name="s").get(), total(size, 300))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_verb(size: int, seed: int, mpi: Mpi, caplog: pytest.LogCaptureFixture) -> None:
    def body(device: FakeDevice) -> None:
        r = hvd.rank()
        array = fake_array(device, mine(r, 7, 30))
        same(hvd.allreduce(array, op=hvd.Sum, name="a").get(), total(size, 7, 30))
        assert hvd.allreduce_(array, op=hvd.Sum, name="b", prescale_factor=2.0) is array
        same(array.get(), 2 * total(size, 7, 30))
        group = [fake_array(device, mine(r, n)) for n in (1, 300, 0, 5)]
        for output, n in zip(hvd.grouped_allreduce(group, op=hvd.Sum, name="c"), (1, 300, 0, 5), strict=True):
            same(output.get(), total(size, n))
        scattered = hvd.reducescatter(fake_array(device, mine(r, 9, 20)), op=hvd.Sum, name="d")
        same(scattered.get(), total(size, 9, 20)[rows(9, size, r)])
        on_host, halves = mine(r, 100) / 3, fake_array(device, mine(r, 100) / 3)
        same(
            hvd.allreduce(halves, op=hvd.Average, name="e").get(),
            hvd.allreduce(on_host, op=hvd.Average, name="f"),
        )
        every = [np.full((3 * q % 5, 33), q, np.int32) for q in range(size)]
        same(hvd.allgather(fake_array(device, every[r]), name="g").get(), np.concatenate(every))
        blocks = [[np.full((q + k, k), 10 * q + k, np.int16) for q in range(size)] for k in range(4)]
        outputs = hvd.grouped_allgather([fake_array(device, each[r]) for each in blocks], name="h")
        for output, each in zip(outputs, blocks, strict=True):
            same(output.get(), np.concatenate(each))
        splits = [(r + 2 * q) % 4 for q in range(size)]
        sent = np.full((sum(splits) + 2, 21), r, np.int64)
        output, received = hvd.alltoall(fake_array(device, sent), splits=splits, name="t")
        assert received.tolist() == [(q + 2 * r) % 4 for q in range(size)]
        same(output.get(), np.concatenate([np.full((n, 21), q, np.int64) for q, n in enumerate(received)]))

    with caplog.at_level(logging.INFO, "pyhvd"):
        on_devices(size, body, seed)
    (line,) = told(caplog)
    assert "go by CUDA-aware MPI (Any MPI 5.0), and reductions through the host: " in line
    assert line.endswith(
        "share a device, cuda:0" if size > 1 else "NCCL cannot be used: rank 0: there is none"
    )
    assert {rank for rank, _ in mpi.sent} == (set(range(size)) if size > 1 else set())
    moved = {f"CUDA_MPI_{verb}" for verb in ("ALLGATHER", "ALLTOALL", "ALLTOALL_COUNTS")}
    assert mpi.phases >= moved | {"STAGED_ALLREDUCE", "STAGED_REDUCESCATTER"}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_broadcast_from_every_root_in_place_and_not(size: int, mpi: Mpi) -> None:
    def body(device: FakeDevice) -> None:
        r = hvd.rank()
        for root in range(size):
            array = fake_array(device, mine(r, 501))
            same(hvd.broadcast(array, root, name=f"b{root}").get(), mine(root, 501))
            same(array.get(), mine(r, 501))
            assert hvd.broadcast_(array, root, name=f"c{root}") is array
            same(array.get(), mine(root, 501))
        assert hvd.broadcast(fake_array(device, np.zeros(0)), 0, name="none").get().size == 0

    on_devices(size, body, seed=size)
    assert len(mpi.sent) == 2 * size * (size - 1), "each rank but the root has it once"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_queued_before_the_submission_comes_first(seed: int, mpi: Mpi) -> None:
    """And what is queued behind it, on the array that was given, changes nothing."""

    def body(device: FakeDevice) -> None:
        r = hvd.rank()
        first, second = fake_array(device, mine(r, 400)), fake_array(device, np.zeros(400, np.float32))
        device.copy(second.ptr, first.ptr, 1600, device.current_stream())
        handle = hvd.allgather_async(second, name="x")
        result = handle.result()
        device.copy(second.ptr, result.ptr, 1600, device.current_stream())
        same(result.get(), np.concatenate([mine(0, 400), mine(1, 400)]))
        same(second.get(), mine(0, 400))

    on_devices(2, body, seed)


def test_a_process_set_has_a_trial_of_its_own(mpi: Mpi, caplog: pytest.LogCaptureFixture) -> None:
    def body(device: FakeDevice) -> None:
        few = hvd.add_process_set([0, 2])
        if hvd.rank() != 1:
            array = fake_array(device, mine(hvd.rank(), 200))
            got = hvd.allgather(array, process_set=few, name="x").get()
            same(got, np.concatenate([mine(0, 200), mine(2, 200)]))
        hvd.barrier()
        assert hvd.remove_process_set(few)
        some(device)

    with caplog.at_level(logging.INFO, "pyhvd"):
        on_devices(3, body)
    assert [line.partition(": ")[0] for line in told(caplog)] == [TRIED.format(2), TRIED.format(3)]


def test_ranks_that_have_joined(mpi: Mpi) -> None:
    def body(device: FakeDevice) -> None:
        r = hvd.rank()
        if r != 1:
            array = fake_array(device, mine(r, 300))
            same(hvd.allgather(array, name="a").get(), np.concatenate([mine(0, 300), mine(2, 300)]))
            same(hvd.broadcast(array, 2, name="b").get(), mine(2, 300))
        hvd.join()
        some(device)

    on_devices(3, body)


def test_not_asked_for_mpi_is_not_even_asked(mpi: Mpi, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pyhvd"):
        on_devices(2, some, cuda_aware_mpi=False)
    assert told(caplog) == [STAGED.format(2, SHARED)]
    assert not mpi.asked
    assert not mpi.sent


def test_an_mpi_that_does_not_take_devices_on_one_rank(
    mpi: Mpi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def takes_devices(fabric: ThreadFabric) -> str:
        if fabric.rank == 1:
            raise RuntimeError("Any MPI 4.0 does not say that it takes memory on CUDA devices")
        return "Any MPI 5.0"

    monkeypatch.setattr(ThreadFabric, "takes_devices", takes_devices)
    with caplog.at_level(logging.INFO, "pyhvd"):
        on_devices(2, some)
    why = (
        "CUDA-aware MPI cannot be used: rank 1: Any MPI 4.0 does not say that it takes memory on CUDA devices"
    )
    assert told(caplog) == [STAGED.format(2, f"{SHARED}; {why}")]
    assert not mpi.sent


def test_threads_have_no_mpi(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(array_libraries, "_libraries", {"tests": FakeLibrary()})
    with caplog.at_level(logging.INFO, "pyhvd"):
        on_devices(2, some)
    assert "ranks that are threads of one process have no MPI between them" in told(caplog)[0]


def test_a_trial_that_brings_something_else_to_one_rank(
    mpi: Mpi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trade = ThreadFabric.trade

    def spoilt(fabric: ThreadFabric, send: Any, recv: Any, patience: float | None = None) -> None:
        trade(fabric, send, recv, patience)
        if fabric.rank == 2 and patience is not None:
            for rank, block in recv:
                block[-1] ^= rank == 1

    monkeypatch.setattr(ThreadFabric, "trade", spoilt)
    with caplog.at_level(logging.INFO, "pyhvd"):
        on_devices(3, some)
    (line,) = told(caplog)
    assert line == STAGED.format(
        3,
        "ranks 0, 1, 2 share a device, cuda:0; CUDA-aware MPI does not connect them: rank 2 of the set:"
        " ValueError: what came from rank 1 of the set is not what was sent",
    )
    assert not mpi.sent


def test_no_memory_for_the_trial_on_one_rank(mpi: Mpi, caplog: pytest.LogCaptureFixture) -> None:
    def body(device: FakeDevice) -> None:
        array = fake_array(device, mine(hvd.rank(), 300))
        if hvd.rank() == 1:
            device.limit = device.allocated + 100_000
        hvd.broadcast_(array, 0, name="x")
        same(array.get(), mine(0, 300))

    with caplog.at_level(logging.INFO, "pyhvd"):
        on_devices(2, body)
    (line,) = told(caplog)
    assert "CUDA-aware MPI does not connect them: rank 1 of the set: MemoryError: " in line
    assert not mpi.sent


def test_a_failure_of_mpi_is_an_error_on_every_rank(mpi: Mpi, monkeypatch: pytest.MonkeyPatch) -> None:
    error = type("Exception", (RuntimeError,), {"__module__": "mpi4py.MPI"})(
        "MPI_ERR_OTHER: cuIpcOpenMemHandle"
    )
    trade = ThreadFabric.trade

    def fails(fabric: ThreadFabric, send: Any, recv: Any, patience: float | None = None) -> None:
        if fabric.rank == 1 and patience is None:
            raise error
        trade(fabric, send, recv, patience)

    monkeypatch.setattr(ThreadFabric, "trade", fails)

    def body(device: FakeDevice) -> None:
        hvd.allgather(fake_array(device, mine(hvd.rank(), 300)), name="x")

    with pytest.raises(RanksFailed) as caught:
        on_devices(2, body)
    assert sorted(caught.value.errors) == [0, 1]
    text = "allgather 'x': MPI reported: MPI_ERR_OTHER: cuIpcOpenMemHandle"
    assert isinstance(caught.value.errors[1], hvd.TransportError)
    assert text in str(caught.value.errors[1])
    assert isinstance(caught.value.errors[0], hvd.HorovodInternalError)


def test_checked_results_go_through_the_host(mpi: Mpi) -> None:
    on_devices(2, some, check="results")
    assert not mpi.sent


def test_messages_of_the_trial_are_of_the_sizes_that_mpi_sends_differently() -> None:
    assert cuda_mpi.TRIAL_SIZES[0] < 1024
    assert cuda_mpi.TRIAL_SIZES[-1] > 128 * 1024
