"""Every verb on CuPy arrays: one rank by NCCL, two and four ranks on one device through the host."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.oracle import rows
from tests.mpi.harness import on_ranks


def mine(rank: int, *shape: int) -> Any:
    """Return small integers as float32, whose sums are exact in any order."""
    return np.random.default_rng([rank, *shape]).integers(0, 9, shape).astype(np.float32)


def total(size: int, *shape: int) -> Any:
    return np.sum([mine(r, *shape) for r in range(size)], axis=0, dtype=np.float32)


def same(got: Any, want: Any) -> None:
    import cupy

    assert isinstance(got, cupy.ndarray)
    np.testing.assert_array_equal(got.get(), want)


def spin_kernel() -> Any:
    """Return a kernel that runs for ``n`` clocks."""
    import cupy

    return cupy.RawKernel(
        'extern "C" __global__ void spin(long long n, float *x)'
        " { long long t = clock64(); while (clock64() - t < n); x[0] += 1; }",
        "spin",
    )


@on_ranks(1, 2, 4, timeout=120)
def test_every_verb() -> None:
    import cupy

    hvd.init()
    r, size = hvd.rank(), hvd.size()
    with cupy.cuda.Stream(non_blocking=True):
        array = cupy.asarray(mine(r, 7, 3))
        same(hvd.allreduce(array, op=hvd.Sum, name="a"), total(size, 7, 3))
        same(hvd.allreduce(array, op=hvd.Average, name="b"), total(size, 7, 3) / np.float32(size))
        assert hvd.allreduce_(array, op=hvd.Sum, name="c", prescale_factor=2.0) is array
        same(array, 2 * total(size, 7, 3))
        counts = (1, 300, 0, 5, 4_000_000)
        group = [cupy.asarray(mine(r, n)) for n in counts]
        for output, n in zip(hvd.grouped_allreduce(group, op=hvd.Sum, name="g"), counts, strict=True):
            same(output, total(size, n))
        gathered = hvd.allgather(cupy.asarray(mine(r, r + 1, 2)), name="d")
        same(gathered, np.concatenate([mine(q, q + 1, 2) for q in range(size)]))
        same(hvd.broadcast(cupy.asarray(mine(r, 9)), size - 1, name="e"), mine(size - 1, 9))
        scattered = hvd.reducescatter(cupy.asarray(mine(r, 9, 2)), op=hvd.Sum, name="f")
        same(scattered, total(size, 9, 2)[rows(9, size, r)])
        blocks = hvd.alltoall(cupy.asarray(mine(r, 2 * size, 3)), [2] * size, name="h")[0]
        same(blocks, np.concatenate([mine(q, 2 * size, 3)[2 * r : 2 * r + 2] for q in range(size)]))
        wide = cupy.asarray(mine(r, 6, 6))
        hvd.allreduce_(wide[:, ::2], op=hvd.Sum, name="view")
        same(wide[:, ::2].copy(), total(size, 6, 6)[:, ::2])


@on_ranks(1, 2, timeout=120)
@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "int16", "uint64", "bool", "complex64"])
def test_dtypes(dtype: str) -> None:
    import cupy

    hvd.init()
    op = hvd.Max if dtype == "bool" else hvd.Sum
    parts = [mine(r, 99).astype(dtype) for r in range(hvd.size())]
    want = np.maximum.reduce(parts) if dtype == "bool" else np.sum(parts, axis=0, dtype=dtype)
    same(hvd.allreduce(cupy.asarray(parts[hvd.rank()]), op=op, name="x"), want)


@on_ranks(2, timeout=120)
def test_host_and_device_under_one_name_is_a_mismatch_on_both() -> None:
    import cupy

    hvd.init()
    array = cupy.ones(4, np.float32) if hvd.rank() else np.ones(4, np.float32)
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce(array, name="x")


@on_ranks(1, 2, timeout=120)
def test_torch_tensors_come_back_as_such() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    hvd.init()
    tensor = torch.full((1000,), float(hvd.rank() + 1), device="cuda")
    result = hvd.allreduce(tensor, op=hvd.Sum, name="x")
    assert isinstance(result, torch.Tensor)
    assert result.is_cuda
    assert bool((result == sum(range(1, hvd.size() + 1))).all())


@on_ranks(1, timeout=120)
def test_a_submission_neither_waits_for_the_callers_stream_nor_holds_it_up() -> None:
    """A long kernel is queued first; only work that needs its result may wait for it."""
    import cupy

    hvd.init()
    spin = spin_kernel()
    hvd.allreduce(cupy.ones(1000, np.float32), name="warm").get()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.ones(1000, np.float32)
        other = cupy.zeros(1, np.float32)
        spin((1,), (1,), (np.int64(1), other))
        stream.synchronize()
        spin((1,), (1,), (np.int64(400_000_000), array))  # at least 0.2 s
        begun = time.perf_counter()
        handle = hvd.allreduce_async(array, op=hvd.Sum, name="x")
        spin((1,), (1,), (np.int64(1), other))
        behind = cupy.cuda.Event()
        behind.record(stream)
        submitted = time.perf_counter() - begun
        result = hvd.synchronize(handle)
        waited = time.perf_counter() - begun
        assert not behind.done, "the kernel ended too early for this test"
        assert submitted < 0.05
        assert waited < 0.15
        np.testing.assert_array_equal(result.get()[:2], [2.0, 1.0])


@on_ranks(1, timeout=120)
def test_a_result_is_whole_as_long_as_another_stream_reads_it() -> None:
    """The result is dropped while its stream is held up, and the submitting stream allocates and writes."""
    import cupy

    hvd.init()
    count = 4_000_000
    spin = spin_kernel()
    values = cupy.arange(count, dtype=np.float32)
    cupy.full(count, 7, np.float32).copy().get()
    spin((1,), (1,), (np.int64(1), cupy.zeros(1, np.float32)))
    cupy.cuda.Stream.null.synchronize()
    submits, uses = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with submits:
        handle = hvd.allreduce_async(values, op=hvd.Sum, name="x")
    with uses:
        spin((1,), (1,), (np.int64(400_000_000), cupy.zeros(1, np.float32)))
        result = hvd.synchronize(handle)
        seen = result.copy()
    del result, handle
    with submits:
        hvd.allreduce(cupy.ones(1, np.float32), name="y")  # pyhvd releases the arrays that it kept alive
        others = [cupy.full(count, 7, np.float32) for _ in range(4)]
    with uses:
        np.testing.assert_array_equal(seen.get(), np.arange(count, dtype=np.float32))
    del others


@on_ranks(1, timeout=120)
def test_submitting_takes_microseconds() -> None:
    import cupy

    hvd.init()
    arrays = [cupy.ones(1000, np.float32) for _ in range(50)]
    for submit in (hvd.allreduce_async, hvd.allreduce_async_):
        times = []
        for _ in range(20):
            handles = []
            for i, array in enumerate(arrays):
                begun = time.perf_counter()
                handles.append(submit(array, name=f"t{i}"))
                times.append(time.perf_counter() - begun)
            for handle in handles:
                hvd.synchronize(handle)
        assert statistics.median(times[len(arrays) :]) < 20e-6, submit.__name__


@on_ranks(1, timeout=120)
def test_captures_of_graphs_are_refused_here_and_left_alone_elsewhere() -> None:
    import cupy

    hvd.init()
    count, stream = cupy.zeros(1, np.float32), cupy.cuda.Stream(non_blocking=True)
    for k in range(20):  # pyhvd's thread asks for events and allocates while this thread captures
        handle = hvd.grouped_allreduce_async([cupy.ones(1_000_000, np.float32)] * 2, name=f"x{k}")
        with stream:
            stream.begin_capture()
            count += 1
            with pytest.raises(RuntimeError, match="outside of the capture"):
                hvd.allreduce(count, name="captured")
            graph = stream.end_capture()
        graph.launch(stream)
        hvd.synchronize(handle)
    stream.synchronize()
    same(count, [20])


@on_ranks(1, timeout=120)
def test_asking_for_events_leaves_no_error_on_the_thread() -> None:
    import cupy

    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")

    def launch(_: Any) -> None:
        seen.append(float((torch.ones(3, device="cuda") + 1).sum()))  # checks the thread's last error

    hvd.init()
    seen: list[float] = []
    spin = spin_kernel()
    for k in range(5):
        spin((1,), (1,), (np.int64(400_000_000), cupy.zeros(1, np.float32)))
        busy = hvd.allreduce_async(cupy.ones(4, np.float32), name=f"busy{k}")
        busy.wait()
        time.sleep(0.05)  # pyhvd's thread hears that the work has not ended
        handle = hvd.allreduce_async(cupy.ones(4, np.float32), name=f"next{k}")
        handle.add_done_callback(launch)
        hvd.synchronize(handle)
        hvd.synchronize(busy)
    assert seen == [6.0] * 5
