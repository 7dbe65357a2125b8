"""Allreduces in two levels, on threads: several hosts without links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.arrays import Bytes
from pyhvd.backends.base import Pieces
from pyhvd.backends.host import HostBackend
from pyhvd.backends.two_level import PIECE_MOST, TwoLevelBackend, piece_across
from pyhvd.dtypes import ReduceSpec
from pyhvd.engine.context import current
from pyhvd.testing import run_ranks
from pyhvd.transport.fabric import Fabric
from pyhvd.transport.inprocess import ThreadFabric
from pyhvd.transport.shm import ShmFabric
from tests.conformance import joining, sets
from tests.conformance.cases import SECONDS, Case, Cases, each, on_threads, outcome
from tests.ranks.test_aborts import check_error

EVEN = ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2])
SIZES = (1, 2, 5, 1000, 16_384, 100_001)  # below and above what a rail reduces in one step


def backend() -> HostBackend:
    found: HostBackend = current().runtime._executor.backends[0]
    return found


def reduced(
    knobs: dict[str, Any], hosts: Sequence[int], sizes: Sequence[int]
) -> tuple[type, list[list[bytes]]]:
    """Return the class of the backend, and the bytes of each rank's results."""

    def rank() -> tuple[type, list[bytes]]:
        random = np.random.default_rng(hvd.rank())
        found = []
        for dtype in (np.float16, np.float32, np.complex64, np.int32):
            arrays = [(random.standard_normal(n) * 9).astype(dtype) for n in sizes]
            for op in (hvd.Sum, hvd.Max) if dtype is not np.complex64 else (hvd.Sum,):
                name = f"{np.dtype(dtype)}.{op}"
                single = [hvd.allreduce(a, name=f"{name}.{i}", op=op) for i, a in enumerate(arrays)]
                grouped = hvd.grouped_allreduce(arrays, name=f"{name}.grouped", op=op)
                found += [each.tobytes() for each in (*single, *grouped)]
        for precision in (np.float16, np.float64):
            scaled = hvd.allreduce(
                (random.standard_normal(999) * 9).astype(precision),
                name=f"scaled.{np.dtype(precision)}",
                op=hvd.Average,
                prescale_factor=0.7,
                postscale_factor=3,
            )
            found.append(scaled.tobytes())
        kind = type(backend())
        hvd.barrier()
        return kind, found

    results = run_ranks(len(hosts), rank, timeout=SECONDS, knobs=knobs, hosts=list(hosts))
    return results[0][0], [found for _, found in results]


@pytest.mark.parametrize("hosts", EVEN, ids=str)
@pytest.mark.parametrize(("staging_size", "sizes"), [(100, SIZES[:4]), (1 << 16, SIZES)])
def test_bits_are_those_of_one_level(hosts: list[int], staging_size: int, sizes: tuple[int, ...]) -> None:
    kind, found = reduced({"links": False, "staging_size": staging_size}, hosts, sizes)
    flat, expected = reduced({"fast_lane": False, "staging_size": staging_size}, hosts, sizes)
    assert (kind, flat) == (TwoLevelBackend, HostBackend)
    assert found == expected
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 1], [0, 1, 2]], ids=str)
def test_hosts_that_differ_and_ranks_that_are_alone_have_one_level(hosts: list[int]) -> None:
    kind, found = reduced({"links": False}, hosts, SIZES)
    assert kind is HostBackend
    assert all(each == found[0] for each in found)


@each(Cases([*joining.CASES, *joining.IN_SETS, *sets.DYNAMIC]), 4)
def test_case(case: Case, size: int) -> None:
    on_threads(case, size, [0, 0, 1, 1], links=False, dynamic_process_sets=True)


def test_a_host_without_shared_memory_uses_mpi_on_both_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyhvd.backends.two_level.Segment", type("Other", (), {}))

    def rank() -> tuple[float, bool]:
        total = hvd.allreduce(np.full(100_000, hvd.rank()), name="a", op=hvd.Sum)
        two = backend()
        assert isinstance(two, TwoLevelBackend)
        hvd.barrier()
        return float(total.max()), isinstance(two._local, ShmFabric)

    found = run_ranks(4, rank, timeout=SECONDS, knobs={"links": False}, hosts=[0, 0, 1, 1])
    assert found == [(6.0, False)] * 4


def test_pieces_grow_with_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piece_across(4 << 20, 2) == 8 << 20
    assert piece_across(4 << 20, 64) == PIECE_MOST
    assert piece_across(64 << 20, 8) == 64 << 20  # what the user asks for
    works, on_rails = HostBackend.reduce_everywhere, list[int]()

    def notes(self: HostBackend, send: Bytes, out: Bytes, spec: ReduceSpec) -> None:
        on_rails.append(len(send))
        works(self, send, out, spec)

    monkeypatch.setattr(HostBackend, "reduce_everywhere", notes)

    def rank() -> int:
        total = hvd.allreduce(np.ones(1000, np.uint8), name="a", op=hvd.Sum)
        assert total.tolist() == [4] * 1000
        size = backend().piece_size
        hvd.barrier()
        return size

    knobs = {"links": False, "staging_size": 100}
    assert run_ranks(4, rank, timeout=SECONDS, knobs=knobs, hosts=[0, 0, 1, 1]) == [200] * 4
    assert on_rails == [100] * 5 * 4


def test_sizes_change_on_both_levels_and_all_fabrics_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Fabric] = []
    for kind in (ShmFabric, ThreadFabric):

        def close(self: Any, works: Callable[[Any], None] = kind.close) -> None:
            closed.append(self)
            works(self)

        monkeypatch.setattr(kind, "close", close)

    def rank() -> tuple[tuple[int, int, int], list[Fabric]]:
        two = backend()
        assert isinstance(two, TwoLevelBackend)
        assert isinstance(two._local, ShmFabric)
        hvd.barrier()
        two.resize(Pieces(1 << 14, 1 << 15))  # on all ranks, between the same two collectives
        sizes = two._local.window.chunk, two.piece_size, two._rail.piece_size
        total = hvd.allreduce(np.ones(100_000), name="a", op=hvd.Sum)
        assert total.tolist() == [4.0] * 100_000
        hvd.barrier()
        return sizes, [two._local, two._local.inner, two._rail.fabric, two.fabric]

    for sizes, fabrics in run_ranks(4, rank, timeout=SECONDS, knobs={"links": False}, hosts=[0, 0, 1, 1]):
        assert sizes == (1 << 14, 1 << 16, 1 << 15)
        assert all(fabric in closed for fabric in fabrics)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_failure_reaches_the_ranks_that_wait_on_either_level(
    victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, failing = HostBackend.reduce_everywhere, [False]

    def breaks(self: HostBackend, *arguments: Any) -> None:
        if failing[0] and hvd.rank() == victim:
            raise MemoryError("no room")
        works(self, *arguments)

    monkeypatch.setattr(HostBackend, "reduce_everywhere", breaks)

    def rank() -> None:
        hvd.allreduce(np.ones(5), name="a", op=hvd.Sum)
        hvd.barrier()
        failing[0] = True
        check_error(outcome(lambda: hvd.allreduce(np.ones(100_000), name="b")), victim=victim)

    run_ranks(4, rank, timeout=SECONDS, knobs={"links": False}, hosts=[0, 0, 1, 1])
