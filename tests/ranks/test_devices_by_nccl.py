"""Test every verb on arrays of devices by a fake NCCL; all code between the caller and NCCL is real."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.backends.gpu import nccl_init, select
from pyhvd.backends.gpu.nccl import NcclBackend
from pyhvd.backends.gpu.nccl_init import open_nccl
from pyhvd.devices import array_libraries
from pyhvd.devices.base import DeviceContext
from pyhvd.testing import RanksFailed, run_ranks
from pyhvd.transport.fabric import Fabric
from tests.conformance.oracle import rows, same
from tests.devices import fake_nccl
from tests.devices.fake import FakeLibrary, fake_array
from tests.devices.fake_nccl import FakeNccl, NcclError, PeerDevice

SIZES = (1, 2, 4)
Body = Callable[[PeerDevice], Any]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    library = FakeNccl()
    monkeypatch.setattr(array_libraries, "_libraries", {"tests": FakeLibrary()})

    def open_peer(
        fabric: Fabric, context: DeviceContext, whole: FakeNccl, by_host: Any, **options: Any
    ) -> NcclBackend:
        return open_nccl(fabric, context, whole.rank(cast(PeerDevice, context.device)), by_host, **options)

    for module in (nccl_init, select):
        monkeypatch.setattr(module, "load_library", lambda: library)
    monkeypatch.setattr(select, "open_nccl", open_peer)
    return library


def on_devices(size: int, body: Body, seed: int = 0, shared: bool = False, **knobs: Any) -> list[Any]:
    """Run ``body(device)`` on ranks that each have or share a device."""
    devices = [PeerDevice(0, seed=17 * seed + r, identity="one" if shared else f"{r}") for r in range(size)]

    def rank_body() -> Any:
        device = devices[hvd.rank()]
        with device.using(device.make_stream()):
            return body(device)

    return run_ranks(size, rank_body, timeout=30, knobs={"dynamic_process_sets": True, **knobs})


def mine(rank: int, *shape: int) -> Any:
    """Return small integers as float32, whose sums are exact in any order."""
    return np.random.default_rng([rank, *shape]).integers(0, 9, shape).astype(np.float32)


def total(size: int, *shape: int) -> Any:
    return np.sum([mine(r, *shape) for r in range(size)], axis=0, dtype=np.float32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", SIZES)
def test_every_verb(size: int, seed: int, nccl: FakeNccl) -> None:
    def body(device: PeerDevice) -> None:
        r = hvd.rank()
        array = fake_array(device, mine(r, 7, 3))
        same(hvd.allreduce(array, op=hvd.Sum, name="a").get(), total(size, 7, 3))
        same(hvd.allreduce(array, op=hvd.Average, name="b").get(), total(size, 7, 3) / np.float32(size))
        assert hvd.allreduce_(array, op=hvd.Sum, name="c", prescale_factor=2.0) is array
        same(array.get(), 2 * total(size, 7, 3))
        group = [fake_array(device, mine(r, n)) for n in (1, 300, 0, 5)]
        for output, n in zip(hvd.grouped_allreduce(group, op=hvd.Sum, name="g"), (1, 300, 0, 5), strict=True):
            same(output.get(), total(size, n))
        gathered = hvd.allgather(fake_array(device, mine(r, r + 1, 2)), name="d")
        same(gathered.get(), np.concatenate([mine(q, q + 1, 2) for q in range(size)]))
        same(hvd.broadcast(fake_array(device, mine(r, 9)), size - 1, name="e").get(), mine(size - 1, 9))
        scattered = hvd.reducescatter(fake_array(device, mine(r, 9, 2)), op=hvd.Sum, name="f")
        same(scattered.get(), total(size, 9, 2)[rows(9, size, r)])
        splits = [(r + q) % 3 for q in range(size)]
        sent, counts = hvd.alltoall(fake_array(device, mine(r, sum(splits), 2)), splits, name="h")
        taken = [(q + r) % 3 for q in range(size)]
        assert list(counts) == taken
        blocks = []
        for q in range(size):
            theirs = [(q + p) % 3 for p in range(size)]
            first = sum(theirs[:r])
            blocks.append(mine(q, sum(theirs), 2)[first : first + theirs[r]])
        same(sent.get(), np.concatenate(blocks))
        same(
            hvd.allreduce(fake_array(device, np.full(5, 300, np.int16)), op=hvd.Sum, name="i").get(),
            np.full(5, 300 * size, np.int16),
        )

    on_devices(size, body, seed)
    called = {name.split()[0] for _, name in nccl.calls}
    assert called >= {"allReduce", "broadcast"} | ({"send", "recv"} if size > 1 else set())
    assert sorted(nccl.destroyed) == list(range(size))
    assert nccl.aborted == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_average_of_16_bits_does_not_overflow(dtype: str, nccl: FakeNccl) -> None:
    most = 40000.0 if dtype == "float16" else 2.0**127

    def body(device: PeerDevice) -> None:
        values = np.full(24, most, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        one = hvd.allreduce(fake_array(device, values), name="one")
        pair = hvd.grouped_allreduce([fake_array(device, values)] * 2, name="pair")
        rows = hvd.reducescatter(fake_array(device, values), name="rows")
        for result in (one, *pair, rows):
            assert set(result.get().astype(float)) == {most}

    on_devices(4, body)


def ring_order(parts: list[Any], op: int) -> Any:
    """Sum each rank's chunk from another rank on, as NCCL's ring does."""
    assert op == FakeNccl.NCCL_SUM
    chunks = [np.array_split(part, len(parts)) for part in parts]
    turned = [[chunks[(c + k) % len(parts)][c] for k in range(len(parts))] for c in range(len(parts))]
    return np.concatenate([functools.reduce(np.add, each) for each in turned])


@pytest.mark.parametrize("fused_by", ["time", "call"])
def test_bits_do_not_depend_on_what_is_ready_at_the_same_time(
    fused_by: str, nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_nccl, "_fold", ring_order)

    def body(device: PeerDevice, *, apart: bool) -> list[Any]:
        values = np.random.default_rng(hvd.rank()).standard_normal((4, 999)).astype(np.float32)
        pairs = [[fake_array(device, each) for each in values[first : first + 2]] for first in (0, 2)]
        handles = []
        for name, pair in zip("ab", pairs, strict=True):
            if fused_by == "call":
                handles += [
                    hvd.allreduce_async_(each, op=hvd.Sum, name=f"{name}{i}") for i, each in enumerate(pair)
                ]
            else:
                handles.append(hvd.grouped_allreduce_async_(pair, op=hvd.Sum, name=name))
            if apart:
                handles[-1].result()
        for handle in handles:
            handle.result()
        return [each.get() for pair in pairs for each in pair]

    for first, second in zip(
        *(
            on_devices(3, partial(body, apart=apart), cycle_time_ms=20.0, device_fusion=fused_by)[0]
            for apart in (False, True)
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_has_joined_takes_part_with_nothing(seed: int, nccl: FakeNccl) -> None:
    def body(device: PeerDevice) -> None:
        r = hvd.rank()
        hvd.allreduce(fake_array(device, mine(r, 4)), name="warm")
        if r == 1:
            hvd.join()
            return
        for k in range(3):
            arrays = [fake_array(device, mine(r, n)) for n in (3, 50)]
            for output, n in zip(
                hvd.grouped_allreduce(arrays, op=hvd.Sum, name=f"g{k}"), (3, 50), strict=True
            ):
                same(output.get(), mine(0, n) + mine(2, n))
            same(
                hvd.allreduce(fake_array(device, -mine(r, 8) - 1), op=hvd.Max, name=f"m{k}").get(),
                np.maximum(-mine(0, 8) - 1, -mine(2, 8) - 1),
            )
        hvd.join()

    on_devices(3, body, seed)


def test_each_process_set_has_a_communicator_of_its_own(nccl: FakeNccl) -> None:
    def body(device: PeerDevice) -> None:
        r = hvd.rank()
        pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
        for k, pair in enumerate(pairs):
            if pair.included():
                array = fake_array(device, mine(r, 6))
                result = hvd.allreduce(array, op=hvd.Sum, name="x", process_set=pair)
                same(result.get(), mine(k, 6) + mine(k + 1, 6))
        hvd.remove_process_set(pairs[0])
        same(hvd.allreduce(fake_array(device, mine(r, 6)), op=hvd.Sum, name="y").get(), total(3, 6))

    on_devices(3, body)
    assert len(nccl.destroyed) == 2 + 2 + 3


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "arrays" in r.getMessage()]


def test_the_way_is_said_once(nccl: FakeNccl, caplog: pytest.LogCaptureFixture) -> None:
    def body(device: PeerDevice) -> None:
        hvd.allreduce(fake_array(device, mine(0, 4)), name="x").get()

    with caplog.at_level(logging.INFO, logger="pyhvd"):
        on_devices(2, body)
    assert said(caplog) == ["arrays on the devices of 2 ranks go by NCCL (2.32.3)"]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="pyhvd"):
        on_devices(2, body, shared=True)
    assert said(caplog) == [
        "arrays on the devices of 2 ranks go through the host: ranks 0-1 share a device, cuda:0"
    ]


def test_where_nccl_refuses_arrays_go_through_the_host(
    nccl: FakeNccl, caplog: pytest.LogCaptureFixture
) -> None:
    nccl.refuses = dict.fromkeys(range(2), NcclError("NCCL_ERROR_SYSTEM_ERROR: no socket"))

    def body(device: PeerDevice) -> None:
        same(hvd.allreduce(fake_array(device, mine(hvd.rank(), 4)), op=hvd.Sum, name="x").get(), total(2, 4))

    with caplog.at_level(logging.INFO, logger="pyhvd"):
        on_devices(2, body)
    assert said(caplog) == [
        "arrays on the devices of 2 ranks go through the host: NCCL does not connect them: rank 0 of the set:"
        " NcclError: NCCL_ERROR_SYSTEM_ERROR: no socket; rank 1 of the set: NcclError:"
        " NCCL_ERROR_SYSTEM_ERROR: no socket"
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_failure_of_nccl_on_one_rank_ends_all_and_leaves_no_device_waiting(
    seed: int, nccl: FakeNccl
) -> None:
    def body(device: PeerDevice) -> None:
        r = hvd.rank()
        hvd.allreduce(fake_array(device, mine(r, 4)), name="warm").get()
        nccl.fails_at = {1: "allReduce"}
        late = hvd.allreduce_async(fake_array(device, mine(r, 4)), name="x")
        try:
            hvd.synchronize(late)
        finally:
            event = device.make_event()
            device.record(event, device.current_stream())
            device.synchronize(event)  # the device finishes its work
        hvd.barrier()

    with pytest.raises(RanksFailed) as caught:
        on_devices(2, body, seed)
    errors = caught.value.errors
    assert isinstance(errors[1], hvd.HorovodInternalError)
    assert "NCCL_ERROR_UNHANDLED_CUDA_ERROR" in str(errors[1])
    assert isinstance(errors[0], hvd.HorovodInternalError)
    assert 1 in nccl.aborted
